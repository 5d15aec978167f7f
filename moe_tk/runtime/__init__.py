"""Run-time services: the builder of the native modules, and what launches them."""
