"""Sessions of the functional ops. An op may come with any size, so ranks first agree on one.

Each group has a lobby: a session without data buffers in which ranks compare what they are about to do. What they learn
there is the same on all ranks, and so is the decision which data session to use or make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_tk.errors import ArgumentError
from moe_tk.group import RankGroup
from moe_tk.memory.geometry import Geometry
from moe_tk.runtime.session import SESSIONS, CallHeader, Session

LOBBY = Geometry(world=1, max_tokens=1, top_k=1, num_experts=1, num_local_experts=1, hidden=8, intermediate=0, out_width=0,
                 dtype="float32", mode="tp", gathers=False, scatters=False)
_held: dict[tuple, dict[Geometry | str, Session]] = {}  # per group; ops have no object that could keep them alive


def _sessions_of(group: RankGroup) -> dict[Geometry | str, Session]:
    """Sessions of this group; those of an earlier group of the same name are dropped."""
    key = (group.name, id(group.process_group))
    for old in [k for k in _held if k[0] == group.name and k != key]:
        del _held[old]
    return _held.setdefault(key, {})


def _lobby(group: RankGroup) -> Session:
    sessions = _sessions_of(group)
    if "lobby" not in sessions or sessions["lobby"].poisoned:
        sessions["lobby"] = SESSIONS.get(group, replace(LOBBY, world=group.world))
    return sessions["lobby"]


def agree(group: RankGroup, op: str, num_tokens: int, signature: int, *, timeout_s: float, problem: ArgumentError | None) -> list[int]:
    """Tokens of every rank for this call of `op`; raises on all ranks when one has a problem or another signature."""
    lobby = _lobby(group)
    with lobby.one_call(op):
        header = CallHeader(op, 0, signature, num_tokens)
        counts = lobby.open_call(header, timeout_s=timeout_s, refused=str(problem) if problem else "", any_size=True)
        if problem:
            raise problem
        lobby.close_void()
    return counts


def data_session(group: RankGroup, make: Callable[[int], Geometry], most_tokens: int) -> Session:
    """The session for calls of up to most_tokens tokens of a rank, rounded up so that few are ever made."""
    geometry = make(1 << max(0, most_tokens - 1).bit_length())
    sessions = _sessions_of(group)
    if geometry not in sessions or sessions[geometry].poisoned:
        sessions[geometry] = SESSIONS.get(group, geometry)
    return sessions[geometry]


def release_ops_memory() -> None:
    """Gives up the memory that functional ops hold. Every rank of a group must do it, or none."""
    _held.clear()
