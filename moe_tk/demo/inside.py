"""What happened inside: the picture, when results leave, readiness, bytes, waits, the plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.text import Text

from moe_tk.demo.layout import percent, ratio, section, simple_table
from moe_tk.demo.picture import LETTERS, Lane, Picture, draw, progress
from moe_tk.demo.records import RankRecord
from moe_tk.demo.results import PHASES, Result, call_span

COLOURS = {"d": "cyan", "1": "green", "2": "yellow", "c": "magenta", "r": "blue", ".": "dim"}
PHASE_TEXT = {"dispatch": "rows sent", "gemm1": "GEMM 1", "gemm2": "GEMM 2", "combine": "results sent", "reduce": "results added"}
LABEL = 16       # characters before a row of a picture
MIN_SLOTS = 20
SMALL_BYTES = 16 * 1024  # below, bytes are shown, not KiB
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


def show(console: Console, ranks: Sequence[RankRecord], results: Sequence[Result]) -> None:
    """All sections about the inside; those of a fused pattern only if one ran and was traced."""
    fused = [result for result in results if result.has_trace]
    if fused:
        _show_picture(console, ranks, min(fused, key=lambda result: (result.pattern != "mega", result.mode != "ep")))
        _show_results_over_time(console, fused)
    _show_readiness(console, ranks)
    if fused:
        _show_bytes(console, ranks, fused)
        _show_phases(console, fused)
    _show_plan(console, ranks)


def make_picture(ranks: Sequence[RankRecord], result: Result, slots: int) -> Picture:
    """The traced call of a fused result."""
    roles = ranks[0].modes[result.mode].starting_roles
    return draw(result.pattern, [record.trace for record in result.records], roles, *call_span(result.records), slots)


def _slots(console: Console) -> int:
    return max(MIN_SLOTS, console.width - LABEL)


def _show_picture(console: Console, ranks: Sequence[RankRecord], result: Result) -> None:
    picture = make_picture(ranks, result, _slots(console))
    section(console, f"Who did what when: {result.name}, one call of {picture.milliseconds:.0f} ms",
            "One row for each block (a thread) of each rank, time to the right. A block is named by the role in which it starts; "
            "when that is done it helps with the next. Blank at first: routing is exchanged, tables are built.")
    console.print(_legend())
    for lane in picture.lanes:
        console.print(_lane_text(lane), no_wrap=True, overflow="crop")
    end = f"{picture.milliseconds:.0f} ms"
    console.print(Text(" " * LABEL + "0" + end.rjust(picture.slots - 1), style="dim"), no_wrap=True, overflow="crop")


def _legend() -> Text:
    text = Text()
    for phase in PHASES:
        letter = LETTERS[phase]
        text.append(letter, style=f"bold reverse {COLOURS[letter]}").append(f" {PHASE_TEXT[phase]}   ")
    return text.append(".", style="bold").append(" waits")


def _lane_text(lane: Lane) -> Text:
    first = lane.name.split()[0] == "send"
    text = Text(f"{f'rank {lane.rank}' if first else '':<7}{lane.name}".ljust(LABEL), style="bold" if first else "")
    for letter, full in zip(lane.letters, lane.full, strict=True):
        text.append(letter, style=f"{'reverse ' if full else ''}{COLOURS.get(letter, '')}")
    return text


def _show_results_over_time(console: Console, fused: Sequence[Result]) -> None:
    section(console, "When the results leave",
            "Tenths of the results that are on their way home (# all), over the length of a call. On the serial path the row "
            "would be all dots until the last tile is computed.")
    for result in fused:
        shares = progress([record.trace for record in result.records], "combine", *call_span(result.records), _slots(console))
        text = Text(result.name.ljust(LABEL), style="bold")
        for share in shares:
            mark = "#" if share >= 1 else "." if share == 0 else str(int(share * 10))
            text.append(mark, style="not bold dim" if share == 0 else "not bold magenta" if share < 0.5 else "magenta")
        console.print(text, no_wrap=True, overflow="crop")


def _show_readiness(console: Console, ranks: Sequence[RankRecord]) -> None:
    section(console, "Readiness: what the order of the tables allows, mean of the ranks",
            "In one segment, row blocks can start and results become ready late and all at once; segments (batches of tokens, one "
            "after the other) spread both. Columns: rows needed until 90 % of the row blocks can start; GEMM done until 50 % and "
            "90 % of the results are ready; time of GEMM and moving if both take 1: from 1 (full overlap) to 2 (none).")
    table = simple_table("", "segments", "90 % of blocks", "50 % of results", "90 % of results", "rows in + GEMM",
                         "GEMM + results out")
    for mode, record in ranks[0].modes.items():
        for segments in record.readiness:
            mean = _mean_of([rank.modes[mode].readiness[segments] for rank in ranks])
            table.add_row(f"[bold]{mode.upper()}", str(segments), percent(mean["blocks_90"]), percent(mean["jobs_50"]),
                          percent(mean["jobs_90"]), ratio(mean["gather_time"]), ratio(mean["push_time"]))
    console.print(table, highlight=False)
    if all(len(record.readiness) == 1 for record in ranks[0].modes.values()):
        console.print(Text("So few tokens make one segment: there is nothing to compare.", style="dim"))


def _mean_of(reports: Sequence[dict]) -> dict[str, float | None]:
    """Mean over the ranks that have a value."""
    known = {name: [report[name] for report in reports if report[name] is not None] for name in reports[0]}
    return {name: sum(values) / len(values) if values else None for name, values in known.items()}


def _show_bytes(console: Console, ranks: Sequence[RankRecord], fused: Sequence[Result]) -> None:
    if len(ranks) == 1:
        return
    most = max(rank.tokens for rank in ranks)
    each = most * ranks[0].sizes["hidden_size"] * ELEMENT_BYTES[ranks[0].dtype]
    unit, name = (1024, "KiB") if each >= SMALL_BYTES else (1, "bytes")
    section(console, f"Bytes moved in one call, {name} from each rank to each rank",
            "A row goes once to a rank that needs it, for however many experts; one partial sum comes back. The serial path moves "
            f"{each / unit:.0f} {name} between each pair, each way, needed or not.")
    for result, names in _same_bytes(fused):
        out, back = result.bytes_dispatched, result.bytes_combined
        equal = {count for sent in (out, back) for source, row in enumerate(sent) for to, count in enumerate(row) if source != to}
        if len(equal) == 1:
            console.print(Text.assemble((names, "bold"), f": {equal.pop() / unit:.0f} {name} between each pair, each way"))
        else:
            console.print(Text(names, style="bold"))
            console.print(Columns([_matrix("rows out", out, unit), _matrix("results back", back, unit)], padding=(0, 4)))


def _same_bytes(fused: Sequence[Result]) -> list[tuple[Result, str]]:
    """One result of each mode and movement, with the names of the patterns that moved the same."""
    groups: list[list[Result]] = []
    for result in fused:
        for group in groups:
            if _movement(group[0]) == _movement(result):
                group.append(result)
                break
        else:
            groups.append([result])
    return [(group[0], f"{group[0].mode.upper()} {' and '.join(result.pattern for result in group)}") for group in groups]


def _movement(result: Result) -> tuple:
    return result.mode, result.bytes_dispatched, result.bytes_combined


def _matrix(title: str, sent: list[list[int]], unit: int) -> RenderableType:
    table = simple_table("from", *(f"to {rank}" for rank in range(len(sent))), "sum", gap=1)
    for source, row in enumerate(sent):
        cells = ["-" if source == to else f"{count / unit:.0f}" for to, count in enumerate(row)]
        table.add_row(str(source), *cells, f"{sum(row) / unit:.0f}")
    return Group(Text(title, style="italic"), table)


def _show_phases(console: Console, fused: Sequence[Result]) -> None:
    section(console, "Work / wait by phase, ms per call, summed over the blocks of all ranks",
            "A block that moves rows and waits costs little while others compute; a wait in a GEMM phase is time lost. Where ranks "
            "share cores, both include time without a core.")
    table = simple_table("", *(result.name.replace(" ", "\n", 1) for result in fused))
    for phase in PHASES:
        table.add_row(f"[bold]{phase}", *(f"{1e3 * result.busy_s.get(phase, 0.0):.0f} / {1e3 * result.wait_s.get(phase, 0.0):.0f}"
                                          for result in fused))
    console.print(table, highlight=False)


def _show_plan(console: Console, ranks: Sequence[RankRecord]) -> None:
    plans: dict[str, list[str]] = {}
    for mode, record in ranks[0].modes.items():
        plans.setdefault(record.plan, []).append(mode.upper())
    for plan, modes in plans.items():
        section(console, f"The plan of {' and '.join(modes)}: what the layer chose, and why")
        console.print(Text(plan))
