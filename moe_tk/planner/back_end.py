"""Which back end a layer with protocol="auto" gets: a pure function of what all ranks say, so the same on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_tk.errors import TopologyError

HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class RankCard:
    """What one rank says about itself and its GPU."""

    wants_cuda: bool
    why: str                    # where that comes from
    named: bool = False         # the caller named the device: another back end would be an error
    obstacle: str | None = None  # what keeps this rank off the CUDA back end, found before GPUs were compared
    device: str = ""
    capability: tuple[int, int] | None = None
    uuid: str = ""
    machine: str = ""           # equal on ranks of one machine
    links: Mapping[str, tuple[str, bool, str]] = field(default_factory=dict)
    """By the other GPU's UUID: (protocol that the topology's verdict gives or expects, whether a probe verified it, its text)."""


@dataclass(frozen=True, slots=True)
class BackEnd:
    """`protocol`: "nvlink" (CUDA back end) or "shm" (CPU back end), and why; reason "" where nothing had to be decided."""

    protocol: str
    reason: str = ""


def choose_back_end(cards: Sequence[RankCard]) -> BackEnd:
    """The back end for ranks with these cards, in rank order. Raises TopologyError when ranks want different ones, or when the
    caller named a GPU and the CUDA back end cannot run there."""
    wishes = [card.wants_cuda for card in cards]
    if not any(wishes):
        return BackEnd("shm", f"protocol auto: the CPU back end, {cards[0].why}")
    if not all(wishes):
        one, other = wishes.index(True), wishes.index(False)
        raise TopologyError(f"protocol auto: rank {one} is to run on a GPU ({cards[one].why}) but rank {other} is not "
                            f"({cards[other].why}): pass the same kind of device= on all ranks")
    obstacle = _obstacle(cards)
    if obstacle is None:
        return BackEnd("nvlink", f"protocol auto: nvlink, since {cards[0].why} and {_all_well(cards)}")
    if any(card.named for card in cards):
        raise TopologyError(f"protocol auto with device= a GPU: {obstacle}. Pass protocol='nvlink' to insist, or no device= and "
                            "protocol='shm' for the CPU back end")
    return BackEnd("shm", f"protocol auto: the CPU back end although {cards[0].why}, since {obstacle}")


def _obstacle(cards: Sequence[RankCard]) -> str | None:
    """The first thing that keeps these ranks off the CUDA back end."""
    for rank, card in enumerate(cards):
        if card.obstacle is not None:
            return f"rank {rank}: {card.obstacle}"
        if card.capability != HOPPER:
            have = "unknown" if card.capability is None else ".".join(map(str, card.capability))
            return f"rank {rank}: {card.device} has compute capability {have}, wanted {HOPPER[0]}.{HOPPER[1]} (Hopper)"
    for (one, first), (other, second) in itertools.combinations(enumerate(cards), 2):
        if first.machine != second.machine:
            return f"ranks {one} and {other} are on different machines"
        if first.uuid == second.uuid:
            return f"ranks {one} and {other} share one GPU ({first.device})"
        for here, there in ((first, second), (second, first)):
            protocol, _, text = here.links.get(there.uuid, ("unknown", False, "nothing is known about the pair"))
            if protocol != "nvlink":
                return f"the GPUs of ranks {one} and {other} have no usable NVLink between them: {text}"
    return None


def _all_well(cards: Sequence[RankCard]) -> str:
    if len(cards) == 1:
        return f"{cards[0].device} is a Hopper GPU"
    probed = all(card.links[other.uuid][1] for card, other in itertools.permutations(cards, 2))
    return (f"every two of the {len(cards)} Hopper GPUs have NVLink between them, "
            + ("verified by probes" if probed else "as the driver says (moe_tk doctor --probe quick would verify it)"))
