"""Engines on the CPU with SGLang's Triton attention backend, alone and beside trtllm_mha."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive

from g4debug.hooking import targets

pytestmark = ENGINE
DRIVER = Path(__file__).with_name("drive_backends.py")
TRITON = {"attention_backend": "triton", "log_level": "info"}
SPLIT = {
    "attention_backend": None,
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "trtllm_mha",
    "log_level": "info",
}
# On 0.5.12.post1 a sliding layer of Gemma-4 has a window of one token more than its model runner,
# so trtllm_mha, which asks the layer, reads one key more than the lists of triton have. With 30
# tokens in the prompt and 32 in the answer, a request stays within either window (128, 127).
SAME_WINDOW = targets.matches(">=0.5.13")
SHORT = 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")

    def run(name, mode, arguments):
        return lambda: drive(folder / name, str(DRIVER), mode, json.dumps(arguments))

    return WhenAsked(
        trtllm=run("trtllm", "plain", {}),
        split=run("split", "plain", SPLIT),
        split_mtp=run("split_mtp", "mtp", SPLIT),
        triton_mtp=run("triton_mtp", "mtp", TRITON),
    )


def answers(run):
    assert run.status == 0, run.log[-3000:]
    return [found["tokens"] for found in run.results]


@pytest.mark.long("four engines")
@pytest.mark.parametrize("name", ["split", "split_mtp", "triton_mtp"])
def test_the_same_tokens_whichever_backend(runs, name):
    """With FROZEN_KV_MTP on triton, every token comes from a verify, which is an extend there."""
    found, right = answers(runs[name]), answers(runs["trtllm"])
    assert [wave[SHORT] for wave in found] == [wave[SHORT] for wave in right]
    if SAME_WINDOW:
        assert found == right


@pytest.mark.long("four engines")
def test_drafts_are_accepted(runs):
    for name in ("split_mtp", "triton_mtp"):
        for found in runs[name].results:
            assert min(found["accepted"]) > 1.5


@pytest.mark.long("four engines")
def test_the_backends_are_those_that_were_asked_for(runs):
    hybrid = "decode_backend=trtllm_mha, prefill_backend=triton"
    for name, run in runs.items():
        assert (hybrid in run.log) == name.startswith("split")
