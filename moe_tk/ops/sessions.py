"""Sessions of the functional ops. An op may come with any size, so ranks first agree on one.

Each group has a lobby: a session without data buffers in which ranks compare what they are about to do. What they learn
there is the same on all ranks, and so is the decision which data session to use or make.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_tk.config import env
from moe_tk.errors import MoETkError
from moe_tk.group import RankGroup, group_is_gone
from moe_tk.memory.geometry import Geometry
from moe_tk.runtime.calls import signature_of
from moe_tk.runtime.session import SESSIONS, CallHeader, Session
from moe_tk.sizes import check_positive

LOBBY = Geometry(world=1, max_tokens=1, top_k=1, num_experts=1, num_local_experts=1, hidden=8, intermediate=0, out_width=0,
                 dtype="float32", mode="tp", gathers=False, scatters=False)
WIDTH_SHIFT = 32
_held: dict[tuple, dict[Any, Session]] = {}  # per group; ops have no object that could keep them alive


@dataclass(frozen=True)
class Request:
    """What this rank is about to do. `shape` must be equal on all ranks; tokens and width may differ."""

    tokens: int
    width: int    # of this rank's part of the weights
    shape: tuple
    tensors: tuple


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of each other's requests, and this rank's own."""

    signature: int
    tokens: list[int]        # of each rank
    widths: tuple[int, ...]  # of each rank
    timeout_s: float
    tensors: tuple


def _sessions_of(group: RankGroup) -> dict[Any, Session]:
    """Sessions of this group; those of groups that have been destroyed are dropped when a new group comes."""
    key = (group.name, id(group.process_group))
    if key not in _held:
        for old in [k for k in _held if group_is_gone(*k)]:
            del _held[old]
    return _held.setdefault(key, {})


def agree(group: RankGroup, op: str, check: Callable[[], Request], *, timeout_s: float | None) -> Agreement:
    """Calls check() and compares its result with the other ranks'. A collective.

    Raises on all ranks when check() raises on one, when shapes differ, or when an earlier op on this group has failed.
    """
    sessions = _sessions_of(group)
    request, problem, seconds = None, None, env("MOE_TK_TIMEOUT_S")
    try:
        seconds = seconds if timeout_s is None else check_positive("timeout_s", timeout_s, "seconds")
        failed = [session.poisoned for session in sessions.values() if session.poisoned]
        if failed:
            raise MoETkError(f"{op}: the ops of this group are unusable since an earlier one failed: {failed[0]} To start anew, "
                             "call moe_tk.ops.release_ops_memory() on every rank.")
        request = check()
    except Exception as error:  # whatever keeps this rank from taking part, the others must hear of it
        problem = error
    if "lobby" not in sessions:
        with torch.inference_mode(False):
            sessions["lobby"] = SESSIONS.get(group, replace(LOBBY, world=group.world))
    lobby = sessions["lobby"]
    if lobby.poisoned and problem:
        raise problem
    signature = signature_of(op, request.shape) if request else 0
    with lobby.one_call(op):
        # Nothing is moved in the lobby, so the size word of its header is free to carry both numbers.
        sizes = request.tokens | request.width << WIDTH_SHIFT if request else 0
        answers = lobby.open_call(CallHeader(op, 0, signature, sizes), timeout_s=seconds, refused=str(problem) if problem else "",
                                  any_size=True)
        if problem:
            raise problem
        lobby.close_void()
    tokens = [answer & (1 << WIDTH_SHIFT) - 1 for answer in answers]
    return Agreement(signature, tokens, tuple(answer >> WIDTH_SHIFT for answer in answers), seconds, request.tensors)


def data_session(group: RankGroup, make: Callable[[int], Geometry], agreement: Agreement, most_tokens: int) -> Session:
    """The session for calls of up to most_tokens tokens of a rank, rounded up so that few are ever made.

    It is looked up by what all ranks know, their widths included, so that all of them find it or all make it.
    """
    geometry = make(1 << max(0, most_tokens - 1).bit_length())
    sessions = _sessions_of(group)
    key = (geometry, agreement.widths)
    if key not in sessions:
        with torch.inference_mode(False):
            sessions[key] = SESSIONS.get(group, geometry)
    return sessions[key]


def release_ops_memory() -> None:
    """Gives up the memory that functional ops hold. Every rank of a group must do it, or none."""
    _held.clear()
    if (cuda := _cuda_sessions()) is not None:
        cuda.release()


def synchronize(group: Any = None, *, timeout_s: float | None = None) -> None:
    """Waits for this group's ops on GPUs and raises what one of them failed with; see moe_tk.ops. On the CPU an op is done when it
    returns."""
    if (cuda := _cuda_sessions()) is not None:
        cuda.synchronize(group, timeout_s=timeout_s)


def _cuda_sessions() -> Any:
    """moe_tk.ops.cuda_sessions if an op has loaded it."""
    return sys.modules.get("moe_tk.ops.cuda_sessions")
