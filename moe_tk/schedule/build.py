"""build_tables: the checked entrance to both implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.schedule.capacity import max_slots
from moe_tk.schedule.golden import build_golden
from moe_tk.schedule.ownership import local_experts
from moe_tk.schedule.tables import Tables
from moe_tk.schedule.vectorised import PaddedTables, build_padded

ID_DTYPES = (torch.int32, torch.int64)
IMPLS = ("vectorised", "golden")


def build_tables(topk_ids: Tensor, *, token_counts: Tensor | Sequence[int], world: int, rank: int, num_experts: int,
                 mode: str, row_block: int, segments: int = 1, job_chunk: int = 32,
                 impl: str = "vectorised") -> Tables:
    """The tables of `rank` for one routing, with exact lengths, on the device of topk_ids.

    topk_ids      [world * T, k] int32 or int64, global expert ids of all ranks: rank r's tokens are rows r*T ...
                  r*T + token_counts[r] - 1, the rest of its T rows is masked. An id that is -1, negative or
                  >= num_experts is skipped: it takes no slot and moves nothing. Duplicates in a row are two pairs.
    token_counts  [world] tokens of each rank, 0 <= token_counts[r] <= T
    mode          "ep": rank owns expert_range(num_experts, world, rank); "tp": every rank has every expert
    row_block     slots per row block; segments: batches of tokens; job_chunk: tokens per watermark chunk
    impl          "vectorised" (torch; here it waits for the device once, to learn the lengths) or "golden" (loops)

    Raises ArgumentError (ArgumentTypeError for dtypes); ScheduleError when a count would not fit int32.
    """
    counts = _check_arguments(topk_ids, token_counts, world, rank, num_experts, mode, row_block, segments, job_chunk)
    if impl not in IMPLS:
        raise ArgumentError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    sizes = dict(world=world, rank=rank, num_experts=num_experts, mode=mode, row_block=row_block, segments=segments,
                 job_chunk=job_chunk)
    if impl == "golden":
        return build_golden(topk_ids.tolist(), counts, top_k=topk_ids.shape[1], **sizes).to(topk_ids.device)
    device_counts = torch.tensor(counts, dtype=torch.int32, device=topk_ids.device)
    return trim(build_padded(topk_ids, device_counts, **sizes))


def trim(padded: PaddedTables) -> Tables:
    """Exact lengths from capacity lengths. Waits for the device: not for use inside a CUDA graph."""
    tables = padded.tables
    slots, blocks, jobs = torch.stack([padded.num_slots, padded.num_blocks, padded.num_jobs]).tolist()
    return replace(tables, slot_pair=tables.slot_pair[:slots], block_group=tables.block_group[:blocks],
                   block_target=tables.block_target[:blocks], delivery_order=tables.delivery_order[:jobs],
                   job_order=tables.job_order[:jobs])


def _check_arguments(topk_ids: Tensor, token_counts: Tensor | Sequence[int], world: int, rank: int, num_experts: int,
                     mode: str, row_block: int, segments: int, job_chunk: int) -> list[int]:
    """Raises on the first argument that cannot work; returns token_counts as a list."""
    if not isinstance(topk_ids, Tensor):
        raise ArgumentTypeError(f"topk_ids must be a tensor, got {type(topk_ids).__name__}")
    if topk_ids.dtype not in ID_DTYPES:
        raise ArgumentTypeError(f"topk_ids has dtype {topk_ids.dtype}, wanted torch.int32 or torch.int64")
    if topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise ArgumentError(f"topk_ids has shape {tuple(topk_ids.shape)}, wanted [world * T, k] with k >= 1")
    _, num_local = local_experts(num_experts, world, rank, mode)  # checks these four
    if topk_ids.shape[0] % world:
        raise ArgumentError(f"topk_ids has {topk_ids.shape[0]} rows, wanted a multiple of world={world}: every rank "
                            "has the same row stride T, and token_counts says how many of its rows are tokens")
    tokens = topk_ids.shape[0] // world
    if not isinstance(job_chunk, int) or job_chunk < 1:
        raise ArgumentError(f"job_chunk must be an integer >= 1, got {job_chunk!r}")
    max_slots(world, tokens, topk_ids.shape[1], num_local, segments, row_block)  # checks sizes and int32 limits
    if isinstance(token_counts, Tensor):
        if token_counts.dtype not in ID_DTYPES:
            raise ArgumentTypeError(f"token_counts has dtype {token_counts.dtype}, wanted torch.int32 or torch.int64")
        token_counts = token_counts.tolist()
    counts = list(token_counts)
    if len(counts) != world:
        raise ArgumentError(f"token_counts has {len(counts)} entries, wanted world={world}")
    for source, count in enumerate(counts):
        if not 0 <= count <= tokens:
            raise ArgumentError(f"token_counts[{source}] is {count}, wanted 0..{tokens} (rows of topk_ids / world)")
    return counts
