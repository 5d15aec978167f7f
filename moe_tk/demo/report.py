"""What the demo prints: first what was computed, then what happened inside, last whether it is right and why it pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_tk.demo import inside
from moe_tk.demo.environment import usable_cores
from moe_tk.demo.layout import percent, ratio, section, simple_table
from moe_tk.demo.records import RankRecord
from moe_tk.demo.results import Result, reference_difference, same_bits, verdict

MODE_TEXT = {"ep": "expert parallel", "tp": "tensor parallel"}
PATTERN_TEXT = {"serial": "plain collectives: move all rows, compute, move all results",
                "two_kernel": "fused: rows arrive during GEMM 1, results leave during GEMM 2",
                "mega": "fused in one launch: both go on while both GEMMs run"}
BAR = 10  # characters of the bar of the serial path


class ReportConsole(Console):
    """A console that leaves it to the command what a reader who went away means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(console: Console, ranks: Sequence[RankRecord], results: Sequence[Result], seconds: float) -> None:
    """The whole report; seconds: of the whole run."""
    _show_task(console, ranks)
    inside.show(console, ranks, results)
    _show_correctness(console, ranks, results)
    _show_time(console, ranks, results)
    _show_verdict(console, results, seconds)


def _show_task(console: Console, ranks: Sequence[RankRecord]) -> None:
    sizes, tokens = ranks[0].sizes, [rank.tokens for rank in ranks]
    section(console, "What is computed")
    console.print(
        f"One Mixture-of-Experts layer of a trained language model, on its own input: [bold]{sum(tokens)} tokens[/] of held-out "
        f"text. The model's router sends each to [bold]{sizes['top_k']} of {sizes['num_experts']} experts[/]; the result is the "
        f"weighted sum of their outputs. Widths {sizes['hidden_size']} -> {sizes['intermediate_size']} -> {sizes['hidden_size']}, "
        f"SwiGLU, {ranks[0].dtype}.", highlight=False)
    grid = Table.grid(padding=(0, 2))
    places = f", one GPU each ({', '.join(dict.fromkeys(rank.gpu for rank in ranks))})" if ranks[0].gpu else ""
    grid.add_row("[bold]ranks", f"{len(ranks)} process{'es' * (len(ranks) > 1)} of this machine{places}; tokens: {_list(tokens)}")
    for mode in ranks[0].modes:
        grid.add_row(f"[bold]{mode.upper()}", f"{MODE_TEXT[mode]}: {_share_of_rank(mode, ranks)}")
    for pattern in next(iter(ranks[0].modes.values())).patterns:
        grid.add_row(f"[bold]{pattern}", PATTERN_TEXT[pattern])
    console.print(grid, highlight=False)


def _share_of_rank(mode: str, ranks: Sequence[RankRecord]) -> str:
    if mode == "ep":
        return f"a rank owns whole experts ({_list([rank.modes[mode].experts[1] for rank in ranks])}); rows go to their owners"
    columns = _list([rank.modes[mode].columns for rank in ranks])
    return f"a rank owns columns of all experts ({columns}); rows go everywhere"


