"""Writes the generated parts of docs/schedule.md: the worked example and the measured tables.

Run as a program it replaces them in the page; test_page.py asserts that the page equals what the code says.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from moe_tk.schedule import Tables, build_tables, readiness, task_order, trace_routing

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "schedule.md"
SCALING = ROOT / "benchmarks" / "results" / "schedule_scaling.json"

# The worked example: 2 ranks with room for 4 tokens each, 4 experts, top 2.
IDS = [[0, 2], [1, 2], [3, 1], [0, 3],    # rank 0
       [2, 3], [0, -1], [1, 0], [3, 2]]   # rank 1: its last row is masked (3 tokens)
WEIGHTS = [[0.7, 0.2], [0.6, 0.3], [0.5, 0.4], [0.8, 0.1],
           [0.5, 0.5], [0.9, 0.0], [0.6, 0.2], [0.0, 0.0]]
COUNTS = [4, 3]
ROW_BLOCK, SEGMENTS, JOB_CHUNK, COLS = 2, 2, 2, 2
FOLLOWED, X = 1, 10.0  # token 1 of rank 0, whose hidden state is the number 10; expert e maps x to (e + 1) * x


def example() -> list[Tables]:
    """The tables of both ranks."""
    return [build_tables(torch.tensor(IDS), token_counts=COUNTS, world=2, rank=rank, num_experts=4, mode="ep",
                         row_block=ROW_BLOCK, segments=SEGMENTS, job_chunk=JOB_CHUNK) for rank in range(2)]


def _rows(table: Tensor) -> str:
    if table.dim() == 1:
        return "[" + ", ".join(f"{v:2d}" for v in table.tolist()) + "]"
    return "\n                   ".join(_rows(row) for row in table)


def example_routing() -> str:
    lines = ["row  rank  t   topk_ids   topk_weights"]
    for row, (ids, weights) in enumerate(zip(IDS, WEIGHTS, strict=True)):
        note = "   <- followed" if row == FOLLOWED else "   (masked)" if row % 4 >= COUNTS[row // 4] else ""
        lines.append(f"{row:3d}  {row // 4:4d}  {row % 4}   [{ids[0]:2d}, {ids[1]:2d}]   {weights}{note}")
    return _code("\n".join(lines))


def example_tables() -> str:
    parts = []
    for tables in example():
        lines = [f"rank {tables.rank}: experts {tables.first_expert}..."
                 f"{tables.first_expert + tables.num_local_experts - 1}, {tables.num_slots} slots, "
                 f"{tables.num_blocks} row blocks, {tables.num_jobs} jobs"]
        lines += [f"  {name:<16} {_rows(table)}" for name, table in tables.tensors().items()]
        order = task_order(tables, COLS)
        lines.append(f"  {'task_order(2)':<16} {_rows(order)}")
        parts.append(_code("\n".join(lines)))
    return "\n\n".join(parts)


def example_walk() -> str:
    """The path of the followed token, every number taken from the tables."""
    tables = example()
    source, k = tables[0], 2
    segment = FOLLOWED * SEGMENTS // COUNTS[0]
    bits = int(source.contributors[FOLLOWED])
    steps = [
        f"**Routing.** Token {FOLLOWED} of rank 0 is global row {FOLLOWED}, with x = {X:g}. Its router chose experts "
        f"{IDS[FOLLOWED][0]} and {IDS[FOLLOWED][1]} with weights {WEIGHTS[FOLLOWED][0]} and {WEIGHTS[FOLLOWED][1]}: "
        f"pairs {FOLLOWED * k} and {FOLLOWED * k + 1}. It is in segment {FOLLOWED} * {SEGMENTS} // {COUNTS[0]} = "
        f"{segment}.",
        f"**Who answers.** `contributors[{FOLLOWED}]` = {bits} = 0b{bits:02b}: both ranks have work for it, so rank 0 "
        "will wait for two partial rows.",
    ]
    total = 0.0
    for there in tables:
        steps += _walk_on(there, source, segment)
        total += _partial(there)[1]
    partials = " + ".join(f"{_partial(there)[1]:g}" for there in tables)
    steps.append(f"**Result.** Rank 0 adds the planes of its contributors in rank order: {partials} = {total:g}.")
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def _partial(there: Tables) -> tuple[str, float]:
    """(arithmetic, value) of the followed token's job on rank `there`."""
    terms, value = [], 0.0
    for j, slot in enumerate(there.slots[FOLLOWED].tolist()):
        if slot >= 0:
            terms.append(f"{WEIGHTS[FOLLOWED][j]} * ({IDS[FOLLOWED][j]} + 1) * {X:g}")
            value += WEIGHTS[FOLLOWED][j] * (IDS[FOLLOWED][j] + 1) * X
    return " + ".join(terms), value


