"""Measures kernels on one GPU, in CUDA graphs and in turns, and the bandwidth of a copy.

A variant is a function of a number i, which selects one of several sets of inputs. Its calls for
all sets are captured in one CUDA graph, and their outputs are kept apart. So a large batch does not
find its inputs in the L2 cache, and a small batch does, as in serving. A round replays the graph of
each variant once, in changing order. A figure is the median over the rounds, and a ratio is the
median of the ratios of the rounds.

The roofline is the time for the bytes that the operation must move, at the bandwidth of a plain
copy of 1 GiB on the same device. Beside it stands the time of a copy of just as many bytes,
measured in the same way (a launch costs 1 to 2 us whatever it does).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from measuring import opponents, options, results

Variant = Callable[[int], Any]
GIB = 1 << 30


@dataclass
class Timed:
    """One variant at one size. us: microseconds for a call in a graph, one number for each round.
    eager_us: the median for a call from Python."""

    us: list[float]
    eager_us: float

    @property
    def median(self) -> float:
        return statistics.median(self.us)


@dataclass(frozen=True)
class Stage:
    """A part of the work, at one size.

    at: its first columns of the CSV. variants: functions of the same arguments, ours among them.
    inputs: the arguments, in several sets. moved: bytes that a call must read and write. right:
    gives the right result; without it, the first variant does. tries: our kernel cut in other ways,
    by the cut; the first is today's.
    """

    at: Mapping[str, Any]
    variants: Mapping[str, Callable[..., Any]]
    inputs: Sequence[Sequence[Any]]
    moved: int
    right: Callable[..., Any] | None = None
    tries: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)

    def calls(self, functions: Mapping[Any, Callable[..., Any]]) -> dict[str, Variant]:
        """Functions of the arguments as functions of a set's number."""
        return {
            str(tuple(n) if isinstance(n, tuple) else n): lambda i, f=f: f(*self.inputs[i])
            for n, f in functions.items()
        }


def same(stages: Sequence[Stage]) -> None:
    """Check that all variants give the same results, within bfloat16's roundings."""
    for stage in stages:

        def found(function: Callable[..., Any], stage: Stage = stage) -> Any:
            # Some of SGLang's kernels work in place.
            return function(*(torch.clone(x) for x in stage.inputs[0]))

        right = found(stage.right or next(iter(stage.variants.values())))
        for function in stage.variants.values():
            torch.testing.assert_close(found(function), right, rtol=0.05, atol=0.1)
    print(f"the same results: {', '.join(stages[0].variants)}")


