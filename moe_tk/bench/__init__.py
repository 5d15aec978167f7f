"""`moe_tk bench layer`: the whole layer against its floor and against rivals, all in one run (docs/benchmarks.md)."""
