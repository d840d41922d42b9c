"""mm-piecewise-graph on SGLang's real ServerArgs and ModelConfig, in a process with no GPU.

On a CPU SGLang has one more reason to switch piecewise graphs off (``is_cpu()``); that one
answer is replaced, so that the others decide.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from published import A4B_26B, folder

from g4debug.cpu.geometry import TINY
from g4debug.cpu.server import server_arguments
from g4debug.fixes.before_0_5_14.mm_piecewise_graph import FIX, SWITCH, limits, still_broken
from g4debug.hooking import targets

pytestmark = pytest.mark.written_for("mm-piecewise-graph")

ON = {SWITCH: "1"}
KV_OFF = {"G4DEBUG_FIX_OPTIONAL_KV": "0"}
PLE = {"hidden_size_per_layer_input": 256}
SHARED = {"num_kv_shared_layers": 4}
ONLY_12 = pytest.mark.skipif(
    targets.sglang_version() is not None and not targets.matches("<0.5.13"),
    reason="SGLang runs KV-shared layers itself from 0.5.13 on",
)


@pytest.fixture
def server_args(sglang, tmp_path, monkeypatch):
    monkeypatch.setattr("sglang.srt.server_args.is_cpu", lambda: False)

    def make(text=None, architecture=None, **given):
        from sglang.srt.server_args import ServerArgs

        config = {**A4B_26B, "vision_config": {"model_type": "gemma4_vision"}}
        config["text_config"] = {**A4B_26B["text_config"], **(text or {})}
        if architecture:
            config["architectures"] = [architecture]
        model = folder(tmp_path / "model", config)
        given = {"disable_piecewise_cuda_graph": None, **given}
        return ServerArgs(**server_arguments((model, model), mtp=False, **given))

    return make


@pytest.mark.parametrize(("environ", "off"), [({}, True), ({SWITCH: "0"}, True), (ON, False)])
def test_only_the_switch_lifts_it(arm, server_args, environ, off):
    arm(**environ)
    made = server_args()
    assert made.disable_piecewise_cuda_graph is off
    assert made.get_model_config().is_multimodal is True


def test_other_reasons_still_count(arm, server_args, caplog):
    arm(**ON)
    with caplog.at_level(logging.WARNING, "g4debug"):
        made = server_args(enable_lora=True)
    assert made.disable_piecewise_cuda_graph is True
    assert "has no effect: SGLang has another reason" in caplog.text


def test_the_users_own_flag_wins(arm, server_args, caplog):
    arm(**ON)
    with caplog.at_level(logging.WARNING, "g4debug"):
        made = server_args(PLE, disable_piecewise_cuda_graph=True)
    assert made.disable_piecewise_cuda_graph is True
    assert "has no effect: --disable-piecewise-cuda-graph is given" in caplog.text


@ONLY_12
def test_kv_shared_layers_need_optional_kv(arm, server_args):
    arm(**ON, **KV_OFF)
    with pytest.raises(SystemExit) as stopped:
        server_args(SHARED)
    assert str(stopped.value).startswith(f"g4debug: {SWITCH}=1 is refused for this model: 4 of ")
    assert "unset G4DEBUG_FIX_OPTIONAL_KV" in str(stopped.value)


def test_kv_shared_layers_with_it(arm, server_args):
    arm(**ON)
    assert server_args(SHARED).disable_piecewise_cuda_graph is False


def test_per_layer_inputs_are_refused(arm, server_args):
    arm(**ON)
    with pytest.raises(SystemExit, match="per-layer inputs of size 256"):
        server_args(PLE)


def test_without_the_switch_nothing_is_refused(arm, server_args):
    arm(**KV_OFF)
    assert server_args({**SHARED, **PLE}).disable_piecewise_cuda_graph is True


def test_another_multimodal_model_stays_as_it_is(arm, server_args, caplog, monkeypatch):
    arm(**ON)
    with caplog.at_level(logging.WARNING, "g4debug"):
        made = server_args()
        made.get_model_config().hf_config.architectures = ["Gemma3ForConditionalGeneration"]
        made._handle_piecewise_cuda_graph()
    assert made.disable_piecewise_cuda_graph is True
    assert "is for Gemma4ForConditionalGeneration only" in caplog.text


def test_text_only_models_are_not_touched(arm, server_args):
    arm(**ON, **KV_OFF)
    made = server_args({**SHARED, **PLE}, enable_multimodal=False)
    assert made.get_model_config().is_multimodal is False
    assert made.disable_piecewise_cuda_graph is False


def test_all_reasons_are_named():
    config = SimpleNamespace(num_hidden_layers=35, num_kv_shared_layers=20, **PLE)
    assert len(limits(config, kv_shared_runs=False)) == 2
    assert len(limits(config, kv_shared_runs=True)) == 1
    assert limits(SimpleNamespace(num_hidden_layers=30), kv_shared_runs=False) == []


def test_shipped_off(sglang):
    assert FIX.purpose == "experiment"
    assert still_broken() is True


@pytest.mark.parametrize(
    ("ple", "shared", "refused"), [(0, False, False), (0, True, False), (16, True, True)]
)
def test_the_models_of_the_parity_script(arm, tmp_path, monkeypatch, ple, shared, refused):
    """SGLang reads them as multimodal Gemma-4s, and they are allowed or refused as it expects."""
    from sglang.srt.server_args import ServerArgs

    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "repro"))
    monkeypatch.setattr("sglang.srt.server_args.is_cpu", lambda: False)
    from workloads import multimodal

    model = multimodal.write(replace(TINY, ple=ple), shared, tmp_path / "made", "cpu")
    arm(**ON)
    given = server_arguments((model, model), mtp=False, disable_piecewise_cuda_graph=None)
    if refused:
        with pytest.raises(SystemExit, match="per-layer inputs of size 16"):
            ServerArgs(**given)
        return
    made = ServerArgs(**given)
    assert made.disable_piecewise_cuda_graph is False
    text = made.get_model_config().hf_text_config
    assert text.num_kv_shared_layers == (TINY.kv_shared if shared else 0)
    assert (text.head_dim, text.swa_head_dim) == (TINY.head_dim, TINY.swa_head_dim)
