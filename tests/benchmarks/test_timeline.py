"""The timeline of decode steps: what it cuts out of a trace, and what it draws."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import timeline
from timeline import DRAFT, OTHER, TARGET, WAITS

pytestmark = pytest.mark.once("the code is ours alone")

STEPS, LENGTH = 5, 1000  # steps of a trace, us of each


def event(cat: str, name: str, ts: float, dur: float, correlation: int, tid: int = 1) -> dict:
    at = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}
    return {**at, "args": {"correlation": correlation}}


def a_trace() -> list[dict]:
    """In each step: 4 kernels of the target (400 us), 1 of the draft (100), 1 of neither (50)."""
    found = []
    for step in range(STEPS):
        at, target, draft = 10_000 + LENGTH * step, 10 * step + 1, 10 * step + 2
        found += [
            event("cuda_runtime", "cudaGraphLaunch", at - 20, 5, target),
            *(event("kernel", "attend_attn", at + 100 * n, 99, target, tid=7) for n in range(4)),
            event("cuda_runtime", "cudaGraphLaunch", at + 10, 5, draft),
            event("kernel", "draft", at + 500, 100, draft, tid=7),
            event("cuda_runtime", "cudaLaunchKernel", at + 20, 2, 10 * step + 3),
            event("kernel", "sample", at + 700, 50, 10 * step + 3, tid=7),
            event("cuda_runtime", "cudaStreamSynchronize", at + 100, 450, 10 * step + 4),
            event("cuda_runtime", "cudaMemcpyAsync", at + 550, 200, 10 * step + 6),
            event("cuda_runtime", "cudaMemcpyAsync", at + 760, 20, 10 * step + 7),
            # Another thread's waiting is not the scheduler's.
            event("cuda_runtime", "cudaStreamSynchronize", at, 900, 10 * step + 5, tid=2),
        ]
    return found


def test_the_steps_of_a_trace():
    pieces = timeline.cut(a_trace(), "v1", 8, 3)
    assert {p.step for p in pieces} == {0, 1, 2}
    ms = timeline.sums(pieces)
    assert ms["step"] == pytest.approx(1.0)
    assert ms[TARGET] == pytest.approx(0.399)
    assert ms[DRAFT] == pytest.approx(0.1)
    assert ms[OTHER] == pytest.approx(0.05)
    assert ms[WAITS] == pytest.approx(0.65)
    # Between the target's kernels there is 1 us each, which is drawn as one, and is not idle.
    assert ms["idle"] == pytest.approx(1 - 0.399 - 0.1 - 0.05)


def test_a_trace_without_graphs_or_with_too_few_steps_is_refused():
    with pytest.raises(ValueError, match="no CUDA graph was replayed"):
        timeline.cut([e for e in a_trace() if "Graph" not in e["name"]], "v1", 8, 3)
    with pytest.raises(ValueError, match="v1-8: expected 9 whole steps, got 4"):
        timeline.cut(a_trace(), "v1", 8, 9)


def test_from_traces_to_a_picture(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "ours-8.trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": a_trace()}).encode()))
    csv, svg = tmp_path / "timeline.csv", tmp_path / "timeline.svg"
    monkeypatch.setattr(
        "sys.argv", ["timeline.py", "--cut", str(trace), "--out", str(csv), "--steps", "2"]
    )
    assert timeline.main() == 0
    assert timeline.read(csv) == timeline.cut(a_trace(), "ours", 8, 2)
    monkeypatch.setattr("sys.argv", ["timeline.py", str(csv), "--batch", "8", "--out", str(svg)])
    assert timeline.main() == 0
    assert "| 8 | ours | 1.00 ms | 0.40 ms | 0.10 ms | 0.05 ms | 0.45 ms | 0.65 ms |" in (
        capsys.readouterr().out
    )
    drawn = svg.read_text()
    assert "a step 1.0 ms, in 0.5 ms of it the GPU" in drawn
    assert drawn.count('class="swa"') == 1 + 2  # the legend, and the draft of two steps


def test_the_kernels_of_a_step_by_what_they_do(tmp_path, monkeypatch, capsys):
    rows = timeline.kernels(a_trace(), "ours", 8, 2)
    told = [(r["on"], r["does"], r["kernel"], r["count"], r["ms"]) for r in rows]
    assert told == [
        (TARGET, "attention", "attend_attn", 4, 0.396),
        (DRAFT, timeline.OTHERS, "draft", 1, 0.1),
        (OTHER, "choosing tokens", "sample", 1, 0.05),
    ]
    trace, csv = tmp_path / "ours-8.trace.json", tmp_path / "kernels.csv"
    trace.write_text(json.dumps({"traceEvents": a_trace()}))
    command = ["timeline.py", "--cut", str(trace), "--out", str(tmp_path / "t.csv"), "--steps", "2"]
    monkeypatch.setattr("sys.argv", [*command, "--kernels", str(csv)])
    assert timeline.main() == 0
    assert "| 8 | ours | 0.40 ms in 4 | 0.00 ms in 0 |" in capsys.readouterr().out
    assert len(csv.read_text().splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("_verify_part_kernel", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("kernel_mha", "attention"),
        ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "matrix products"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl", "elementwise"),
        ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>", "norms"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_what_a_kernel_does_is_known_by_its_name(name, does):
    assert timeline.does(name) == does


def test_a_trace_whose_name_says_nothing_is_refused():
    with pytest.raises(ValueError, match="expected <variant>-<batch>"):
        timeline.named(Path("trace.json"))


def test_pieces_close_to_each_other_are_one():
    assert timeline.joined([(0, 10), (12, 20), (30, 40)]) == [(0, 20), (30, 40)]
