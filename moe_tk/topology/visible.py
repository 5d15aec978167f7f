"""What CUDA_VISIBLE_DEVICES means on this machine: a pure function of its text and the devices there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HIDE_ALL = ("-1", "nodevfiles", "void", "none")  # in use to hide every GPU on purpose


@dataclass(frozen=True, slots=True)
class Visible:
    """state: "unset", "empty" (all hidden), "ok" or "bad". entries: those before the first bad one, as CUDA uses them.

    uuids: what each entry names; None for a number, whose meaning depends on CUDA's own order.
    bad: the first entry that names nothing, with `why`.
    """

    state: str
    entries: tuple[str, ...] = ()
    uuids: tuple[str | None, ...] = ()
    bad: str | None = None
    why: str = ""


def resolve_visible(value: str | None, uuids: Sequence[str], count: int | None = None) -> Visible:
    """Resolve the text of CUDA_VISIBLE_DEVICES (None: unset) against the UUIDs of GPUs and MIG slices.

    count: whole GPUs on the machine, the limit of numeric entries; None when nobody could count them. Never raises.
    """
    if value is None:
        return Visible("unset")
    parts = [part.strip() for part in value.split(",")]
    if not any(parts) or parts[0].lower() in HIDE_ALL:
        return Visible("empty")
    entries: list[str] = []
    resolved: list[str | None] = []
    for part in parts:
        uuid, why = _resolve(part, uuids, count)
        if not why and uuid is not None and uuid in resolved or not why and uuid is None and part in entries:
            why = "it is named twice"
        if why:
            return Visible("bad", tuple(entries), tuple(resolved), part, why)
        entries.append(part)
        resolved.append(uuid)
    return Visible("ok", tuple(entries), tuple(resolved))


def _resolve(part: str, uuids: Sequence[str], count: int | None) -> tuple[str | None, str]:
    """(UUID or None for a valid number, what is wrong or "")."""
    if part.lstrip("-").isdigit():
        if count is not None and not 0 <= int(part) < count:
            valid = f"valid numbers are 0 to {count - 1}" if count else "there is no GPU"
            return None, f"no such GPU ({valid})"
        return None, ""
    if not part:
        return None, "an empty entry"
    wanted = part.lower()
    if not wanted.startswith(("gpu-", "mig-")):
        return None, "neither a number nor a UUID (GPU-... or MIG-...)"
    found = [uuid for uuid in uuids if uuid.lower().startswith(wanted)]  # CUDA takes any unique beginning
    if len(found) == 1:
        return found[0], ""
    if not uuids:
        return None, ""  # nobody could list the devices: leave the judgement to CUDA
    return None, "no GPU has this UUID" if not found else f"{len(found)} GPUs have UUIDs that begin so"
