"""A stand-in for FlashInfer, on the CPU: takes what version 0.7 takes, by the same names, and refuses what it refuses."""

from contextlib import contextmanager

from . import fused_moe, utils

__all__ = ["autotune", "fused_moe", "utils"]


@contextmanager
def autotune(tune_mode=True):
    fused_moe.STATE["tuning"] = tune_mode
    yield
    fused_moe.STATE["tuning"] = False
