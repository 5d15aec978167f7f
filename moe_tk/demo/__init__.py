"""What `moe_tk demo` is made of: the real layer on its real input, through every pattern, judged and shown.

options -> start (ranks) -> run (one rank: input, calls, records) -> results (merged and judged) -> report, picture, JSON.
Nothing here is needed by the layer.
"""