def _list(values: Sequence[int]) -> str:
    """"1024", "1024 each" or "1366, 1365, 1365"."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]} each"
    return ", ".join(map(str, values))


def _show_correctness(console: Console, ranks: Sequence[RankRecord], results: Sequence[Result]) -> None:
    budget = results[0].budget
    section(console, "Is it right?",
            f"Relative error of the worst of {results[0].num_calls} calls, against the unfused layer in float64, computed here (it "
            f"is within {reference_difference(ranks):.0e} of y_ref, the output that ships). Budget: {budget:g}, what rounding to "
            f"{ranks[0].dtype} explains. Repeats: all calls, on every rank.")
    table = simple_table("", "error", "share of budget", "error vs y_ref", "repeats")
    for result, new_mode in _by_mode(results):
        if new_mode:
            table.add_section()
        repeats = "[green]same bits" if result.repeats_equal else "[bold red]DIFFER"
        table.add_row(f"[bold]{result.name}", f"{result.error:.2e}", _share_of_budget(result.error, budget),
                      f"{result.shipped_error:.2e}", repeats)
    console.print(table, highlight=False)
    agree = [first.mode.upper() for first, second in _fused_pairs(results) if same_bits(first, second)]
    if agree:
        console.print(Text(f"{' and '.join(agree)}: two_kernel and mega give the same bits.", style="dim"))


def _by_mode(results: Sequence[Result]) -> Iterable[tuple[Result, bool]]:
    """(result, whether another mode begins with it and it is not the first)."""
    for index, result in enumerate(results):
        yield result, index > 0 and results[index - 1].mode != result.mode


def _share_of_budget(error: float, budget: float) -> str:
    if not error <= budget:
        return "[bold red]OVER BUDGET"
    return f"[green]{percent(error / budget if budget else 0.0)}"


def _fused_pairs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """(two_kernel, mega) of each mode in which both ran."""
    modes = dict.fromkeys(result.mode for result in results)
    fused = [[result for result in results if result.mode == mode and result.pattern != "serial"] for mode in modes]
    return [(pair[0], pair[1]) for pair in fused if len(pair) == 2]


def _show_time(console: Console, ranks: Sequence[RankRecord], results: Sequence[Result]) -> None:
    if ranks[0].gpu:
        _show_gpu_time(console, results)
        return
    section(console, "Why fuse?",
            f"Time: median of {_calls(len(results[0].seconds))}, slowest rank; the patterns took turns. Of one traced call: the "
            "point at which half of the results are on their way; rows that arrived after a rank's first tile had begun; results "
            "sent before its last tile was done.")
    table = simple_table("", "ms per\ncall", "time /\nserial", "", "half\nsent", "rows\nin GEMM", "results\nin GEMM")
    table.columns[3].justify = "left"
    for result, new_mode in _by_mode(results):
        if new_mode:
            table.add_section()
        serial = result.pattern == "serial"
        bar = "" if result.ratio is None else "=" * min(2 * BAR, max(1, round(BAR * result.ratio)))
        table.add_row(f"[bold]{result.name}", f"{1e3 * result.median_s:.0f}", f"[bold]{ratio(result.ratio)}",
                      f"[{'dim' if serial else 'green'}]{bar}", "at end" if serial else percent(result.overlap.half_back),
                      percent(result.overlap.moved_in), percent(result.overlap.sent_back))
    console.print(table, highlight=False)
    for line, style in _conclusions(ranks, results):
        console.print(Text(line, style=style))


def _show_gpu_time(console: Console, results: Sequence[Result]) -> None:
    section(console, "How long does it take?",
            f"Time of a whole call: median of {len(results[0].seconds)} measurements by CUDA events, each of calls one after the "
            "other, slowest rank; exchange of the routing and schedule included. The patterns took turns.")
    table = simple_table("", "us per\ncall", "fastest", "slowest", "time /\nserial")
    for result, new_mode in _by_mode(results):
        if new_mode:
            table.add_section()
        table.add_row(f"[bold]{result.name}", *(f"{1e6 * value:.0f}" for value in (result.median_s, min(result.seconds),
                                                                                  max(result.seconds))), ratio(result.ratio))
    console.print(table, highlight=False)
    console.print(Text("A small layer on few tokens: the fixed cost of a call weighs more here than in the layers of large models. "
                       "What happens inside of a call is not recorded on GPUs.", style="bold yellow"))


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count > 1)}"


def _conclusions(ranks: Sequence[RankRecord], results: Sequence[Result]) -> list[tuple[str, str]]:
    """(sentence, style): what the numbers say, and what they do not."""
    lines = []
    best = min((result for result in results if result.overlap.half_back is not None),
               key=lambda result: (result.pattern != "mega", result.mode != "ep"), default=None)
    if best is not None:
        lines.append((f"{best.name}: {percent(best.overlap.sent_back)} of the results left while tiles were still being computed, "
                      f"half of all by {percent(best.overlap.half_back)} of the call. The serial path moves nothing while it "
                      "computes.", "bold"))
    cores, world = usable_cores(), len(ranks)
    on_cores = f"{cores} core{'s' * (cores > 1)}"
    shared = f"{on_cores} shared by {world} ranks: not a performance claim."
    alone = f"{world} rank{'s' * (world > 1)} of CPU threads on {on_cores}: says nothing about GPUs."
    return [*lines, (shared if world > cores else alone, "bold yellow")]


def _show_verdict(console: Console, results: Sequence[Result], seconds: float) -> None:
    console.print()
    bad = [result for result in results if not result.passed]
    text = Text(f" {'FAIL' if bad else 'PASS'} ", style=f"bold reverse {'red' if bad else 'green'}")
    console.print(text.append(f" {verdict(results)}, {seconds:.1f} s", style="not reverse bold"))
    console.print()
