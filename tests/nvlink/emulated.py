"""Calls of the layer over NVLink by all ranks of a group, on one host thread: tk_kernels/nvlink compiled for the host with the
emulated machine of tests/nvlink/emulator in place of the GPU. Memory is that of a workspace, every item between guards."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_tk.builder.cuda_toolkit import find_toolkits
from moe_tk.builder.native_root import native_root
from moe_tk.memory.nvlink import NvlinkWorkspace
from moe_tk.memory.nvlink_layout import NvlinkGeometry, row_items, symmetric_items, table_items

GUARD, GUARD_BYTE, POISON = 256, 0xEE, 0xFF  # POISON: NaN in every element type
EMULATOR = Path(__file__).parent / "emulator"
LIBRARY = "emulator.so"
FOLDERS = ("nvlink", "engine", "platform", "protocol", "hooks")
NOBODY_MOVES = 3_000_000  # naps in a row after which a call counts as stuck
SMS = 4
BUILD_OPTIONS = {"shared_bytes": 227 * 1024, "one_sender_pairs": 4096, "one_builder_pairs": 2048}  # as open_globals.cuh has them


# Fewer threads a block, which makes a call of open_call eight times as fast.
FEW_THREADS = ("open_globals.cuh", "OPEN_THREADS = 1024", "OPEN_THREADS = 128")


def build(folder: Path, *changes: tuple[str, str, str]) -> tuple[ctypes.CDLL | None, str]:
    """The emulator's library, made in `folder`; or None and why it cannot be made here. changes: (file of tk_kernels/nvlink, text
    in it, other text)."""
    compiler = shutil.which("g++")
    include = next((kit.root / "include" for kit in find_toolkits() if (kit.root / "include/cuda_fp8.h").is_file()), None)
    if platform.machine() != "x86_64" or compiler is None or include is None:
        return None, "wants x86-64, g++ and the headers of CUDA"
    for name in FOLDERS:  # the real files under the paths that they include each other by
        (folder / "tk_kernels" / name).mkdir(parents=True)
        for file in (native_root() / "tk_kernels" / name).iterdir():
            (folder / "tk_kernels" / name / file.name).symlink_to(file)
    (folder / "thunderkittens").mkdir()
    (folder / "thunderkittens/kittens.cuh").symlink_to(EMULATOR / "kittens.cuh")
    (folder / "tk_kernels/nvlink/device_ops.cuh").unlink()
    (folder / "tk_kernels/nvlink/device_ops.cuh").symlink_to(EMULATOR / "device_ops.cuh")
    for name, text, other in changes:
        file = folder / "tk_kernels/nvlink" / name
        before = file.read_text()
        assert before.count(text) == 1, f"{name}: {text}"
        file.unlink()
        file.write_text(before.replace(text, other))
    subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-I{folder}", f"-I{EMULATOR}", f"-I{include}",
                    str(EMULATOR / "machine.cpp"), str(EMULATOR / "ranks.cpp"), "-o", str(folder / LIBRARY)], check=True)
    return load(folder), ""


def load(folder: Path) -> ctypes.CDLL:
    """What `build` has made there."""
    loaded = ctypes.CDLL(str(folder / LIBRARY))
    loaded.emulator_fields.restype = ctypes.c_char_p
    return loaded


class Guarded:
    """`size` bytes that start at a multiple of 256, all `fill`, between guards."""

    def __init__(self, size: int, fill: int = 0) -> None:
        self._all = torch.full((size + 2 * GUARD + 256,), GUARD_BYTE, dtype=torch.uint8)
        self._at = GUARD + -(self._all.data_ptr() + GUARD) % 256
        self.bytes = self._all[self._at:self._at + size]
        self.bytes.fill_(fill)
        self.address = self._all.data_ptr() + self._at

    def intact(self) -> bool:
        end = self._at + len(self.bytes)
        return bool((self._all[:self._at] == GUARD_BYTE).all() and (self._all[end:] == GUARD_BYTE).all())


class Rank:
    """Memory of one rank: its segment of the heap with guards between the regions, and its local items."""

    def __init__(self, geometry: NvlinkGeometry) -> None:
        self.geometry, self.offsets, end = geometry, {}, GUARD
        for item in symmetric_items(geometry):
            self.offsets[item.name] = replace(item, offset=end)
            end += -(-item.bytes // 256) * 256 + GUARD
        self.heap = Guarded(end, GUARD_BYTE)
        self.items = {item.name: Guarded(item.bytes) for item in table_items(geometry)}
        self.items.update({item.name: Guarded(item.bytes, POISON) for item in row_items(geometry)})
        self.mailbox = torch.zeros(8, dtype=torch.int32)
        for name in self.offsets:
            self.region(name).fill_(0)

    def region(self, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        item = self.offsets[name]
        return self.heap.bytes[item.offset:item.offset + item.bytes].view(dtype)

    def table(self, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.items[name].bytes.view(dtype)

    def fields(self, bases: list[int]) -> dict[str, Any]:
        """Those of nvlink::workspace_view, by the real workspace's own mapping."""
        local = {item.name: (self.items[item.name].bytes, replace(item, offset=0))
                 for item in (*table_items(self.geometry), *row_items(self.geometry))}
        workspace = SimpleNamespace(geometry=self.geometry, _local=local, _symmetric=self.offsets, mailbox=self.mailbox,
                                    heap=SimpleNamespace(bases=bases), group=SimpleNamespace(rank=self.geometry.rank))
        return NvlinkWorkspace.fields(workspace, SMS)

    def poison(self) -> None:
        for item in row_items(self.geometry):
            self.items[item.name].bytes.fill_(POISON)
        for name in ("rows", "planes"):
            self.region(name).fill_(POISON)

    def intact(self) -> bool:
        """Nothing was written between the items."""
        between = torch.ones(len(self.heap.bytes), dtype=torch.bool)
        for item in self.offsets.values():
            between[item.offset:item.offset + item.bytes] = False
        return (self.heap.intact() and bool((self.heap.bytes[between] == GUARD_BYTE).all())
                and all(item.intact() for item in self.items.values()))


