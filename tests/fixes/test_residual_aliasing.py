"""residual-aliasing: the hook on modules that write in place, and a real Gemma-4 forward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang_of import sglang_of

from g4debug.fixes import residual_aliasing
from g4debug.fixes.residual_aliasing import after_capture, keep_captured, still_broken
from g4debug.hooking import targets

REPRO = Path(__file__).parents[2] / "repro" / "residual_aliasing.py"


class InPlace(torch.nn.Module):
    """A layer that overwrites its input, as Gemma4DecoderLayer does on CUDA."""

    def forward(self, positions, hidden_states, **kwargs):
        return hidden_states.add_(1) * 2


class Text(torch.nn.Module):
    """The capture loop of Gemma4TextModel."""

    def __init__(self, by_name=True):
        super().__init__()
        self.layers = torch.nn.ModuleList(InPlace() for _ in range(4))
        self.layers_to_capture = []
        self.by_name = by_name

    def forward(self, x):
        captured = []
        for i, layer in enumerate(self.layers):
            if i in self.layers_to_capture:
                captured.append(x)
            x = layer(positions=None, hidden_states=x) if self.by_name else layer(None, x)
        if len(self.layers) in self.layers_to_capture:
            captured.append(x)
        return captured


def values(model):
    return [int(x) for x in model(torch.zeros(1))]


@pytest.mark.parametrize("by_name", [True, False])
def test_captured_states_stay_what_they_were(by_name):
    model = Text(by_name)
    model.layers_to_capture = [0, 2, 4]
    assert values(model) == [1, 7, 30]  # each overwritten, except the last layer's output
    keep_captured(model)
    assert values(model) == [0, 6, 30]


def test_only_captured_layers_pay():
    model = Text()
    model.layers_to_capture = [2, 4]
    keep_captured(model)
    assert [len(layer._forward_pre_hooks) for layer in model.layers] == [0, 0, 1, 0]
    model.layers_to_capture = [1]
    keep_captured(model)
    assert [len(layer._forward_pre_hooks) for layer in model.layers] == [0, 1, 0, 0]
    model.layers_to_capture = []
    keep_captured(model)
    assert not any(layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize("shape", ["causal", "multimodal", "multimodal around causal"])
def test_the_text_model_is_found(shape):
    text = Text()
    text.layers_to_capture = [1]
    model = {
        "causal": SimpleNamespace(model=text),
        "multimodal": SimpleNamespace(language_model=text),
        "multimodal around causal": SimpleNamespace(language_model=SimpleNamespace(model=text)),
    }[shape]
    assert after_capture("result", model, [0]) == "result"
    assert len(text.layers[1]._forward_pre_hooks) == 1


LAYER = """class Gemma4DecoderLayer:
    def forward(self, hidden_states):
        {take}
        {norm}
"""
ALIAS = "residual = hidden_states"
FUSED = "h, residual = self.pre_feedforward_layernorm(\n            h, residual\n        )"


@pytest.mark.parametrize(
    ("take", "norm", "broken"),
    [
        (ALIAS, FUSED, True),
        ("residual = hidden_states.clone()", FUSED, False),
        (ALIAS, "h = self.pre_feedforward_layernorm(h)", False),
        ("x = self.boundary.prepare(hidden_states)", "pass", False),
    ],
)
def test_the_probe(tmp_path, take, norm, broken):
    layer = LAYER.format(take=take, norm=norm)
    with sglang_of(tmp_path, {"sglang/srt/models/gemma4_causal.py": layer}):
        assert still_broken() is broken


def test_it_is_on_by_itself_and_hooks_what_sets_the_capture(arm):
    from sglang.srt.plugins.hook_registry import HookRegistry

    arm()
    hooked = {targets.path(site) for site in residual_aliasing.SITES} - {None}
    assert hooked
    if still_broken():
        assert hooked <= set(HookRegistry._hooks)
    else:
        assert not hooked & set(HookRegistry._hooks)


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the script is run by hand")
@pytest.mark.skipif(targets.sglang_version() is None, reason="needs sglang")
def test_a_real_gemma4_forward():
    """All layers captured: all wrong without, all right with; right without where it is no bug."""
    done = subprocess.run(
        [sys.executable, str(REPRO), "--device", "cpu", "--json"],
        capture_output=True, text=True, timeout=700, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arms = json.loads(done.stdout)["arms"]
    if not targets.matches(residual_aliasing.FIX.needs):
        assert list(arms) == ["clean"]
        assert arms["clean"]["captured"] == list(range(1, 8))
        assert arms["clean"]["wrong"] == []
        return
    assert arms["broken"]["wrong"] == arms["broken"]["captured"]
    assert arms["broken"]["cosine"] < 0.9
    assert arms["fixed"]["wrong"] == []
