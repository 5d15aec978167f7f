"""Every exception that moe_tk raises on purpose.

Each message is one sentence or two: what was seen, where, what would be valid, what to do.
"""

from __future__ import annotations


class MoETkError(Exception):
    """Base of all errors below; catch this to catch whatever moe_tk says on purpose."""


class ArgumentError(MoETkError, ValueError):
    """An argument has a value that cannot work: the text names it, its value and the valid ones."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type or dtype."""


class TopologyError(MoETkError):
    """The machine or the group cannot do what was asked (no such protocol, two ranks on one GPU)."""


class CapacityError(MoETkError):
    """More tokens than the workspace was made for. Raised on every rank; the layer stays usable."""


class ScheduleError(MoETkError):
    """A schedule table breaks an invariant; the text gives the table, the index and both values."""


class BuildError(MoETkError):
    """A native module could not be built; the text gives the command, the place and what to do."""


class PeerRefused(MoETkError):
    """Another rank refused the same call; the text carries that rank's reason. Nothing was computed."""


class ProtocolTimeout(MoETkError):
    """A bounded wait ran out: op, phase, waiting rank, missing rank(s) and seconds are in the text.

    `records` holds the wait records of the ranks that could still write one (list of dict).
    """

    def __init__(self, message: str, records: list[dict] | None = None) -> None:
        super().__init__(message)
        self.records = records or []


class PeerLost(ProtocolTimeout):
    """A rank of the group died while others waited for it."""
