"""Draws where the time of a decode step goes, from traces of SGLang's profiler.

    python benchmarks/timeline.py --cut TRACE... --out FILE.csv [--kernels FILE.csv] [--steps 3]
    python benchmarks/timeline.py FILE.csv [--batch 1] [--out FILE.svg]

frozen_kv_mtp_v2.py --timeline writes the traces: <variant>-<batch>.trace.json.gz. --cut takes some
steps out of the middle of each. A step lasts from the first kernel of the target's CUDA graph,
which verifies the drafted tokens, to the first kernel of the next. The second command prints the
medians of a step, and draws a batch size: for each variant one line for the GPU and one for the
scheduler's host. A kernel of the longest kind of graph is the target's, one of another graph is the
draft's, and one outside of a graph is neither's.

--kernels writes how often each kernel ran in a step, and how long, and prints the sums by what the
kernel does, which its name tells. floor.py says how long a step takes at least.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import options, results
from measuring.svg import drawn

Span = tuple[float, float]
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
TARGET, DRAFT, OTHER = "target's graph", "draft's graph", "outside of graphs"
ON = (TARGET, DRAFT, OTHER)
WAITS, CALLS = "waits for the GPU", "launches"
CLOSE = 3.0  # us: two kernels so close to each other are drawn as one
LONG_COPY = 100.0  # us: to begin a copy takes less
# What a kernel does, by its name: the first that is found.
DOES = {
    "attention": re.compile(
        r"attn|attention|_fwd_(?:grouped_)?kernel|_mha|xqa|flash(?!infer)|_verify_(?:part|whole)",
        re.I,
    ),
    "matrix products": re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma", re.I),
    "norms": re.compile(r"norm", re.I),
    "rope and KV": re.compile(r"rope|rotary|kv_?cache|set_kv|store_kv|cache_loc", re.I),
    "choosing tokens": re.compile(r"softmax|argmax|top_?k|sampl|verify|sort|centroid", re.I),
    "copies": re.compile(r"memcpy|memset|copy|index|gather|scatter|concat|CatArray", re.I),
    "elementwise": re.compile(r"elementwise|act_and_mul|gelu|silu|reduce", re.I),
}
OTHERS = "others"
WIDTH, LEFT, RIGHT, TOP, LANE = 1000, 130, 24, 86, 22
COLOURS = {TARGET: "full", DRAFT: "swa", OTHER: "best", WAITS: "waits", CALLS: "calls"}


@dataclass(frozen=True)
class Piece:
    """A part of a step's time. begin, end: us from the beginning of the first step."""

    variant: str
    batch: int
    step: int
    what: str
    begin: float
    end: float


def events(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    plain = gzip.decompress(raw) if path.suffix == ".gz" else raw
    found: list[dict[str, Any]] = json.loads(plain)["traceEvents"]
    return [e for e in found if e.get("ph") == "X" and e.get("cat") in (*ON_GPU, *ON_HOST)]


def kinds(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float, int, str]]:
    """(kind, begin, end, launch, name) of all that ran on the GPU.

    Raises ValueError if no CUDA graph was replayed.
    """
    launches = {
        e["args"]["correlation"]
        for e in found
        if e["cat"] in ON_HOST and "GraphLaunch" in e["name"]
    }
    on_gpu = [e for e in found if e["cat"] in ON_GPU]
    nodes: dict[int, int] = defaultdict(int)
    for e in on_gpu:
        if e["args"].get("correlation") in launches:
            nodes[e["args"]["correlation"]] += 1
    if not nodes:
        raise ValueError("no CUDA graph was replayed in this trace, so it has no steps to cut")
    most = max(nodes.values())
    for e in on_gpu:
        launch = e["args"].get("correlation", 0)
        count = nodes.get(launch, 0)
        kind = OTHER if not count else TARGET if 2 * count > most else DRAFT
        yield kind, e["ts"], e["ts"] + e["dur"], launch if count else 0, e["name"]


def waits(event: Mapping[str, Any]) -> bool:
    """True of a call in which the host waits. A copy into memory that is not pinned does, too."""
    return "Synchronize" in event["name"] or (
        "Memcpy" in event["name"] and event["dur"] > LONG_COPY
    )


def joined(spans: Iterable[Span], close: float = CLOSE) -> list[Span]:
    """The union of spans; two that are closer than ``close`` become one."""
    made: list[Span] = []
    for begin, end in sorted(spans):
        if made and begin <= made[-1][1] + close:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made


