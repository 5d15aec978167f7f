"""Which session a layer gets: one for each (group, geometry), agreed by all ranks. The same for both back ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from moe_tk.errors import MoETkError
from moe_tk.group import RankGroup


class Cached(Protocol):
    """What a cache knows of a session."""

    generation: int
    poisoned: str | None
    watch: Any


S = TypeVar("S", bound=Cached)


@dataclass(frozen=True)
class Wanted:
    """What this rank asks for: `key` finds it here, `shared` must be equal on all ranks, `text` is how it reads in an error."""

    key: tuple
    shared: Any
    text: str


class SessionCache(Generic[S]):
    """Live sessions. Layers keep them alive; a session goes when its last layer goes."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakValueDictionary[tuple, S] = weakref.WeakValueDictionary()
        self._generation: dict[tuple, int] = {}

    def agree(self, group: RankGroup, wanted: Wanted, *, prepare: Callable[[], Any], make: Callable[[int], S],
              timeout_s: float) -> S:
        """The session that is wanted, made by make(generation) if any rank has none. A collective: all ranks ask together.

        prepare() builds the native module before ranks wait for each other, so that nobody times out on a compiler. Raises
        MoETkError on all ranks when they ask for different sessions.
        """
        identity = (group.name, id(group.process_group))
        key = (*identity, *wanted.key)
        session = self._sessions.get(key)
        usable = session is not None and session.poisoned is None
        with group.local_step("workspace: native module", timeout_s=timeout_s):
            prepare()
        offer = {"have": session.generation if usable else 0, "last": self._generation.get(identity, 0), "key": wanted.shared,
                 "geometry": wanted.text}
        offers = group.gather(offer, timeout_s=timeout_s, step="workspace: agree on one")
        for rank, other in enumerate(offers):
            if other["key"] != offers[0]["key"]:
                raise MoETkError(f"workspace: rank 0 asked for {offers[0]['geometry']} but rank {rank} asked for "
                                 f"{other['geometry']}: all ranks must make the same layers in the same order")
        generation = 1 + max(other["last"] for other in offers)
        if usable and all(other["have"] == offer["have"] for other in offers):
            return session
        self._generation[identity] = generation
        session = make(generation)
        weakref.finalize(session, session.watch.close)
        self._sessions[key] = session
        return session
