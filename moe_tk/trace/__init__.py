"""Traces: who did what when inside a call. Recorded by stamps in the kernels, or by the CPU back end, and written as a Perfetto
trace, a table and a picture. `moe_tk trace` is the command; docs/trace.md says how to read the results."""