def edges_of(
    on_gpu: Iterable[tuple[str, float, float, int, str]], name: str, steps: int
) -> list[float]:
    """Where ``steps`` steps from the middle begin, and where the last ends.

    Raises ValueError if there are fewer.
    """
    begins: dict[int, float] = {}
    for kind, begin, _, launch, _ in on_gpu:
        if kind == TARGET:
            begins[launch] = min(begin, begins.get(launch, begin))
    edges = sorted(begins.values())
    if len(edges) < steps + 1:
        raise ValueError(f"{name}: expected {steps} whole steps, got {len(edges) - 1}")
    first = (len(edges) - steps) // 2
    return edges[first : first + steps + 1]


def does(name: str) -> str:
    """What a kernel of this name does."""
    return next((what for what, known in DOES.items() if known.search(name)), OTHERS)


def kernels(
    found: Sequence[Mapping[str, Any]], variant: str, batch: int, steps: int
) -> list[dict[str, Any]]:
    """For each kernel of ``steps`` steps from the middle: how often it ran in one, and how long.

    ms: of a step, the mean over the steps.
    """
    on_gpu = list(kinds(found))
    edges = edges_of(on_gpu, f"{variant}-{batch}", steps)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for kind, begin, end, _, name in on_gpu:
        if edges[0] <= begin < edges[-1]:
            of = sums[kind, name]
            of[0] += 1
            of[1] += end - begin
    return [
        {
            "variant": variant, "batch": batch, "on": kind, "does": does(name),
            "count": round(count / steps, 2), "ms": round(us / steps / 1000, 5),
            "kernel": name[:160],
        }
        for (kind, name), (count, us) in sorted(sums.items(), key=lambda of: -of[1][1])
    ]  # fmt: skip