@dataclass
class Arguments:
    """One rank's part of a call. x [T, H] bf16, or e4m3 with scales [T, H / 128]; weights [T, k]."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    options: dict[str, int]  # of rank_fields, by name


class Emulation:
    """Ranks of one group, and their calls."""

    def __init__(self, library: ctypes.CDLL, **sizes: Any) -> None:
        self.library = library
        self.ranks = [Rank(NvlinkGeometry(rank=rank, **sizes)) for rank in range(sizes["world"])]
        names = library.emulator_fields().decode().split()
        self.struct = type("RankFields", (ctypes.Structure,), {
            "_fields_": [("bases", ctypes.c_int64 * 32), *((name, ctypes.c_int64) for name in names)]})

    def call(self, arguments: list[Arguments], seed: int) -> list[Tensor]:
        """The results [T, H] of all ranks. Fails if some rank cannot go on or writes beside its memory."""
        outs = [torch.zeros(len(a.x), a.x.shape[1], dtype=torch.bfloat16) for a in arguments]
        bases, keep = [rank.heap.address for rank in self.ranks], []
        structs = (self.struct * len(self.ranks))()
        for values, rank, a, out in zip(structs, self.ranks, arguments, outs, strict=True):
            tensors = {"hidden_states": a.x, "hidden_scales": a.scales, "topk_ids": a.ids, "topk_weights": a.weights}
            for name, tensor in tensors.items():
                copy = Guarded(tensor.nbytes) if tensor is not None and tensor.numel() else None  # as in torch: nothing, no address
                if copy is not None:
                    copy.bytes.copy_(tensor.contiguous().view(-1).view(torch.uint8))
                    keep.append(copy)
                setattr(values, name, 0 if copy is None else copy.address)
            fields = {**rank.fields(bases), "out": out.data_ptr(), "num_tokens": len(a.x), "signature": 1,
                      "ids_are_64": a.ids.dtype == torch.int64, "weights_are_bf16": a.weights.dtype == torch.bfloat16,
                      "takes_part": 1, "hands_out": 0, "most_naps": 10**12, **BUILD_OPTIONS, **a.options}
            values.bases[:len(bases)] = fields.pop("bases")
            for name, value in fields.items():
                setattr(values, name, int(value))
        stuck = self.library.emulator_call(len(self.ranks), structs, seed, ctypes.c_int64(NOBODY_MOVES))
        assert stuck == 0, f"{stuck} threads cannot go on"
        assert all(rank.intact() for rank in self.ranks), "something was written beside an item"
        return outs
