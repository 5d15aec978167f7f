"""Jobs that go wrong, for the tests of the rank harness. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from moe_cases import LayerCase

kept: list[Any] = []


def keeps_a_layer(rank: int, world: int) -> None:
    """Rank 1 does not let its layer go."""
    layer = LayerCase((), ()).layer()
    if rank == 1:
        kept.append(layer)


def raises(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("this rank is wrong")


def dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


def dies_later(rank: int, world: int) -> None:
    """Rank 1 ends between this job and the next."""
    if rank == 1:
        threading.Timer(0.1, os._exit, (3,)).start()


def hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(60)


def process_id(rank: int, world: int) -> int:
    return os.getpid()
