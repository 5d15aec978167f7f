"""What a person asks for: the one place that says whose wish about the protocol counts, and which names exist."""

from __future__ import annotations

from moe_tk.config import env
from moe_tk.errors import ArgumentError

PROTOCOLS = ("nvlink", "pcie", "staged", "shm")
ARGUMENT = "the argument protocol"


def chosen_protocol(argument: str | None) -> tuple[str | None, str]:
    """(what a person wants or None, where they said so): the argument counts before MOE_TK_PROTOCOL."""
    if argument not in (None, "auto"):
        return argument, ARGUMENT
    return env("MOE_TK_PROTOCOL"), "MOE_TK_PROTOCOL"


def checked_wish(wish: str | None, by: str) -> str | None:
    """The wish, None for "auto" and for none. Raises ArgumentError naming `by` when there is no such protocol."""
    if wish not in (None, "auto", *PROTOCOLS):
        raise ArgumentError(f"{by.removeprefix('the argument ')} is {wish!r}, wanted one of auto, {', '.join(PROTOCOLS)}")
    return None if wish == "auto" else wish
