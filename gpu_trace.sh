#!/usr/bin/env bash
# Checks and traces of 2 x H200 in at most 60 s, the traced module's build (about 18 s) included. Lies in the root of the tree; OUT set.
# Leaves: trace_log.txt (what was printed), trace_points.json (numbers of all calls), trace_files.tgz: unpacked in the root it
# replaces docs/img/trace_{ep,tp}.svg and benchmarks/results/trace_h200_x2{.json,_ep.json.gz}.
cd "$(dirname "$0")" || exit 1
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/trace_out}; mkdir -p "$OUT"; script=$(mktemp --suffix .py)
SECONDS=0
{
date +%T
cat > "$script" <<'PY'
import json, os, tarfile, time
from pathlib import Path
from moe_tk.bench.environment import environment
from moe_tk.bench.shapes import SHAPES
from moe_tk.trace import perfetto
from moe_tk.trace.options import Options, Point
from moe_tk.trace.picture import draw
from moe_tk.trace.show import show
from moe_tk.trace.start import record_all
from moe_tk.trace.summary import summarise

if __name__ == "__main__":
    begin, out = time.monotonic(), Path(os.environ["OUT"])
    qwen, seed = SHAPES["qwen3-30b-a3b"], SHAPES["seed"]
    if os.environ.get("TRACE_SMALL"):
        from moe_tk.bench.shapes import parse_shapes
        qwen = seed = parse_shapes("64,32,8,2")[0]
    points = (Point(qwen, 512, "ep"), Point(qwen, 2048, "ep"), Point(qwen, 8192, "ep"), Point(qwen, 2048, "tp"), Point(seed, 512, "ep"),
              Point(seed, 2048, "ep"), Point(seed, 8192, "ep"))
    traces = record_all(Options(points=points, backend=os.environ.get("TRACE_BACKEND", "cuda"), world=2, debug=True))
    print(f"recorded in {time.monotonic() - begin:.1f} s", flush=True)
    calls = [summarise(trace) for trace in traces]
    facts = {key: value for key, value in environment().items() if key not in ("command", "system")}
    text = json.dumps({"what": "moe_tk trace: one call each, uniform routing", "environment": facts, "calls": calls}, indent=1) + "\n"
    (out / "trace_points.json").write_text(text)
    for call in calls:
        show(call)
    files = {"docs/img/trace_ep.svg": draw(traces[1]), "docs/img/trace_tp.svg": draw(traces[3]), "benchmarks/results/trace_h200_x2.json": text}
    root = out / "trace_files"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    perfetto.write(traces[1], root / "benchmarks/results/trace_h200_x2_ep.json.gz", 32)
    with tarfile.open(out / "trace_files.tgz", "w:gz") as tar:
        for name in ("docs", "benchmarks"):
            tar.add(root / name, name)
    import shutil
    shutil.rmtree(root)
    print(f"done in {time.monotonic() - begin:.1f} s", flush=True)
PY
timeout --kill-after=3 45 "${PYTHON:-python}" "$script"
date +%T
timeout --kill-after=3 $((60 - SECONDS)) "${PYTHON:-python}" -m pytest -q -x tests/cuda -k traced_layer 2>&1 | tail -15
date +%T
} > "$OUT/trace_log.txt" 2>&1
tail -3 "$OUT/trace_log.txt"