def _walk_on(there: Tables, source: Tables, segment: int) -> list[str]:
    rank = there.rank
    j, slot = next((j, s) for j, s in enumerate(there.slots[FOLLOWED].tolist()) if s >= 0)
    block = slot // ROW_BLOCK
    group = int(there.block_group[block])
    expert = group % there.num_local_experts
    sent = source.send_order[rank].tolist().index(FOLLOWED)
    place = there.delivery_order.tolist().index(FOLLOWED)
    tasks = [i for i, task in enumerate(task_order(there, COLS).tolist()) if task[2] == block]
    job = there.job_order.tolist().index(FOLLOWED)
    arithmetic, value = _partial(there)
    chunk = FOLLOWED // JOB_CHUNK
    return [
        f"**Slot on rank {rank}.** Expert {IDS[FOLLOWED][j]} is local expert {expert}, group {segment} * "
        f"{there.num_local_experts} + {expert} = {group}, slots {int(there.expert_offsets[group])} up to "
        f"{int(there.expert_offsets[group + 1])}. `slots[{FOLLOWED}, {j}]` = {slot}, and back: `slot_pair[{slot}]` = "
        f"{int(there.slot_pair[slot])}.",
        f"**Move to rank {rank}.** `send_order[{rank}, {sent}]` = {FOLLOWED} on rank 0: it is the "
        f"{_ordinal(sent + 1)} of the {int(source.send_count[rank])} rows that rank 0 sends there, and "
        f"`delivery_order[{place}]` = {FOLLOWED} on rank {rank}.",
        f"**Gate on rank {rank}.** Slot {slot} is in row block {slot} // {ROW_BLOCK} = {block}, with `block_group` "
        f"{group} and `block_target` {int(there.block_target[block])}: tasks {' and '.join(map(str, tasks))} of "
        f"`task_order` start once {int(there.block_target[block])} row(s) of the block have arrived.",
        f"**Job on rank {rank}.** Task {tasks[-1]} completes row block {block}, and with it the token's last slot "
        f"here: `job_order[{job}]` = {FOLLOWED}. Rank {rank} sends {arithmetic} = {value:g} back to rank 0. It is one "
        f"of `expected[0]` = {int(there.expected[0])} jobs for rank 0, and one of `chunk_expected[0, {chunk}]` = "
        f"{int(there.chunk_expected[0, chunk])} in chunk {chunk}.",
    ]


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def readiness_table() -> str:
    """Readiness on the trained router's routing of 16384 held-out tokens, rank 0, row blocks of 128, 16 columns."""
    ids = trace_routing(2).topk_ids
    lines = ["| ranks | segments | padding | row blocks 50 / 90 %, delivery order | same, token order "
             "| gather time (token order) | jobs 50 / 90 % | push time |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for world, mode in ((2, "ep"), (4, "ep"), (8, "ep"), (4, "tp")):
        for segments in (1, 2, 4, 8):
            tables = build_tables(ids, token_counts=[len(ids) // world] * world, world=world, rank=0, num_experts=64,
                                  mode=mode, row_block=128, segments=segments)
            r = readiness(tables, 16)
            lines.append(
                f"| {world} {mode.upper()} | {segments} | {100 * r.padding_share:.1f} % "
                f"| {100 * r.blocks_50:.1f} / {100 * r.blocks_90:.1f} "
                f"| {100 * r.blocks_50_token_order:.1f} / {100 * r.blocks_90_token_order:.1f} "
                f"| {r.gather_time:.2f} ({r.gather_time_token_order:.2f}) "
                f"| {100 * r.jobs_50:.1f} / {100 * r.jobs_90:.1f} | {r.push_time:.2f} |")
    return "\n".join(lines)


def scaling_table() -> str:
    """The measurements in benchmarks/results/schedule_scaling.json."""
    record = json.loads(SCALING.read_text())
    lines = ["| ranks | tokens per rank | pairs | vectorised, ms | ns per pair | golden loops, ns per pair |",
             "|---:|---:|---:|---:|---:|---:|"]
    for row in record["rows"]:
        golden = "" if row["golden_ns_per_pair"] is None else f"{row['golden_ns_per_pair']:.0f}"
        lines.append(f"| {row['world']} | {row['tokens_per_rank']} | {row['pairs']} | {row['vectorised_ms']:.2f} "
                     f"| {row['vectorised_ns_per_pair']:.0f} | {golden} |")
    machine, versions = record["machine"], record["versions"]
    lines += ["", f"Measured on {machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, "
                  f"{record['date'][:10]}: median of {record['repeats']} builds; golden: one build."]
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


PARTS = {"example-routing": example_routing, "example-tables": example_tables, "example-walk": example_walk,
         "readiness": readiness_table, "scaling": scaling_table}


def marked(name: str, text: str) -> re.Match[str]:
    """The part `name` of a page: between <!-- generated: name --> and <!-- end -->."""
    found = re.search(rf"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end -->)", text, re.DOTALL)
    assert found, f"{PAGE.name} has no part {name}"
    return found


def main() -> None:
    text = PAGE.read_text()
    for name, make in PARTS.items():
        found = marked(name, text)
        text = text[: found.start(2)] + make() + text[found.end(2):]
    PAGE.write_text(text)
    print(f"wrote {', '.join(PARTS)} into {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
