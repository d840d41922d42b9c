"""What ``g4debug doctor --pid`` warns of: a server that attends causally to images."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from packaging.version import Version
from rich.console import Console

from g4debug.findings import warnings
from g4debug.hooking import targets
from g4debug.reporters import running


def scheduler(
    backend: str,
    wants: str | None = "vision",
    model: str = "Gemma4ForConditionalGeneration",
    **parts: object,
) -> SimpleNamespace:
    text = SimpleNamespace(use_bidirectional_attention=wants)
    model = type(model, (), {"config": SimpleNamespace(text_config=text)})()
    runner = SimpleNamespace(model=model, attn_backend=type(backend, (), parts)())
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


@pytest.fixture(params=["0.5.12.post1", "0.5.15.post1", "0.5.23"])
def release(request, monkeypatch):
    monkeypatch.setattr(targets, "sglang_version", lambda: Version(request.param))
    return request.param


def test_a_backend_that_attends_causally_to_images_is_told(release):
    (said,) = warnings.of(scheduler("TRTLLMHAAttnBackend"))
    assert said.startswith("TRTLLMHAAttnBackend attends causally to the tokens of an image")


def test_split_backends_count_by_their_prefill_only_where_sglang_looks_there(release):
    triton = type("TritonAttnBackend", (), {})()
    split = list(warnings.of(scheduler("HybridAttnBackend", prefill_backend=triton)))
    assert len(split) == (release != "0.5.23")


def test_fa4_sees_images_from_0_5_23_on(release):
    said = list(warnings.of(scheduler("FlashAttentionBackend", fa_impl_ver=4)))
    assert len(said) == (release != "0.5.23")


@pytest.mark.parametrize(
    "right",
    [
        scheduler("TritonAttnBackend"),
        scheduler("TRTLLMHAAttnBackend", wants=None),  # as E2B and E4B
        scheduler("TRTLLMHAAttnBackend", model="Gemma4ForCausalLM"),
        SimpleNamespace(),
    ],
)
def test_nothing_is_said_of_others(release, right):
    assert list(warnings.of(right)) == []


def test_doctor_shows_it_and_calls_no_tracer_limited():
    shown = running.Process(7, has_status=True, role="scheduler", warnings=("images are …",))
    server, stream = running.Server(7, [shown]), io.StringIO()
    running.render(server, Console(file=stream, width=80))
    assert "warning: images are …" in stream.getvalue()
    assert server.sound
