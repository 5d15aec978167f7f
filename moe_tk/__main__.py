"""python -m moe_tk: the same as the `moe_tk` command."""

from moe_tk.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
