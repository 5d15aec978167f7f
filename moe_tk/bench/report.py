"""Tables of the lines, for the terminal."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_tk.bench.routing_cost import EVEN, with_routing_costs
from moe_tk.bench.run import time_of
from moe_tk.demo.layout import percent, ratio, section, simple_table

ACCOUNT = {  # columns of the attribution
    "fused_us": "fused", "compute_us": "GEMMs\nalone", "communicate_us": "comm\nalone", "exposed_us": "exposed",
    "exposed_front_us": "before and\nin GEMM 1", "exposed_back_us": "in GEMM 2\nand tail", "sm_tax_us": "SM tax"}


def show(console: Console, lines: list[dict[str, Any]], *, backend: str, how: str) -> None:
    """All tables, those of one shape, mode, dtype and routing together. how: one sentence about the timing."""
    for (title, _), group in groupby(lines, key=lambda line: (title_of(line), line["world"])):
        some = list(group)
        section(console, title, subtitle(some[0]))
        reasons = show_times(console, some)
        for reason in reasons:
            console.print(Text(reason, style="dim"))
        show_account(console, some)
        show_sweep(console, some)
    if backend != "cpu":  # the floor is a GPU's
        show_routing_costs(console, with_routing_costs(lines))
    console.print()
    console.print(Text(how, style="dim"))
    if backend == "cpu":
        console.print(Text("CPU back end: ranks share the cores of this machine. Says nothing about GPUs.", style="bold yellow"))


def title_of(line: dict[str, Any]) -> str:
    return f"{line['shape']}  {line['mode'].upper()}  {line['dtype']}  {line['routing']}"


def subtitle(line: dict[str, Any]) -> str:
    return (f"H {line['hidden']}, I {line['intermediate']}, {line['experts']} experts, top {line['top_k']}, {line['world']} ranks; "
            "us of a call")


def show_times(console: Console, lines: list[dict[str, Any]]) -> list[str]:
    """The table; returns what must be said below it."""
    everybody = [contender for line in lines for contender in line["contenders"]]
    sides = {contender["name"]: side_of(contender) for contender in everybody if contender["state"] != "not available"}
    names, kinds = list(sides), [kind for kind in ("eager", "sustained") if any(extra(line, kind) for line in lines)]
    columns = [f"{name}\n{side}" for name, side in sides.items()] + ["ours /\nfloor", "ours /\nrival"]
    table = simple_table("T", "floor", *columns, *(f"{kind}\n(best ours)" for kind in kinds), gap=1)
    reasons = dict.fromkeys(f"{contender['name']}: not available: {contender['why']}" for contender in everybody
                            if contender["state"] == "not available")
    for line in lines:
        if "why" in line:
            reasons[f"T {line['tokens']}: {line['why']}"] = None
            continue
        by_name = {contender["name"]: contender for contender in line["contenders"]}
        cells = [cell(by_name[name], line, reasons) if name in by_name else "" for name in names]
        floor = floor_cell(line["floor"]["us"], line["floor"]["bound"]) if line["to_floor"] else "-"
        table.add_row(str(line["tokens"]), floor, *cells, ratio(line["to_floor"]),
                      ratio(line["to_rival"]), *(extra(line, kind) for kind in kinds))
    console.print(table, highlight=False)
    return list(reasons)


def floor_cell(us: float, bound: str) -> str:
    """With the letters of the explanation: w, f, wire."""
    return f"{us:.0f} [dim]{bound if bound == 'wire' else bound[0]}[/]"


def side_of(contender: dict[str, Any]) -> str:
    """What stands below its name."""
    return ("baseline" if contender["against"] else "ours") if contender["ours"] else "rival"


def cell(contender: dict[str, Any], line: dict[str, Any], reasons: dict[str, None]) -> str:
    """One number, with a mark when it is not of calls in a graph; reasons grows by why there is none."""
    us = time_of(contender)
    for note in contender["notes"]:
        reasons[f"{contender['name']}: {note}"] = None
    if us is None:
        reasons[f"{contender['name']}, T {line['tokens']}: failed: {contender['why']}"] = None
        return "[red]failed"
    best = line["best_rival"] if contender["against"] else line["ours"]
    text = f"{us:.0f}" if us >= 100 else f"{us:.1f}"
    mark = "" if "graph" in contender["us"] else " [dim]e[/]"
    return f"[bold]{text}[/]{mark}" if best and best["name"] == contender["name"] else text + mark


def extra(line: dict[str, Any], kind: str) -> str:
    """Another time of our best pattern; "" where it was not taken or is the one in the table."""
    if not line.get("ours"):
        return ""
    us = next(contender["us"] for contender in line["contenders"] if contender["name"] == line["ours"]["name"])
    return f"{us[kind]['median']:.0f}" if kind in us and (kind != "eager" or "graph" in us) else ""


def show_routing_costs(console: Console, lines: list[dict[str, Any]]) -> None:
    """A table for each shape, mode and dtype that has lines beside a balanced one."""
    found = [line for line in lines if "routing_cost" in line]
    if not found:
        return
    section(console, "What routing costs", f"(us / floor) over (us / floor) of {EVEN}: at equal work, 1.00 is nothing")
    for title, group in groupby(found, key=lambda line: f"{line['shape']}  {line['mode'].upper()}  {line['dtype']}"):
        some = list(group)
        names = list(dict.fromkeys(name for line in some for name in line["routing_cost"]["patterns"]))
        table = simple_table(f"{title}\nT, routing", "floor", f"floor,\n{EVEN}", *names, gap=1)
        for line in some:
            cost = line["routing_cost"]
            table.add_row(f"{line['tokens']}, {line['routing']}", floor_cell(line["floor"]["us"], line["floor"]["bound"]),
                          floor_cell(cost["balanced_floor_us"], cost["balanced_bound"]),
                          *(ratio(cost["patterns"].get(name)) for name in names))
        console.print(table, highlight=False)
    if any(line["routing_cost"]["bound"] != line["routing_cost"]["balanced_bound"] for line in found):
        console.print(Text("Where different things bound the two floors, the ratio also says how close the layer comes to either.",
                           style="dim"))


def show_account(console: Console, lines: list[dict[str, Any]]) -> None:
    found = [(line["tokens"], line["attribution"]) for line in lines if "attribution" in line]
    if not found:
        return
    table = simple_table("T", *ACCOUNT.values(), "overlap", "inter-\nference", gap=1)
    for tokens, account in found:
        if "why" in account:
            console.print(Text(f"attribution at T {tokens}: {account['why']}", style="dim"))
            continue
        cells = [f"{account[name]:.0f}" if name in account else "-" for name in ACCOUNT]
        table.add_row(str(tokens), *cells, percent(account["overlap"]), ratio(account["interference"]))
    console.print(table, highlight=False)


def show_sweep(console: Console, lines: list[dict[str, Any]]) -> None:
    found = [(line["tokens"], line["sweep"]) for line in lines if "sweep" in line]
    good = [(tokens, sweep["export_blocks"]) for tokens, sweep in found if "export_blocks" in sweep]
    for tokens, sweep in found:
        if "why" in sweep:
            console.print(Text(f"sweep at T {tokens}: {sweep['why']}", style="dim"))
    if not good:
        return
    counts = list(good[0][1]["fused"])
    table: Table = simple_table("T, blocks that send", *map(str, counts))
    for tokens, kinds in good:
        for kind, us in kinds.items():
            table.add_row(f"{tokens} {kind}", *(f"{us[count]:.0f}" for count in counts))
    console.print(table, highlight=False)
