"""Run-time services: launches, sessions and the calls of a layer, on the CPU and over NVLink."""
