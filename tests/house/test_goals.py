"""Whether a performance path met its goal: benchmarks/README.md says what the files say.

The last column of its path table has goals, as ``goal: verdict (remark); goal: verdict``. Each goal
has a function below that finds its verdict again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
from packaging.version import Version

from g4debug import discovery
from g4debug.hooking import targets

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measuring import results

pytestmark = pytest.mark.once("the pages are the same on every release")
PAGE = (results.FOLDER.parent / "README.md").read_text()
VERDICTS = ("met", "not met", "not measured")
MODELS = ("E2B", "26B-A4B")


def ratios(file: str, key: str, figure: str, over: str, under: str, **where: str) -> list[float]:
    """over / under, round by round; empty if there is no such file, variant or figure."""
    rows = results.read(results.FOLDER / file)[1]
    mine = [r for r in rows if all(r[n] == v for n, v in where.items()) and r[figure]]
    rounds = results.by_round(mine, key, figure)
    return [r[over] / r[under] for r in rounds if over in r and under in r]


def at_least(goal: float, *measured: list[float]) -> str:
    """The verdict on ratios of which each median must reach the goal."""
    if not all(measured):
        return "not measured"
    return "met" if all(median(found) >= goal for found in measured) else "not met"


def at_most(goal: float, *measured: list[float], every: bool = False) -> str:
    """The verdict on ratios whose median, or each one, must not be above the goal."""
    if not all(measured):
        return "not measured"
    worst = max if every else median
    return "met" if all(worst(found) <= goal for found in measured) else "not met"


def yoco(file: str, over: str, under: str) -> list[float]:
    return ratios(file, "variant", "seconds", over, under)


def encoder(file: str, way: str) -> list[float]:
    return ratios(file, "way", "end_to_end_s", "alone", way)


def decode(file: str, key: str = "paths", on: str = "on") -> list[list[float]]:
    batches = ("1", "8", "64")
    return [ratios(file, key, "ms_per_token", on, "off", batch=b) for b in batches]


def console(pattern: str) -> list[float]:
    """A number that a run printed whose CSV was lost."""
    text = (results.FOLDER / "console_h200.txt").read_text()
    return [float(x) for x in re.findall(pattern, text)]


def kernels(file: str, *keys: str) -> Iterator[dict[str, dict[str, str]]]:
    """variant -> row, for each size."""
    sizes: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in results.read(results.FOLDER / file)[1]:
        sizes.setdefault(tuple(row[k] for k in keys), {})[row["variant"]] = row
    yield from sizes.values()


def fastest(file: str, *keys: str) -> str:
    lost = [
        size
        for size in kernels(file, *keys)
        if any(float(row["us"]) < float(size["ours"]["us"]) for row in size.values())
    ]
    return "not met" if lost else "met"


def bandwidth(file: str, *keys: str) -> str:
    large = (s["ours"] for s in kernels(file, *keys) if int(s["ours"]["rows"]) >= 4096)
    return at_least(0.85, *([float(row["of_copy_bandwidth"])] for row in large))


def router() -> str:
    few = (s for s in kernels("fused_router_h200.csv", "rows") if int(s["ours"]["rows"]) <= 64)
    return at_least(4, *([float(s["torch"]["ours_is_faster_by"])] for s in few))


def decode_of_experts() -> str:
    """No path for this decode is in force on 0.5.23, and nothing was measured."""
    assert not list(results.FOLDER.glob("decode_paths_26B-A4B_0.5.23_*"))
    here = Version("0.5.23")
    paths = ("fused-router", "triple-rmsnorm")
    assert not any(targets.matches(discovery.load("fix", p).needs, here) for p in paths)
    return "not met"


def mtp(variant: str) -> list[list[float]]:
    """Of a token with FROZEN_KV_MTP on 0.5.23: with some paths over without, for each batch."""
    return decode(VERIFY, "variant", variant)


def faster_router() -> str:
    """Ours is the faster one beside 0.5.23's, where it is not put in force."""
    assert fastest("fused_router_0.5.23_h200.csv", "rows") == "met"
    used = targets.matches(discovery.load("fix", "fused-router").needs, Version("0.5.23"))
    return "met" if used else "not met"


E2B, E4B = "yoco_E2B_h200.csv", "yoco_E4B_0.5.23_h100.csv"
E2B_TODAY, E2B_LATER = "yoco_E2B_0.5.23_h100.csv", "yoco_E2B_0.5.23_h200.csv"
PLE = ("ple_tail_h200.csv", "width", "rows", "stage")
TRIPLE = ("triple_rmsnorm_h200.csv", "width", "rows")
DECODE, DECODE_TODAY = "decode_paths_E4B_h200.csv", "decode_paths_E4B_0.5.23_h100.csv"
EXPERTS = "decode_paths_26B-A4B_h200.csv"
MM, MM_TODAY = "mm_encoder_{}_h200.csv", "mm_encoder_{}_0.5.23_h200.csv"
VERIFY = "frozen_kv_mtp_v2_verify_0.5.23_h200.csv"
FAST = "85 % of the copy bandwidth at M ≥ 4,096"


def both(file: str, way: str, *goals: float) -> str:
    """The verdict on both models, end to end."""
    measured = {g: encoder(file.format(m), way) for g, m in zip(goals, MODELS, strict=True)}
    found = {at_least(goal, mine) for goal, mine in measured.items()}
    return max(found, key=VERDICTS.index)


