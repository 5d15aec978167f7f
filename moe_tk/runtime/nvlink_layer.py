"""The layer on the CUDA back end: three launches per call on the current stream (serial pattern: five), without host
synchronisation."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError
from moe_tk.group import RankGroup
from moe_tk.memory.nvlink_layout import NvlinkGeometry
from moe_tk.planner import (
    FUSED_VARIANTS,
    LARGE_TILE_ROWS,
    SERIAL_LARGE_TILE_ROWS,
    Choice,
    FusedVariant,
    LayerWork,
    Machine,
    choose_fusion,
    choose_variant,
    expected_blocks,
    machine_of,
    row_block_of,
)
from moe_tk.runtime.gemm_tiles import POLICY_EVICT_FIRST, POLICY_NORMAL, TileChoice, choose_tile
from moe_tk.runtime.launch import Activation
from moe_tk.runtime.nvlink import nvlink_module
from moe_tk.runtime.nvlink_fp8 import layer_weights
from moe_tk.runtime.nvlink_session import NVLINK_SESSIONS, OPEN, STAGES

INTERLEAVE = 8        # swiglu_epilogue: gate and up rows alternate in groups of 8
TILE_ROWS, TILE_BYTES = 256, 128  # of weights: columns of a wide tile of the GEMMs, and a row of their panels of K
DEFAULT_PASSES = 1    # over the columns of GEMM 2
PATTERNS = tuple(STAGES)
NOT_PLAIN = {"gemm1_tile": -1, "gemm1_policy": 0, "gemm2_tile": -1, "gemm2_policy": 0}  # fields of a fused call


def tiled(weights: Tensor) -> Tensor:
    """[E, N, K] as [E, N / 256, K / C, 256, C] with C = 64 (e4m3: 128): in the order in which the
    GEMMs load them, in one load or, with narrow tiles, two. N and K padded with zeros."""
    if weights.itemsize == 1:
        return _tiled(weights.view(torch.uint8), TILE_BYTES).view(weights.dtype)
    return _tiled(weights, TILE_BYTES // 2)


def _tiled(weights: Tensor, tile_cols: int) -> Tensor:
    experts, rows, cols = weights.shape
    row_tiles, col_tiles = -(-rows // TILE_ROWS), -(-cols // tile_cols)
    tiles = weights.new_zeros(experts, row_tiles, col_tiles, TILE_ROWS, tile_cols)
    for expert in range(experts):  # one at a time: a second copy of all would not fit beside a large model
        padded = torch.nn.functional.pad(weights[expert], (0, col_tiles * tile_cols - cols, 0, row_tiles * TILE_ROWS - rows))
        tiles[expert] = padded.view(row_tiles, TILE_ROWS, col_tiles, tile_cols).transpose(1, 2)
    return tiles


def engine_weights(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """w13 [E, 2I, H] (gate rows first) and w2 [E, H, I] as the kernels read them: gate and up rows alternate in groups of 8,
    I padded with zeros to a multiple of 8 (which adds nothing), at least one expert, in tiles."""
    experts, twice, hidden = w13.shape
    inter = twice // 2
    padded = -(-inter // INTERLEAVE) * INTERLEAVE
    both = w13.new_zeros(max(1, experts), padded // INTERLEAVE, 2, INTERLEAVE, hidden)
    second = w2.new_zeros(max(1, experts), hidden, padded)
    for half in range(2 if experts else 0):
        rows = w13.new_zeros(experts, padded, hidden)
        rows[:, :inter] = w13[:, half * inter:(half + 1) * inter]
        both[:, :, half] = rows.view(experts, padded // INTERLEAVE, INTERLEAVE, hidden)
    second[:experts, :, :inter] = w2
    return tiled(both.reshape(max(1, experts), 2 * padded, hidden)), tiled(second)


def one_limit(activation: Activation) -> float:
    """The limit of both halves, infinity for none. Raises ArgumentError when they differ: the kernel has one."""
    if activation.gate_limit != activation.up_limit:
        raise ArgumentError(f"activation has gate_limit {activation.gate_limit} and up_limit {activation.up_limit}; the CUDA back "
                            "end wants both equal, or none")
    return math.inf if activation.gate_limit is None else float(activation.gate_limit)


class NvlinkLayer:
    """One layer's calls on a session. Arguments are checked by MoELayer."""

    def __init__(self, group: RankGroup, geometry: NvlinkGeometry, *, device: torch.device, activation: Activation,
                 weights_before_l2: bool, timeout_s: float, segments: int | None = None, row_block: int | None = None,
                 reserve_sms: int = 0, pattern: str = "auto", passes: int | None = None, traced: bool = False) -> None:
        """A collective. pattern "auto" = chosen by the size of each call, and may differ from rank to rank: ranks show each other
        the same things in both. row_block None = chosen by the size of each call; segments None = 1: measured on two H200, the
        padding of more segments cost more time in the GEMMs than the earlier return of the results saved."""
        self.geometry, self.device, self.timeout_s = geometry, device, timeout_s
        self.limit, self.activation, self.weights_before_l2 = one_limit(activation), activation, weights_before_l2
        self.segments, self.row_block, self.pattern, self.passes, self.traced = segments, row_block, pattern, passes, traced
        self.export_blocks = 0  # blocks of open_call that send rows; 0: chosen by their number
        self.variant: str | None = None  # name of the fused GEMMs of all calls; None: chosen by the size of each call
        self.weights_policy: int | None = None  # of a fused call's loads of weights; None: by the size of each call
        self.session = NVLINK_SESSIONS.get(group, geometry, device=device, reserve_sms=reserve_sms, traced=traced)
        self.w13: Tensor | None = None
        self.w2: Tensor | None = None
        self.w13_scales: Tensor | None = None
        self.w2_scales: Tensor | None = None
        self._choices: dict[int, Choice] = {}                 # by number of tokens
        self._plain_fields: dict[int, dict[str, int]] = {}

    @functools.cached_property
    def machine(self) -> Machine:
        """What the planner knows of this rank's GPU."""
        return machine_of(torch.cuda.get_device_name(self.device), self.session.num_sms)

    @functools.cached_property
    def _tile_index(self) -> dict[str, int]:
        return {tile["name"]: index for index, tile in enumerate(nvlink_module(self.traced).plain_tiles(self.geometry.quantised))}

    def load_weights(self, w13: Tensor, w2: Tensor, w13_scale: Tensor | None = None, w2_scale: Tensor | None = None) -> None:
        """This rank's w13 [E_local, 2I, H], w2 [E_local, H, I] on the layer's device; kept in the engine's layout (a copy). An
        e4m3 layer takes scales [E_local, N / 128, K / 128] with them, or quantises bfloat16 weights."""
        if not self.geometry.quantised:
            self.w13, self.w2 = engine_weights(w13, w2)
            return
        kept = layer_weights(w13, w2, w13_scale, w2_scale)
        self.w13, self.w2, self.w13_scales, self.w2_scales = tiled(kept.w13), tiled(kept.w2), kept.w13_scales, kept.w2_scales

    def choices(self, num_tokens: int) -> tuple[int, int]:
        """(index of the variant, segments) of a call with num_tokens tokens on this rank. Slots and tiles are local, so ranks need
        not agree."""
        g, segments = self.geometry, self.segments or 1
        if self.variant is not None:
            return next(index for index, found in enumerate(FUSED_VARIANTS[g.dtype]) if found.name == self.variant), segments
        row_block = self.row_block or row_block_of(g.world, num_tokens, g.top_k, g.num_experts)
        groups, rows = self._groups(num_tokens)
        chosen = choose_variant(g.dtype, row_block=row_block, groups=groups, rows=rows, hidden=g.hidden,
                                intermediate=g.local_intermediate)
        return chosen, segments

    def variant_of(self, num_tokens: int) -> FusedVariant:
        """Tiles of the fused GEMMs of a call with num_tokens tokens on this rank."""
        return FUSED_VARIANTS[self.geometry.dtype][self.choices(num_tokens)[0]]

    def _groups(self, num_tokens: int) -> tuple[int, float]:
        """Groups on this rank, at least 1, and rows of each if experts get the mean share."""
        g, segments = self.geometry, self.segments or 1
        return segments * max(1, g.num_local_experts), g.world * num_tokens * g.top_k / (g.num_experts * segments)

    def _policy(self, num_tokens: int) -> int:
        """How a fused call with num_tokens tokens keeps weights in L2: not, where each is read once."""
        if self.weights_policy is not None:
            return self.weights_policy
        row_block, (groups, rows) = self.variant_of(num_tokens).row_block, self._groups(num_tokens)
        once = expected_blocks(groups, rows, row_block) <= groups
        return POLICY_EVICT_FIRST if once else POLICY_NORMAL

    def tiles(self, num_tokens: int) -> tuple[TileChoice, TileChoice]:
        """Tiles of both GEMMs of a serial call with num_tokens tokens on this rank, if its experts get the mean share."""
        g, dtype = self.geometry, "e4m3" if self.geometry.quantised else "bf16"
        large_from = LARGE_TILE_ROWS if g.quantised else SERIAL_LARGE_TILE_ROWS  # e4m3: its 64 x 256 tiles share nothing
        row_block = self.row_block or row_block_of(g.world, num_tokens, g.top_k, g.num_experts, large_from)
        groups, rows = self._groups(num_tokens)
        blocks = expected_blocks(groups, rows, row_block)
        if row_block == 64 and blocks > groups and not g.quantised:
            # Measured: 253 us a call of qwen3-30b-a3b at T = 512, 280 with 64 x 128.
            both = TileChoice("64x256_s5_w2_c2", POLICY_NORMAL, "more than one block of 64 rows an expert: they share weights")
            return both, both
        common = dict(row_block=row_block, num_slots=blocks * row_block, num_experts=groups, num_sms=self.session.num_sms)
        return (choose_tile(dtype, columns=2 * g.padded_intermediate, activation=True, **common),
                choose_tile(dtype, columns=g.hidden, activation=False, **common))

    def choice(self, num_tokens: int) -> Choice:
        """What the planner says to a call with num_tokens tokens on this rank."""
        if num_tokens not in self._choices:
            g = self.geometry
            work = LayerWork(tokens=num_tokens, world=g.world, top_k=g.top_k, num_experts=g.num_experts,
                             local_experts=g.num_local_experts, hidden=g.hidden, local_intermediate=g.local_intermediate,
                             row_block=self.variant_of(num_tokens).row_block, scaled=g.quantised)
            self._choices[num_tokens] = choose_fusion(work, self.machine)
        return self._choices[num_tokens]

    def pattern_of(self, num_tokens: int, stages: int | None = None) -> str:
        """Pattern of a call with num_tokens tokens on this rank; with `stages`, the one that has them (OPEN alone is of both)."""
        if stages not in (None, OPEN):
            return next(pattern for pattern in PATTERNS if not stages & ~STAGES[pattern])
        return self.choice(num_tokens).pattern if self.pattern == "auto" else self.pattern

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor, out: Tensor, *, signature: int, stages: int | None = None,
                pattern: str | None = None, hidden_scales: Tensor | None = None) -> None:
        """Launches a call. hidden, out [T, H] bf16, ids [T, k] i32/i64, weights [T, k] f32/bf16: contiguous, on the device.
        An e4m3 layer takes hidden as e4m3 too, with hidden_scales [T, H / 128] f32.

        pattern  one of PATTERNS; None = that of `stages`, or the layer's
        stages   bits of nvlink_session; None = all of the pattern. All but OPEN want the tables of an OPEN with the same pattern
                 and number of tokens. GATHER, SCATTER and COMBINE do their work once after each OPEN; PULL, GEMM1 and GEMM2 do
                 theirs whenever they are launched
        """
        pattern = pattern or self.pattern_of(hidden.shape[0], stages)
        fields = self._fields(*self.choices(hidden.shape[0]), signature, hidden, ids, weights, out, hidden_scales)
        if pattern == "serial":
            fields.update(self._plain(hidden.shape[0]))
        else:
            fields["gemm1_policy"] = fields["gemm2_policy"] = self._policy(hidden.shape[0])
        self.session.run(fields, stages=STAGES[pattern] if stages is None else stages, timeout_s=self.timeout_s)

    def _plain(self, num_tokens: int) -> dict[str, int]:
        """Fields of the two GEMMs of a serial call."""
        if num_tokens not in self._plain_fields:
            first, second = self.tiles(num_tokens)
            self._plain_fields[num_tokens] = {
                "passes": 1, "gemm1_tile": self._tile_index[first.name], "gemm1_policy": first.weights_policy,
                "gemm2_tile": self._tile_index[second.name], "gemm2_policy": second.weights_policy}
        return self._plain_fields[num_tokens]

    def refuse(self, signature: int, *, num_tokens: int = 0) -> None:
        """Tells the other ranks that this one does not make the call; they get PeerRefused, or CapacityError when num_tokens are
        more than the buffers hold."""
        self.session.run({**self._fields(0, 1, signature), "num_tokens": num_tokens}, stages=OPEN, timeout_s=self.timeout_s)

    def _fields(self, variant: int, segments: int, signature: int, hidden: Tensor | None = None, ids: Tensor | None = None,
                weights: Tensor | None = None, out: Tensor | None = None,
                hidden_scales: Tensor | None = None) -> dict[str, Any]:
        def address(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        return {"hidden_states": address(hidden), "topk_ids": address(ids), "topk_weights": address(weights), "out": address(out),
                "w13": address(self.w13), "w2": address(self.w2), "hidden_scales": address(hidden_scales),
                "w13_scales": address(self.w13_scales), "w2_scales": address(self.w2_scales), "signature": signature,
                "num_tokens": 0 if hidden is None else hidden.shape[0], "refused": hidden is None,
                "ids_are_64": ids is not None and ids.dtype == torch.int64,
                "weights_are_bf16": weights is not None and weights.dtype == torch.bfloat16, "variant": variant,
                "segments": segments, "passes": self.passes or DEFAULT_PASSES, "weights_before_l2": self.weights_before_l2,
                "alpha": self.activation.alpha, "beta": self.activation.beta, "limit": self.limit,
                "export_blocks": self.export_blocks, **NOT_PLAIN}
