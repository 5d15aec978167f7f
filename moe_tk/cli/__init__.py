"""The `moe_tk` command: `main` dispatches to one module per subcommand."""
