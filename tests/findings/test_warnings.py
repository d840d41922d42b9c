"""What ``g4debug doctor --pid`` warns of: a server that attends causally to images."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from g4debug.findings import warnings
from g4debug.hooking import targets
from g4debug.reporters import running


class TritonAttnBackend:
    """Stands for SGLang's."""


class Other:
    """A backend that attends causally. parts: its attributes."""

    def __init__(self, **parts: object) -> None:
        self.__dict__.update(parts)


class Model:
    """A multimodal Gemma-4 of before 0.5.23. wants: what its config says of images."""

    def __init__(self, wants: str | None = "vision") -> None:
        text = SimpleNamespace(use_bidirectional_attention=wants)
        self.config = SimpleNamespace(text_config=text)

    def prepare_attn_masks(self, backend):
        return isinstance(backend, TritonAttnBackend)


class NewModel(Model):
    """One of 0.5.23."""

    def prepare_attn_masks(self, backend):
        prefill_backend = getattr(backend, "prefill_backend", backend)
        if getattr(prefill_backend, "fa_impl_ver", None) == 4:
            return True
        return isinstance(prefill_backend, TritonAttnBackend)


BOTH = pytest.mark.parametrize("model", [Model, NewModel])


def said(model: object, backend: object) -> list[str]:
    runner = SimpleNamespace(model=model, attn_backend=backend)
    return list(warnings.of(SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))))


@BOTH
def test_a_backend_that_attends_causally_to_images_is_told(model):
    (text,) = said(model(), Other())
    assert text.startswith("Other attends causally to the tokens of an image")
    assert text.endswith("TritonAttnBackend has it")


@BOTH
@pytest.mark.parametrize(
    "backend", [Other(prefill_backend=TritonAttnBackend()), Other(fa_impl_ver=4)]
)
def test_what_counts_is_what_this_release_asks_for(model, backend):
    assert bool(said(model(), backend)) == (not model().prepare_attn_masks(backend))


@BOTH
def test_nothing_is_said_of_others(model):
    assert said(model(), TritonAttnBackend()) == []
    assert said(model(wants=None), Other()) == []  # as E2B and E4B
    assert said(SimpleNamespace(), Other()) == []
    assert list(warnings.of(SimpleNamespace())) == []


def test_sglangs_own_model_is_understood(sglang):
    from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration as Real

    model = Real.__new__(Real)
    model.__dict__["config"] = Model().config
    (text,) = said(model, Other())
    assert text.endswith("TritonAttnBackend has it")
    assert bool(said(model, Other(fa_impl_ver=4))) == targets.matches("<0.5.23")


def test_doctor_shows_it_and_calls_no_tracer_limited():
    shown = running.Process(7, has_status=True, role="scheduler", warnings=("images are …",))
    server, stream = running.Server(7, [shown]), io.StringIO()
    running.render(server, Console(file=stream, width=80))
    assert "warning: images are …" in stream.getvalue()
    assert server.sound
