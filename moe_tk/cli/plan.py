"""`moe_tk plan`: the two accounts that precede any fusion, for shapes on a machine, and the pattern that "auto" would take."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from moe_tk.bench.shapes import SHAPES, Shape, parse_shapes
from moe_tk.errors import ArgumentError
from moe_tk.planner import Choice, LayerWork, Machine, choose_fusion, machine_of, row_block_of
from moe_tk.planner.accounts import MIN_CEILING, MIN_WAVES
from moe_tk.planner.fusion import SERIAL_SCALED_ROWS
from moe_tk.planner.machine import H200
from moe_tk.schedule.ownership import expert_range, shard_range
from moe_tk.sizes import check_count, check_layer_sizes, check_positive

RATES = ("tflops", "hbm_gbs", "wire_gbs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("--shapes", default="all", help=f"{', '.join(SHAPES)}, or H,I,E,k; default: all")
    parser.add_argument("--tokens", default="64,512,2048,8192", help="of each rank, several with commas; default: %(default)s")
    parser.add_argument("--world", type=int, default=2, help="ranks; default: %(default)s")
    parser.add_argument("--mode", choices=("ep", "tp"), default="ep", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("bf16", "e4m3"), default="bf16", help="default: %(default)s")
    parser.add_argument("--gpu", default=H200.name, help="name of the GPU, of which the rates are known: H200, H100, GH200")
    parser.add_argument("--sms", type=int, default=H200.sms, help="multiprocessors in use; default: %(default)s")
    parser.add_argument("--tflops", type=float, help="of a bf16 GEMM, in place of the known rate; e4m3 ones: times 1.83")
    parser.add_argument("--hbm-gbs", type=float, help="of the GPU's memory in GB/s")
    parser.add_argument("--wire-gbs", type=float, help="to the other GPUs together, one way, in GB/s")


def machine_from(args: argparse.Namespace) -> Machine:
    """The machine that the arguments describe."""
    given = {name: check_positive(name, getattr(args, name)) for name in RATES if getattr(args, name) is not None}
    machine = machine_of(args.gpu, check_count("sms", args.sms))
    return replace(machine, origin=f"{', '.join(given)} given, others {machine.origin}", **given) if given else machine


def work_of(shape: Shape, *, tokens: int, world: int, mode: str, scaled: bool = False) -> LayerWork:
    """A call of that shape as rank 0 has it."""
    check_layer_sizes(world=world, rank=0, num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden,
                      intermediate_size=shape.intermediate, max_tokens_per_rank=max(tokens, 1), mode=mode)
    ep = mode == "ep"
    return LayerWork(tokens=tokens, world=world, top_k=shape.top_k, num_experts=shape.experts,
                     local_experts=expert_range(shape.experts, world, 0)[1] if ep else shape.experts, hidden=shape.hidden,
                     local_intermediate=shape.intermediate if ep else shard_range(shape.intermediate, world, 0)[1],
                     row_block=row_block_of(world, tokens, shape.top_k, shape.experts), scaled=scaled)


def tokens_from(text: str) -> list[int]:
    """The numbers of "64,512"."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise ArgumentError(f"--tokens is {text!r}, wanted integers with commas between them")
    return [int(word) for word in words]


def row(shape: Shape, tokens: int, choice: Choice) -> tuple[str, ...]:
    """One line of the table."""
    return (shape.name, str(tokens), f"{choice.compute_s * 1e6:.0f}", f"{choice.move_s * 1e6:.0f}", f"{choice.ceiling:.2f}",
            f"{choice.waves:.1f}", choice.pattern)


def run(args: argparse.Namespace) -> int:
    """Prints the accounts of each shape and number of tokens. Returns 0."""
    machine, console = machine_from(args), Console()
    console.print(f"{machine.name}: {machine.sms} multiprocessors, {machine.tflops:.0f} TFLOP/s, {machine.hbm_gbs:.0f} GB/s "
                  f"memory, {machine.wire_gbs:.0f} GB/s wire ({machine.origin}); {args.world} ranks, {args.mode}, {args.dtype}",
                  highlight=False)
    table = Table(box=box.SIMPLE)
    for name in ("shape", "tokens", "compute us", "move us", "ceiling", "waves", "pattern"):
        table.add_column(name, justify="left" if name in ("shape", "pattern") else "right", no_wrap=True)
    for shape in parse_shapes(args.shapes):
        for tokens in tokens_from(args.tokens):
            work = work_of(shape, tokens=tokens, world=args.world, mode=args.mode, scaled=args.dtype == "e4m3")
            table.add_row(*row(shape, tokens, choose_fusion(work, machine)))
    console.print(table)
    console.print(f"ceiling: what perfect overlap could gain, (compute + move) / the larger; from {MIN_CEILING:g} fused. "
                  f"waves: tiles of GEMM 1 / multiprocessors; below {MIN_WAVES:g}, or with less to gain, the shorter estimate. "
                  f"e4m3: serial from {SERIAL_SCALED_ROWS} rows an expert on.", highlight=False)
    return 0
