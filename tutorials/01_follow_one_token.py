"""Tutorial 1: follow one token through a Mixture-of-Experts layer on two ranks.

    python tutorials/01_follow_one_token.py

Two ranks (processes of this machine), four experts, top 2. Experts 0 and 1 live on rank 0, experts 2 and 3 on rank 1.
So that you can check every number in your head, a hidden state is one number repeated, and expert e maps x to (e + 1) * x.

Nothing here is a simulation. `layer(...)` runs the fused kernel of the CPU back end in both processes, and what is printed
is read from the tables and buffers of that very call. At the end the same numbers are worked out from the definition.
"""

from __future__ import annotations

import torch

import moe_tk
from moe_tk.runtime.launch import Activation
from moe_tk.runtime.launcher import run_ranks

WORLD, EXPERTS, TOP_K, WIDTH = 2, 4, 2, 16
TOKENS = [4, 3]          # per rank: ranks need not have the same number
OWNER, TOKEN = 0, 1      # the token that we follow: token 1 of rank 0

X = [[3.0, 10.0, 5.0, 2.0],   # the hidden state of each token, by rank
     [7.0, 1.0, 4.0]]
# What a router would say: two experts for each token, and their weights. -1 means "none": such a pair takes no slot.
IDS = [[[0, 2], [1, 2], [3, 1], [0, 3]],
       [[2, 3], [0, -1], [1, 0]]]
WEIGHTS = [[[0.75, 0.25], [0.5, 0.25], [0.5, 0.5], [0.75, 0.125]],
           [[0.5, 0.5], [1.0, 0.0], [0.5, 0.25]]]