def by_what_they_do(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: the kernels of a step, summed up by what they do."""
    shown = [*DOES, OTHERS]
    lines = [f"| batch | variant | {' | '.join(shown)} |", "|---|---" + "|---" * len(shown) + "|"]
    for batch in sorted({int(r["batch"]) for r in rows}):
        for variant in dict.fromkeys(r["variant"] for r in rows):
            mine = [r for r in rows if (int(r["batch"]), r["variant"]) == (batch, variant)]
            cells = []
            for what in shown:
                of = [r for r in mine if r["does"] == what]
                ms, count = (sum(float(r[name]) for r in of) for name in ("ms", "count"))
                cells.append(f"{ms:.2f} ms in {count:.0f}")
            if mine:
                lines.append(f"| {batch} | {variant} | {' | '.join(cells)} |")
    return lines


def cut(found: Sequence[Mapping[str, Any]], variant: str, batch: int, steps: int) -> list[Piece]:
    """The pieces of ``steps`` steps from the middle. Raises ValueError if there are fewer."""
    on_gpu = list(kinds(found))
    edges = edges_of(on_gpu, f"{variant}-{batch}", steps)
    spans: dict[str, list[Span]] = defaultdict(list)
    for kind, begin, end, _, _ in on_gpu:
        spans[kind].append((begin, end))
    launcher = statistics.mode(e["tid"] for e in found if "GraphLaunch" in e["name"])
    for e in found:
        if e["cat"] in ON_HOST and e["tid"] == launcher:
            kind = WAITS if waits(e) else CALLS
            spans[kind].append((e["ts"], e["ts"] + e["dur"]))
    pieces = []
    for step, (left, right) in enumerate(pairwise(edges)):
        for what, all_of_them in spans.items():
            inside = [(max(b, left), min(e, right)) for b, e in all_of_them]
            for begin, end in joined(s for s in inside if s[0] < s[1]):
                at = (round(begin - edges[0], 1), round(end - edges[0], 1))
                pieces.append(Piece(variant, batch, step, what, *at))
        whole = (round(left - edges[0], 1), round(right - edges[0], 1))
        pieces.append(Piece(variant, batch, step, "step", *whole))
    return pieces


def named(path: Path) -> tuple[str, int]:
    """The variant and the batch that a trace's name says. Raises ValueError if it says none."""
    found = re.fullmatch(r"(.+)-(\d+)\.trace\.json(\.gz)?", path.name)
    if found is None:
        raise ValueError(f"expected <variant>-<batch>.trace.json.gz, got {path.name}")
    return found[1], int(found[2])


def read(path: Path) -> list[Piece]:
    return [
        Piece(
            r["variant"], int(r["batch"]), int(r["step"]), r["what"],
            float(r["begin"]), float(r["end"]),
        )
        for r in results.read(path)[1]
    ]  # fmt: skip


def sums(pieces: Sequence[Piece]) -> dict[str, float]:
    """Medians over the steps, in ms: what each kind took, and how long the GPU did nothing."""
    steps = sorted({p.step for p in pieces})
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        mine = [p for p in pieces if p.step == step]
        for what in ("step", *COLOURS):
            found[what].append(sum(p.end - p.begin for p in mine if p.what == what) / 1000)
        busy = joined(((p.begin, p.end) for p in mine if p.what in ON), 0)
        found["idle"].append(found["step"][-1] - sum(e - b for b, e in busy) / 1000)
    return {what: statistics.median(values) for what, values in found.items()}


def table(pieces: Sequence[Piece]) -> list[str]:
    lines = [
        f"| batch | variant | a step | {TARGET} | {DRAFT} | {OTHER} | the GPU does nothing "
        "| the host waits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch in sorted({p.batch for p in pieces}):
        for variant in dict.fromkeys(p.variant for p in pieces):
            mine = [p for p in pieces if (p.batch, p.variant) == (batch, variant)]
            if mine:
                ms = sums(mine)
                columns = ("step", TARGET, DRAFT, OTHER, "idle", WAITS)
                cells = " | ".join(f"{ms[name]:.2f} ms" for name in columns)
                lines.append(f"| {batch} | {variant} | {cells} |")
    return lines


def draw(pieces: Sequence[Piece], batch: int, title: str) -> str:
    """The SVG of a batch size."""
    mine = [p for p in pieces if p.batch == batch]
    longest = max(p.end for p in mine)
    unit = (WIDTH - LEFT - RIGHT) / longest
    variants: list[dict[str, Any]] = []
    y = TOP
    for variant in dict.fromkeys(p.variant for p in mine):
        shown = [p for p in mine if p.variant == variant]
        lanes = {
            lane: [
                (LEFT + p.begin * unit, max(0.4, (p.end - p.begin) * unit), COLOURS[what])
                for what in names
                for p in shown
                if p.what == what
            ]
            for lane, names in (("GPU", ON), ("host", (WAITS, CALLS)))
        }
        edges = [LEFT + p.end * unit for p in shown if p.what == "step"]
        of = {"name": variant, "y": y, "ms": sums(shown)}
        variants.append({**of, "lanes": lanes, "edges": edges})
        y += 26 + 2 * LANE + 22
    each = next(n for n in (1, 2, 5, 10, 20, 50, 100) if longest / 1000 / n <= 12)
    return drawn(
        "timeline.svg.j2", width=WIDTH, height=y + 18, left=LEFT, right=RIGHT, high=LANE,
        title=title, colours=COLOURS, on=ON, variants=variants, unit=unit,
        marks=range(0, int(longest / 1000) + 1, each),
    )  # fmt: skip


def main() -> int:
    parser = options.parser(__doc__, out="with --cut the CSV, else the picture")
    parser.add_argument("csv", type=Path, nargs="?", metavar="FILE.csv")
    parser.add_argument("--cut", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--kernels", type=Path, metavar="FILE.csv", help="with --cut")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="", help="the GPU's name, for the CSV's first line")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--title", default="Where the time of a decode step goes")
    args = parser.parse_args()
    if args.kernels and not args.cut:
        parser.error("--kernels: expected --cut with it")
    if bool(args.cut) == bool(args.csv):
        parser.error("expected either a CSV or --cut with traces")
    try:
        if args.cut:
            pieces, ran = list[Piece](), list[dict[str, Any]]()
            for trace in args.cut:
                found, of = events(trace), named(trace)
                pieces += cut(found, *of, args.steps)
                ran += kernels(found, *of, args.steps) if args.kernels else []
            results.write("timeline", [vars(p) for p in pieces], args.device or "?", args.out)
            print("\n".join(table(pieces)))
            if ran:
                results.write("kernels", ran, args.device or "?", args.kernels)
                print("\n".join(by_what_they_do(ran)))
            return 0
        pieces = read(args.csv)
    except ValueError as e:
        parser.error(str(e))
    print("\n".join(table(pieces)))
    if args.out:
        args.out.write_text(draw(pieces, args.batch, f"{args.title}, batch {args.batch}"))
        print(f"wrote {args.out.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