def compare(
    args: argparse.Namespace,
    stem: str,
    keys: Sequence[str],
    names: Sequence[str],
    rows: Sequence[int],
    tuned_rows: Sequence[int],
    build: Callable[[str, int, str, bool], Sequence[Stage]],
    check: Callable[[Sequence[Stage]], None] = same,
    sglangs: Sequence[str] = ("sglang",),
) -> None:
    """Run a script: check its variants, then measure them at each size, or tune ours.

    keys: the columns that tell the sizes apart. names: of the widths. build: (name, rows, device,
    whether with torch.compile) -> the stages. sglangs: the variants that are SGLang's own, of which
    one must be there on CUDA.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in names:
        stages = build(name, 9, device, False)
        if device == "cuda" and not args.without_sglang:
            for stage in stages:
                opponents.required(stage.variants, sglangs)
        check(stages)
    if args.check:
        return
    if device == "cpu":
        raise SystemExit("this measures kernels and needs a CUDA device; --check runs anywhere")
    sweep = Sweep(args.rounds)
    for name in names:
        for count in sizes(args, rows, tuned_rows):
            torch._dynamo.reset()
            for stage in build(name, count, device, not (args.no_compile or args.tune)):
                if not args.tune:
                    calls = stage.calls(stage.variants)
                    sweep.add(stage.at, calls, stage.moved, len(stage.inputs))
                elif stage.tries:
                    at = " ".join(str(stage.at[k]) for k in keys)
                    tuned(at, stage.calls(stage.tries), len(stage.inputs), args.rounds)
    if not args.tune:
        sweep.write(stem, args.out, keys)


def cuts() -> list[Any]:
    """The ways in which a kernel that takes a ``Cut`` is tried."""
    from g4debug.fixes.paths.kernels._rows import Cut

    found = [Cut(w, pdl=pdl) for w in (1, 2, 4, 8, 16) for pdl in (False, True)]
    loops = [(n, s) for n in (1, 2, 4, 8) for s in (1, 2, 3)]
    return found + [Cut(w, n, s, True) for w in (4, 8, 16) for n, s in loops]


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = options.parser(doc, rounds=15)
    made.add_argument("--rows", help="comma-separated, instead of the benchmark's own")
    made.add_argument("--tune", action="store_true", help="try every cut of our kernel; no CSV")
    made.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    made.add_argument(
        "--without-sglang", action="store_true", help="go on if SGLang's own kernel is missing"
    )
    made.add_argument(
        "--check", action="store_true", help="on any device: compare the variants' results only"
    )
    return made


def sizes(args: argparse.Namespace, rows: Sequence[int], tuned: Sequence[int]) -> Sequence[int]:
    """The numbers of rows: from --rows, or ``tuned`` with --tune, or ``rows``."""
    return [int(r) for r in args.rows.split(",")] if args.rows else tuned if args.tune else rows


def drawing(seed: int, device: str) -> Callable[..., torch.Tensor]:
    """A function of a shape that draws bfloat16 numbers, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).bfloat16()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32, rounded once to the dtype of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def compiled(function: Any) -> Any:
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def sets(bytes_per_call: int, device: str) -> int:
    """How many sets of inputs to use: enough to exceed three L2 caches, but at most 48."""
    if device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(4, min(48, -(-3 * cache // max(1, bytes_per_call))))


def captured(variant: Variant, count: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """A graph of ``count`` calls, and their outputs, which must stay alive."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(count, 3)):
            variant(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [variant(i) for i in range(count)]
    return graph, kept


class Clock:
    """Times calls on the GPU."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in "be")

    def us(self, call: Callable[[], object]) -> float:
        """Microseconds."""
        self._begin.record()
        call()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1000


def measure(variants: Mapping[str, Variant], count: int, rounds: int) -> dict[str, Timed]:
    """Measure the variants in turns. ``count``: how many sets of inputs there are."""
    graphs = {name: captured(v, count) for name, v in variants.items()}
    clock = Clock()
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds + 2):
        for name in names if number % 2 else names[::-1]:
            graph = graphs[name][0]
            graph.replay()  # warms the variant up, and leaves the caches as the variant does
            us = clock.us(graph.replay) / count
            if number >= 2:
                times[name].append(us)
    eager = {name: _eager(v, count, clock) for name, v in variants.items()}
    return {name: Timed(times[name], eager[name]) for name in variants}


def _eager(variant: Variant, count: int, clock: Clock) -> float:
    def calls() -> None:
        for i in range(count):
            variant(i)

    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        found.append(clock.us(calls) / count)
    return statistics.median(found)


def copy_of(moved: int, count: int) -> Variant:
    """A variant that copies. It reads one half of ``moved`` bytes and writes the other half."""
    size = max(16, moved // 2 // 16 * 16)
    sources = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
    targets = [torch.empty_like(s) for s in sources]
    return lambda i: targets[i].copy_(sources[i])


def copy_bandwidth() -> float:
    """Bytes per microsecond that a copy of 1 GiB reads and writes, as the median of 20 copies."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    clock = Clock()
    found = [clock.us(lambda: target.copy_(source)) for _ in range(23)]
    return 2 * GIB / statistics.median(found[3:])


class Sweep:
    """The rows of a CSV, size by size."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.bandwidth = rounds, copy_bandwidth()
        self.rows: list[dict[str, Any]] = []

    def add(
        self, at: Mapping[str, Any], variants: Mapping[str, Variant], moved: int, count: int
    ) -> None:
        """Measure one size. ``moved``: bytes of a call. ``count``: sets of inputs."""
        with_copy = {**variants, "copy": copy_of(moved, count)}
        timed = measure(with_copy, count, self.rounds)
        self.rows += rows_for(at, timed, moved, self.bandwidth)

    def write(self, stem: str, out: Path | None, keys: Sequence[str]) -> None:
        """Write the CSV, and print the table, a line for each size (the values of ``keys``)."""
        copied = round(self.bandwidth / 1000, 1)  # bytes per microsecond
        results.write(stem, self.rows, torch.cuda.get_device_name(), out, copy_GB_per_s=copied)
        table(self.rows, keys)


def rows_for(
    at: Mapping[str, Any], timed: Mapping[str, Timed], moved: int, bandwidth: float
) -> list[dict[str, Any]]:
    """The CSV rows of one size. "copy" is a column; a ratio is "ours" over the other variant."""
    ours = timed["ours"].us
    made = []
    for name, t in timed.items():
        if name == "copy":
            continue
        ratios = [a / b for a, b in zip(t.us, ours, strict=True)]
        made.append(
            {
                **at,
                "variant": name,
                "us": round(t.median, 3),
                "us_min": round(min(t.us), 3),
                "us_max": round(max(t.us), 3),
                "eager_us": round(t.eager_us, 2),
                "ours_is_faster_by": round(statistics.median(ratios), 3),
                "bytes": moved,
                "GB_per_s": round(moved / t.median / 1000, 1),
                "roofline_us": round(moved / bandwidth, 3),
                "of_copy_bandwidth": round(moved / bandwidth / t.median, 3),
                "same_size_copy_us": round(timed["copy"].median, 3),
            }
        )
    return made


def table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Print a line for each size: the us of each variant, and ours beside the best other one."""
    names = list(dict.fromkeys(r["variant"] for r in rows))
    sizes = list(dict.fromkeys(tuple(r[k] for k in keys) for r in rows))
    widths = [max(len(n), 8) for n in names]
    head = "  ".join(f"{k:>14s}" for k in keys)
    print(head, *(f"{n:>{w}s}" for n, w in zip(names, widths, strict=True)),
          "ours/next", "of copy BW", "copy us", sep="  ")  # fmt: skip
    for size in sizes:
        mine = {r["variant"]: r for r in rows if tuple(r[k] for k in keys) == size}
        others = [r["ours_is_faster_by"] for n, r in mine.items() if n != "ours"]
        cells = [
            f"{mine[n]['us']:{w}.2f}" if n in mine else " " * w
            for n, w in zip(names, widths, strict=True)
        ]
        best = f"{min(others):8.2f}x" if others else " " * 9
        print(
            "  ".join(f"{v!s:>14s}" for v in size), *cells, best,
            f"{mine['ours']['of_copy_bandwidth']:10.0%}",
            f"{mine['ours']['same_size_copy_us']:7.2f}", sep="  ",
        )  # fmt: skip


def tuned(
    at: str, candidates: Mapping[str, Variant], count: int, rounds: int, shown: int = 4
) -> None:
    """Print the fastest candidates at one size. The first of them is in use today."""
    timed = measure(candidates, count, rounds)
    first, *_ = candidates
    order = sorted(timed, key=lambda n: timed[n].median)
    best = "   ".join(f"{n} {timed[n].median:.2f}" for n in order[:shown])
    print(f"{at:26s} today {timed[first].median:7.2f}   best: {best}", flush=True)