# The start of a row, and the goal -> the verdict.
GOALS: dict[tuple[str, str], Callable[[], str]] = {
    ("fused-router, E=128", "4 times the torch path at M ≤ 64"): router,
    ("fused-router, E=128", "fastest at every M"): lambda: fastest("fused_router_h200.csv", "rows"),
    ("ple-tail", "fastest at every M and stage"): lambda: fastest(*PLE),
    ("ple-tail", f"{FAST}, at every width and stage"): lambda: bandwidth(*PLE),
    ("triple-rmsnorm", "fastest at every M"): lambda: fastest(*TRIPLE),
    ("triple-rmsnorm", FAST): lambda: bandwidth(*TRIPLE),
    ("yoco-fast-prefill, 30 x", "E2B 1.6 times"): lambda: at_least(1.6, yoco(E2B, "off", "on")),
    ("yoco-fast-prefill, 30 x", "E4B 1.35 times"): lambda: at_least(
        1.35, console(r"\nE4B +7000  on +[\d.]+ +([\d.]+)")
    ),
    ("yoco-fast-prefill, 30 x", "90 % of the limit"): lambda: at_least(
        0.9, yoco(E2B, "limit", "on"), [x / 100 for x in console(r"on is at ([\d.]+)%")]
    ),
    ("mm-batched-encoder, 6 images", "E2B 1.5 times end to end"): lambda: at_least(
        1.5, encoder(MM.format("E2B"), "together")
    ),
    ("mm-batched-encoder, 6 images", "26B-A4B 1.15 times end to end"): lambda: at_least(
        1.15, encoder(MM.format("26B-A4B"), "together")
    ),
    ("yoco-fast-prefill on 0.5.23, H100 ([E4B]", "1.6 times"): lambda: at_least(
        1.6, yoco(E4B, "off", "on")
    ),
    ("yoco-fast-prefill on 0.5.23, H100 ([E4B]", "95 % of the limit"): lambda: at_least(
        0.95, yoco(E4B, "limit", "on")
    ),
    ("yoco-fast-prefill on 0.5.23, H200 ([E2B]", "2.2 times"): lambda: at_least(
        2.2, yoco(E2B_LATER, "off", "on")
    ),
    ("yoco-fast-prefill on 0.5.23, H200 ([E2B]", "95 % of the limit"): lambda: at_least(
        0.95, yoco(E2B_LATER, "limit", "on")
    ),
    ("yoco-fast-prefill on 0.5.23, H100 ([E2B]", "2.2 times"): lambda: at_least(
        2.2, yoco(E2B_TODAY, "off", "on")
    ),
    ("yoco-fast-prefill on 0.5.23, H100 ([E2B]", "95 % of the limit"): lambda: at_least(
        0.95, yoco(E2B_TODAY, "limit", "on")
    ),
    ("mm-batched-encoder and vision-layer on 0.5.23", "1.5 and 1.2 times end to end"): lambda: both(
        MM_TODAY, "together", 1.5, 1.2
    ),
    (
        "mm-batched-encoder and vision-layer on 0.5.23",
        "with vision-layer 2.5 and 1.8 times end to end",
    ): lambda: both(MM_TODAY, "fused", 2.5, 1.8),
    ("decode, E4B, all paths on", "lower at every batch"): lambda: at_most(1, *decode(DECODE)),
    ("decode, E4B, all paths on", "no round above 1"): lambda: at_most(
        1, *decode(DECODE), every=True
    ),
    ("decode, E4B, all paths that", "0.92 at every batch"): lambda: at_most(
        0.92, *decode(DECODE_TODAY)
    ),
    ("decode, E4B, all paths that", "no round above 1"): lambda: at_most(
        1, *decode(DECODE_TODAY), every=True
    ),
    ("decode, 26B-A4B on 0.5.23", "0.92 at every batch"): decode_of_experts,
    ("decode with FROZEN_KV_MTP", "0.8 at every batch"): lambda: at_most(0.8, *mtp("on")),
    ("fused-router beside", "the faster one is used"): faster_router,
    ("decode, 26B-A4B ([CSV]", "lower at every batch"): lambda: at_most(1, *decode(EXPERTS)),
    ("decode, 26B-A4B ([CSV]", "no round above 1"): lambda: at_most(
        1, *decode(EXPERTS), every=True
    ),
}


def table() -> list[tuple[str, str]]:
    """The first and the last cell of each row of the path table."""
    part = PAGE.partition("\n## The performance paths\n")[2].partition("\nNotes:")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert rows[0][0] == "path"
    return [(row[0], row[2].strip("| ") if len(row) > 2 else "") for row in rows[1:]]


def said() -> dict[tuple[str, str], str]:
    """The start of a row, and the goal -> the verdict on the page."""
    found = {}
    for first, last in table():
        for part in re.sub(r" ?\([^()]*\)", "", last).split(";") if last else []:
            goal, _, verdict = part.strip().rpartition(": ")
            assert verdict in VERDICTS, f"{first}: {part!r} ends with none of {VERDICTS}"
            starts = {start for start, _ in GOALS if first.startswith(start)}
            assert len(starts) == 1, f"{first}: no goal of this row is known here"
            found[starts.pop(), goal] = verdict
    return found


def test_every_goal_of_the_page_is_known_here() -> None:
    assert set(said()) == set(GOALS)


@pytest.mark.parametrize("at", GOALS, ids=" - ".join)
def test_each_verdict_is_the_files(at: tuple[str, str]) -> None:
    assert said()[at] == GOALS[at]()
