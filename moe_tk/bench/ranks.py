"""The ranks of a run as the benchmark needs them: where they meet, and how they tell each other numbers. Every wait bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_tk.group import resolve_group

WAIT_S = 120.0  # of a meeting: a rank may be building, tuning, or capturing


class Ranks:
    """The default process group, from this rank."""

    def __init__(self, device: torch.device) -> None:
        self.group = resolve_group(None)
        self.world, self.rank, self.device = self.group.world, self.group.rank, device
        self.process_group = self.group.process_group
        self._token = torch.zeros(1, device=device)

    def exchange(self, numbers: Sequence[float], step: str) -> list[list[float]]:
        """Every rank's numbers, in rank order; all ranks give equally many."""
        if self.world == 1:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        self.group.wait(lambda: dist.all_gather(everyone, mine, group=self.process_group, async_op=True), timeout_s=WAIT_S,
                        step=f"bench: {step}")
        return [numbers.tolist() for numbers in everyone]

    def agree(self, reason: str | None, step: str) -> str | None:
        """The first reason that any rank has, named after it; None if no rank has one."""
        reasons = self.group.gather(None if reason is None else reason[:500], timeout_s=WAIT_S, step=f"bench: {step}")
        found = [(rank, text) for rank, text in enumerate(reasons) if text is not None]
        if not found:
            return None
        rank, text = found[0]
        return text if len(found) == self.world else f"rank {rank}: {text}"

    def meet(self) -> None:
        """CUDA: launches a small all-reduce, whose end is on all ranks at once. CPU: a barrier."""
        if self.world == 1:
            return
        if self.device.type == "cuda":
            dist.all_reduce(self._token, group=self.process_group)
        else:
            self.exchange([0.0], "meet")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def failure(self, body: Any, step: str) -> tuple[Any, str | None]:
        """(what body() returns, None), or (None, why it failed on some rank): all ranks go on alike."""
        value, reason = None, None
        try:
            value = body()
        except Exception as error:  # whatever a rival raises: it goes into the table
            reason = describe(error)
        reason = self.agree(reason, step)
        return (None if reason else value), reason


def describe(error: BaseException) -> str:
    """One line: kind and first line of the text."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if type(error).__name__ == "NotAvailable" else f"{type(error).__name__}: {first}"