def expert_weights(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [count, 2I, H] and w2 [count, H, I] of experts first, first + 1, ...: each maps x to (e + 1) * x.

    An expert computes w2 @ (g * sigmoid(alpha * g) * (u + beta)), with g (gate) and u (up) the two halves of w13 @ x. With
    alpha = 0, beta = 1, g = 2 * x and u = 0 the bracket is 2 * x * 0.5 * 1 = x, and w2 = (e + 1) * identity does the rest.
    """
    eye = torch.eye(WIDTH)
    w13 = torch.cat([2 * eye, torch.zeros(WIDTH, WIDTH)]).repeat(count, 1, 1)
    w2 = torch.stack([(expert + 1) * eye for expert in range(first, first + count)])
    return w13, w2


def one_rank(rank: int, world: int) -> dict:
    """What each process does: make the layer, load this rank's experts, call it. Returns plain numbers for the parent."""
    layer = moe_tk.MoELayer(None, num_experts=EXPERTS, top_k=TOP_K, hidden_size=WIDTH, intermediate_size=WIDTH,
                            max_tokens_per_rank=max(TOKENS), mode="ep", pattern="mega", dtype=torch.float32,
                            activation=Activation(alpha=0.0, beta=1.0), weight_position="combine")
    first, count = moe_tk.schedule.expert_range(EXPERTS, world, rank)
    layer.load_weights(*expert_weights(first, count))
    layer.record_trace = True

    hidden = torch.tensor(X[rank])[:, None].expand(-1, WIDTH).contiguous()          # [T, H]
    out = layer(hidden, torch.tensor(IDS[rank]), torch.tensor(WEIGHTS[rank]))       # [T, H]: the fused layer, for real

    tables = layer.tables  # the schedule of the call that has just run, on this rank
    # Work buffers are an inside of the layer: valid until its next call, here to look at. One number of each row is enough.
    expert_out = layer.session.workspace.local("expert_out")[:, 0].tolist()                    # by slot
    planes = layer.session.workspace.region("planes", torch.float32)[:, :, 0].tolist()         # by sending rank, by own token
    assert (out == out[:, :1]).all()  # one number repeated went in, one number repeated comes out
    return {"out": out[:, 0].tolist(), "first_expert": first, "row_block": tables.row_block, "stride": tables.tokens_per_rank,
            "phases": [event[2] for event in layer.stats.trace], "expert_out": expert_out,
            "planes": planes, **{name: table.tolist() for name, table in tables.tensors().items()}}


def step(number: int, title: str, rows: list[tuple[str, object]]) -> None:
    """Prints one stop of the journey."""
    print(f"\n{number}. {title}")
    for name, value in rows:
        print(f"     {name:<46} {value}")


def follow(ranks: list[dict]) -> float:
    """Prints the journey of the token; returns the sum of the partial rows that came back for it."""
    ids, weights, x = IDS[OWNER][TOKEN], WEIGHTS[OWNER][TOKEN], X[OWNER][TOKEN]
    row = OWNER * ranks[0]["stride"] + TOKEN     # its number among the tokens of all ranks
    step(1, f"The router has spoken: token {TOKEN} of rank {OWNER}", [
        ("hidden state x", x), ("experts, weights", f"{ids}, {weights}"), ("global row: rank * T + t", row)])

    owing = [rank for rank in range(WORLD) if ranks[OWNER]["contributors"][TOKEN] >> rank & 1]
    step(2, "Who will answer? The owner waits for these ranks and no other", [
        (f"contributors[{TOKEN}], one bit for each rank", bin(ranks[OWNER]["contributors"][TOKEN])), ("ranks", owing)])

    partials = []
    for rank in owing:
        print(f"\n   ---- on rank {rank} ----")
        partials.append(visit(ranks[OWNER], ranks[rank], rank, row, x))

    step(6, f"reduce: rank {OWNER} adds the partial rows, always in the order of the ranks, so that bits repeat", [
        (" + ".join(f"{partial:g}" for partial in partials), f"{sum(partials):g}"),
        ("what the layer returned", f"{ranks[OWNER]['out'][TOKEN]:g}")])
    return sum(partials)


def visit(owner: dict, here: dict, rank: int, row: int, x: float) -> float:
    """Prints what happens to the token on one rank; returns the partial row that this rank sends back."""
    if rank != OWNER:
        place = owner["send_order"][rank].index(TOKEN)
        step(3, "send: the row crosses over once, in the order in which it will be used", [
            (f"send_order[{rank}] on rank {OWNER}", owner["send_order"][rank][:owner["send_count"][rank]]),
            ("our token is row", f"{place + 1} of {owner['send_count'][rank]} sent there")])
    else:
        step(3, "no send: the row is here already", [])
    slots = [(choice, slot) for choice, slot in enumerate(here["slots"][row]) if slot >= 0]
    for choice, slot in slots:
        block = slot // here["row_block"]
        step(4, "place, gate, compute: the row gets a slot beside the other rows of its expert", [
            (f"slots[{row}], one for each of its experts", here["slots"][row]),
            (f"slot {slot} is in row block", f"{block} (of {here['row_block']} slots)"),
            (f"block_target[{block}]: its tiles start after", f"{here['block_target'][block]} row(s) have arrived"),
            (f"expert {IDS[OWNER][TOKEN][choice]} has made of {x:g}", f"{here['expert_out'][slot]:g}")])
    sums = [f"{WEIGHTS[OWNER][TOKEN][choice]:g} * {here['expert_out'][slot]:g}" for choice, slot in slots]
    partial = owner["planes"][rank][TOKEN]  # where this rank's answer arrived, on the owner
    step(5, "combine: its last tile is done, so its weighted sum goes home at once, while others are still computed", [
        ("job_order: jobs in the order they become ready", here["job_order"]),
        ("our token is job", f"{here['job_order'].index(row) + 1} of {len(here['job_order'])}"),
        (f"{' + '.join(sums)}, as it arrived on rank {OWNER}", f"{partial:g}")])
    return partial


def main() -> None:
    ranks = run_ranks(WORLD, one_rank, timeout_s=300.0)  # long: the first run ever compiles the kernels

    followed = follow(ranks)

    print("\nWhat the blocks of rank 1 worked on in that call (items by phase):")
    for phase in ("dispatch", "gemm1", "gemm2", "combine", "reduce"):
        print(f"     {phase:<10} {ranks[1]['phases'].count(phase)}")

    # Every token of every rank, against the definition of the layer. All numbers are exact in float32, so we may ask for equality.
    for rank in range(WORLD):
        for token, (x, ids, weights) in enumerate(zip(X[rank], IDS[rank], WEIGHTS[rank], strict=True)):
            exact = sum(weight * (expert + 1) * x for expert, weight in zip(ids, weights, strict=True) if expert >= 0)
            assert ranks[rank]["out"][token] == exact, (rank, token, ranks[rank]["out"][token], exact)
    assert ranks[OWNER]["out"][TOKEN] == followed == 0.5 * 2 * 10 + 0.25 * 3 * 10
    print("\nAll 7 tokens have exactly the result that the definition gives.")


if __name__ == "__main__":
    main()
