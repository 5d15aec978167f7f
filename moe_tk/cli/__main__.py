"""`python -m moe_tk.cli ...`: the command without its installed script, as torchrun needs it."""

from moe_tk.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
