"""yoco-fast-prefill on a real engine: on with every tracer armed, and off. The same answers."""

from __future__ import annotations

from pathlib import Path

import draft_seeds
import pytest
import releases
import told_status
import torch
from real_engine import ENGINE, drive, side_by_side

from g4debug import discovery

DRIVER = Path(__file__).with_name("drive_yoco.py")
OFF, ON = {"SGLANG_GEMMA4_YOCO": "0"}, {"SGLANG_GEMMA4_YOCO": "1"}
TRACERS = discovery.names("tracer")
ARMED = {
    "G4DEBUG_TRACE": ",".join(TRACERS),
    "G4DEBUG_MODE": "raise",
    "G4DEBUG_LEAK_STEPS": "1",
}
pytestmark = [
    *ENGINE,
    pytest.mark.written_for("yoco-fast-prefill"),
]


# On speculative decoding v2, FROZEN_KV_MTP runs with overlap scheduling only.
MTP = ["mtp"] if releases.has_v1_worker() else ["mtp", "overlap"]
PROMPTS = 11  # of drive_yoco.py
MORE = pytest.mark.long("two engines each; with a draft most of it is covered")


def same_answers(on, off):
    """Fails if the results of two engines are not the same, and in as many verifies."""
    assert len(on) == len(off) == 4
    for a, b in zip(on, off, strict=True):
        for what in ("tokens", "cached", "verifies"):
            assert a[what] == b[what], (a["round"], what)
        for mine, theirs in zip(a["logprobs"], b["logprobs"], strict=True):
            assert mine[1:] == pytest.approx(theirs[1:], abs=1e-4)


def same_seeds(on, off):
    """Fails if the draft of an engine did not get, of each prompt, what the other's got.

    on, off: the engines' folders. Of a chunk that goes on the path hands over nothing.
    """
    got, wanted = (torch.tensor(draft_seeds.read(folder)) for folder in (on, off))
    assert len(got) == PROMPTS
    nearest = torch.cdist(got, wanted).argmin(1)
    assert len(set(nearest.tolist())) == PROMPTS
    torch.testing.assert_close(got, wanted[nearest], rtol=0, atol=2e-2)  # they are up to 3


def unjudged(arguments):
    """The tracers that judge nothing on such a server, path or not, and the limits of others."""
    blind, limits = {"flight-recorder"}, {}  # it counts nothing: it waits for a stand-still
    if "mixed" in arguments:
        blind |= {"spec-lifecycle"}
        limits["spec-lifecycle"] = {
            "sampled tokens are not followed to the output",
            "the rows, lengths and positions that a forward is given are not checked",
        }
    if releases.has_v1_worker() and "mtp" in arguments:
        limits["spec-lifecycle"] = {
            "what a step hands on is checked by shapes, counts and lengths, not by its values"
        }
    if releases.has_v1_worker() and "overlap" in arguments:  # pages change hands in a forward
        blind |= {"kv-integrity"}
        limits["page-table"] = {"ranges only"}
        limits["kv-writes"] = {"ranges, and tokens that are written to one place"}
    return blind, limits


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(MTP, id="mtp"),
        pytest.param([*MTP, "split"], id="mtp, prefill on triton", marks=MORE),
        pytest.param(["overlap"], id="overlap, no MTP", marks=MORE),
        pytest.param(["overlap", "mixed"], id="mixed chunks", marks=MORE),
        pytest.param(["triton"], id="triton alone, no overlap, no MTP", marks=MORE),
        pytest.param([*MTP, "tp"], id="mtp on two ranks", marks=MORE),
    ],
)
def test_the_same_answers_and_no_tracer_fires(tmp_path, arguments):
    def run(name, **environ):
        environ |= draft_seeds.installed(tmp_path / name)
        return drive(tmp_path / name, str(DRIVER), *arguments, **environ)

    runs = side_by_side(off=lambda: run("off", **OFF), on=lambda: run("on", **ON, **ARMED))
    on, off = runs["on"], runs["off"]
    assert (on.status, off.status) == (0, 0), on.log[-3000:] + off.log[-3000:]
    assert "yoco-fast-prefill: on: layers 6 to 7 of 8" in on.log
    assert "yoco-fast-prefill: on" not in off.log
    assert not on.dumps
    same_answers(on.results, off.results)
    assert max(on.results[2]["cached"]) == 192
    assert [len(x) for x in on.results[3]["logprobs"]] == [50, 0, 64]
    speculating = "mtp" in arguments
    assert all((v is not None) == speculating for r in on.results for v in r["verifies"])
    if speculating:
        same_seeds(tmp_path / "on", tmp_path / "off")
    ranks = told_status.of_each(on.log)
    assert len(ranks) == (2 if "tp" in arguments else 1)
    for told in ranks:
        assert set(told) == set(TRACERS)
        blind, limits = unjudged(arguments)
        assert {name for name, t in told.items() if told_status.blind(t)} == blind, told
        assert told_status.limits(told) == limits


def test_a_draft_that_gets_zeros_is_told(tmp_path):
    """The target verifies what the draft proposes, so the tokens stay as they are."""

    def run(name, **environ):
        environ |= draft_seeds.installed(tmp_path / name)
        return drive(tmp_path / name, str(DRIVER), *MTP, **environ)

    runs = side_by_side(
        off=lambda: run("off", **OFF), on=lambda: run("on", **ON, DRAFT_GETS="zeros")
    )
    on, off = runs["on"], runs["off"]
    assert (on.status, off.status) == (0, 0), on.log[-3000:] + off.log[-3000:]
    assert [r["tokens"] for r in on.results] == [r["tokens"] for r in off.results]
    with pytest.raises(AssertionError):
        same_seeds(tmp_path / "on", tmp_path / "off")
