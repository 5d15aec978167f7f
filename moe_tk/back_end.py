"""Which back end a MoELayer runs on. The one place that decides it, and what it looks at.

A named protocol, or MOE_TK_PROTOCOL with "auto", says it. With neither, a layer runs on the CPU unless the caller's use is CUDA:
device= names a GPU, or the group has an nccl back end and device= does not say "cpu". Then the ranks tell each other about
their GPUs, once, and planner.back_end decides from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from moe_tk.config import env, environment
from moe_tk.errors import ArgumentError, MoETkError
from moe_tk.group import RankGroup, resolve_group
from moe_tk.memory.nvlink_layout import DTYPES
from moe_tk.planner.back_end import BackEnd, RankCard, choose_back_end
from moe_tk.topology.wishes import chosen_protocol

CPU_OPTIONS = ("compute_blocks", "pull")  # of MoELayer, that the CUDA back end does not have


def decide_back_end(group: Any, options: Mapping[str, Any]) -> BackEnd:
    """The back end for MoELayer(group, **options). A collective exactly where the use may be CUDA, see above.

    Raises TopologyError (all ranks alike) when a GPU was named that the CUDA back end cannot use, ArgumentError when device=
    contradicts the protocol.
    """
    device = options.get("device")
    wish, by = chosen_protocol(options.get("protocol", "auto"))
    if wish == "nvlink":
        return BackEnd("nvlink", f"protocol nvlink: asked for by {by}")
    if wish is not None:
        if _kind(device) == "cuda":
            raise ArgumentError(f"device is {device}, but {by} is {wish!r}, which is not of the CUDA back end: use 'nvlink' or "
                                "'auto'")
        return BackEnd("shm")
    resolved = resolve_group(group)
    if _kind(device) != "cuda" and not _has_nccl(resolved):
        return BackEnd("shm")
    card = rank_card(resolved, device, options)
    cards = resolved.gather(card, timeout_s=env("MOE_TK_FIRST_CALL_TIMEOUT_S"), step="MoELayer: agree on a back end")
    if not all(isinstance(other, RankCard) for other in cards):
        raise MoETkError("MoELayer: ranks make different layers: all must make the same ones in the same order, all with device= "
                         "or all without")
    return choose_back_end(cards)


def _kind(device: Any) -> str | None:
    """"cuda", "cpu" or another type of device; None where none is named."""
    return None if device is None else "cuda" if isinstance(device, int) else torch.device(device).type


def _has_nccl(group: RankGroup) -> bool:
    return group.process_group is not None and "nccl" in str(dist.get_backend_config(group.process_group))


def rank_card(group: RankGroup, device: Any, options: Mapping[str, Any]) -> RankCard:
    """This rank's card. Never raises: what goes wrong is an obstacle."""
    if _kind(device) not in (None, "cuda"):
        return RankCard(False, f"device is {device}")
    named = device is not None
    why = f"device is {device}" if named else "the group has an nccl back end"
    try:
        obstacle = None if named else _option_obstacle(options)
        if obstacle is None and not torch.cuda.is_available():
            obstacle = "torch sees no GPU"
        if obstacle is not None:
            return RankCard(True, why, named, obstacle)
        return _gpu_card(group, device, why, named)
    except Exception as error:  # the other ranks wait for a card
        return RankCard(True, why, named, f"{type(error).__name__}: {str(error)[:500]}")


def _option_obstacle(options: Mapping[str, Any]) -> str | None:
    """An argument that only the CPU back end takes."""
    dtype = options.get("dtype", torch.bfloat16)
    if str(dtype).removeprefix("torch.") not in DTYPES:
        return f"dtype is {dtype}, and the CUDA back end takes {' and '.join(DTYPES)}"
    if options.get("pattern") == "mega":
        return "pattern is 'mega', which the CUDA back end does not have"
    return next((f"{name} is an option of the CPU back end" for name in CPU_OPTIONS if options.get(name)), None)


def _gpu_card(group: RankGroup, device: Any, why: str, named: bool) -> RankCard:
    from moe_tk.diagnose import cache_places
    from moe_tk.topology.links import links_of
    from moe_tk.topology.reader import take_snapshot

    index = device if device is None or isinstance(device, int) else torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    snapshot = take_snapshot(environment(), cuda=lambda _: _cuda_answers())
    uuid = next((gpu.uuid for gpu in snapshot.gpus if gpu.cuda_index == index), str(properties.uuid))
    links = links_of(snapshot, uuid, cache_places()) if group.world > 1 else {}
    return RankCard(True, why, named, None, f"cuda:{index}", (properties.major, properties.minor), uuid,
                    str(snapshot.host.boot_id or snapshot.host.hostname), links)


def _cuda_answers() -> dict[str, Any]:
    """What topology.reader asks the driver for, from torch: here CUDA is in use anyway, and no child process is needed."""
    devices, count = [], torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"index": index, "uuid": str(properties.uuid), "name": properties.name, "major": properties.major,
                        "minor": properties.minor, "memory_bytes": properties.total_memory,
                        "sm_count": properties.multi_processor_count})
    peers = [{"from": one, "to": other, "access": torch.cuda.can_device_access_peer(one, other)}
             for one in range(count) for other in range(count) if one != other]
    return {"state": "ok", "devices": devices, "peers": peers}
