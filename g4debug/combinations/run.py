"""The table of the combinations that were run: armed in real engines, in silence, and with faults.

A combination that is missing here may be judged wrongly, whatever the code looks like. So nothing
is entered that was only read. Add a line, or a release to a line; docs/supported.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from g4debug.combinations.beside import FP8, PIPELINE, TENSOR
from g4debug.combinations.seen import (
    CHUNKS,
    LAYERED,
    LINEAR,
    MHA,
    MLA,
    NO_DRAFT,
    NO_KV,
    NO_WINDOW,
    ONE_PATH,
    ONE_POOL,
    SINKS,
    SWA_POOL,
    TREE,
    Combination,
)
from g4debug.hooking.targets import CPU, H100, H200, ran_on

_SWA, _MHA, _MLA = "SWAKVPool of MHATokenToKVPool", "MHATokenToKVPool", "MLATokenToKVPool"
_LINEAR = "HybridLinearKVPool of MHATokenToKVPool"
_BOTH, _SPLIT = ("trtllm_mha", "triton"), "triton and trtllm_mha"
_PLAIN = (NO_DRAFT,)
_MTP = (NO_DRAFT, "FROZEN_KV_MTP")
_OTHER_DRAFTS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")


@dataclass(frozen=True)
class Run:
    """A class of models, and where it was run on each of these backends with each of these drafts.

    models: those that it was run with, in words. backends: each is what a server has, ``triton and
    trtllm_mha`` for one that prefills on triton. drafts: with one path, or ``NGRAM, a tree``. at:
    SGLang's release -> the places, as in ``targets.RUN``. by: the commands that run it, () if none
    was written down. beside: what else there was, of ``beside.ASKED``. draft_pool: the class of the
    KV pool of those drafts that have one.
    """

    models: str
    attention: str
    window: str
    pool: str
    backends: tuple[str, ...]
    drafts: tuple[str, ...]
    at: Mapping[str, tuple[str, ...]]
    by: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    draft_pool: str = _MHA

    @property
    def with_what(self) -> str:
        """``on trtllm_mha, triton with no draft, FROZEN_KV_MTP``."""
        found = f"on {', '.join(self.backends)} with {', '.join(self.drafts)}"
        return found + "".join(f", with {what}" for what in self.beside)

    def has_class_of(self, it: Combination) -> bool:
        """True if all that is known of the class of a model is as it was here."""
        return (
            self.attention.startswith(it.attention)
            # Before the weights are there, only how the attention begins is known.
            and (not it.pool or it.attention == self.attention)
            and it.window in ("", self.window)
            and it.pool in ("", self.pool)
        )

    def is_of(self, it: Combination) -> bool:
        """True if all that is known of a combination is as it was here."""
        return (
            self.has_class_of(it)
            # Two backends that were run one by one were not run together.
            and (not it.backends or " and ".join(it.backends) in self.backends)
            and self._drafts_as(it)
            and it.beside == self.beside
        )

    def _drafts_as(self, it: Combination) -> bool:
        if it.draft in ("", NO_DRAFT):
            return not it.draft or it.draft in self.drafts
        if it.draft_pool not in ("", NO_KV, self.draft_pool):
            return False
        one, tree = it.draft in self.drafts, f"{it.draft}, {TREE}" in self.drafts
        return {ONE_PATH: one, TREE: tree}.get(it.paths, one or tree)

    def was_at(self, release: str, on_cpu: bool) -> bool:
        """True if it was run with this release on the CPU engine, or else on a GPU."""
        return ran_on(self.at.get(release, ()), on_cpu)


def _soak(*arguments: str) -> tuple[str, ...]:
    """On GPUs: the requests of the soak, beside a run without tracers."""
    return (" ".join(("python repro/soak.py --device cuda", *arguments)),)


_SUITE = dict.fromkeys(("0.5.12.post1", "0.5.15.post1", "0.5.23"), (CPU,))  # on it tests pass
_OLD, _NEW = {"0.5.12.post1": (CPU,)}, {"0.5.23": (CPU,)}
_BEFORE = {"0.5.15.post1": (CPU,)}
_BEFORE_ON_H200 = {"0.5.15.post1": (H200,)}
_NEWER = {**_BEFORE, **_NEW}
_ON_H100, _ON_H200, _ON_BOTH = ({"0.5.23": on} for on in ((H100,), (H200,), (H100, H200)))
_SPLIT_AT = dict.fromkeys(("0.5.12.post1", "0.5.15.post1"), (CPU, H200))
_HEALTHY = ("make healthy",)
_TOYS = ("pytest --long tests/cpu/test_toys_engine.py",)
_DRAFTS = ("pytest --long tests/cpu/test_drafts_engine.py",)
_ONE_POOL = ("pytest tests/tracers/page_table/test_page_table_engine.py",)
_TWO_RANKS = ("pytest tests/cpu/test_tensor_parallel_engine.py",)
_BACKENDS = ("pytest tests/cpu/test_backends_engine.py",)
_SUITES = ("make healthy", "make matrix", "python repro/soak.py")
_RANKS = ("python repro/ranks.py --device cuda", *_soak("--tp 2"))
RUNS: tuple[Run, ...] = (
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("trtllm_mha",), _MTP,
        {**_SUITE, "0.5.13.post1": (CPU,), "0.5.23": (CPU, H200)}, _SUITES),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("triton",), _MTP,
        {**_SUITE, "0.5.12.post1": (CPU, H200), "0.5.23": (CPU, H200)},
        (*_BACKENDS, *_soak("--backend triton"))),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("triton",), ("FROZEN_KV_MTP",),
        {"0.5.15.post1": (H200,)}, _soak("--backend triton")),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, (_SPLIT,), _MTP,
        {**_SPLIT_AT, "0.5.23": (CPU, H100, H200)}, (*_BACKENDS, *_soak())),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("trtllm_mha",), _MTP, _SUITE, _TWO_RANKS, (TENSOR,)),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, (_SPLIT,), _MTP, {"0.5.23": (H100, H200)}, _RANKS,
        (TENSOR,)),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("trtllm_mha",), _PLAIN, _NEW, _HEALTHY, (PIPELINE,)),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("trtllm_mha",), ("FROZEN_KV_MTP",),
        {**_OLD, "0.5.15.post1": (CPU,)}, _HEALTHY, (FP8,)),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("torch_native",), _PLAIN, _OLD, _HEALTHY),
    Run("Gemma-4 without an SWA pool", MHA, ONE_POOL, _MHA, _BOTH, _MTP, _SUITE, _ONE_POOL),
    Run("Gemma-3", MHA, ONE_POOL, _MHA, (*_BOTH, "flashinfer"), _PLAIN, _NEW, _TOYS),
    Run("Llama, Qwen3", MHA, NO_WINDOW, _MHA, (*_BOTH, "fa3", "flashinfer", "torch_native"),
        _PLAIN, _NEW, _TOYS),
    Run("Llama", MHA, NO_WINDOW, _MHA, (*_BOTH, "fa3", "flashinfer", "torch_native"), _PLAIN,
        _BEFORE, _TOYS),
    Run("Qwen3", MHA, NO_WINDOW, _MHA, ("fa3", "flashinfer"), _PLAIN, _BEFORE, _TOYS),
    Run("Llama", MHA, NO_WINDOW, _MHA, _BOTH, _OTHER_DRAFTS, _NEW, _DRAFTS),
    Run("Llama", MHA, NO_WINDOW, _MHA, _BOTH, ("EAGLE", "EAGLE3", "STANDALONE"), _BEFORE, _DRAFTS),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), ("EAGLE",), _NEWER, _DRAFTS),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("triton",), (NO_DRAFT, "EAGLE"),
        {"0.5.12.post1": (H100,)}),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), _PLAIN, _ON_BOTH, _soak("--model llama")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), _PLAIN, _ON_H200,
        _soak("--model llama --tp 2 --requests 600"), (TENSOR,)),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), _PLAIN, _BEFORE_ON_H200,
        _soak("--model llama --requests 1500")),
    Run("Qwen3", MHA, NO_WINDOW, _MHA, ("fa3",), _PLAIN, _ON_BOTH, _soak("--model qwen3")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), ("EAGLE",), _ON_BOTH,
        _soak("--model llama --draft eagle")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), ("EAGLE3",), _ON_H200,
        _soak("--model llama --draft eagle3 --requests 1000")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), (f"NGRAM, {TREE}",), _ON_H200,
        _soak("--model llama --draft ngram --requests 1000")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("triton",), _PLAIN,
        {"0.5.15.post1": (H200,), "0.5.23": (H100,)}, _soak("--model llama --backend triton")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("triton",), ("EAGLE",), _ON_H200,
        _soak("--model llama --draft eagle --backend triton")),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("flashinfer",), _PLAIN, _ON_H100,
        _soak("--model llama --backend flashinfer")),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, (*_BOTH, "fa3"), _PLAIN, _NEWER, _TOYS),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, _BOTH, ("EAGLE3", "NGRAM"), _NEW, _DRAFTS),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, ("fa3",), ("EAGLE3",), _NEWER, _DRAFTS),
    Run("MiMo-V2", SINKS, SWA_POOL, _SWA, ("fa3", "triton"), _PLAIN, _NEW, _TOYS),
    Run("MiMo-V2", SINKS, SWA_POOL, _SWA, ("fa3", "triton"), (LAYERED,), _NEW, _DRAFTS,
        draft_pool=_SWA),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, ("fa3",), _PLAIN, _ON_BOTH, _soak("--model gpt-oss")),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, ("fa3",), _PLAIN, _BEFORE_ON_H200,
        _soak("--model gpt-oss --requests 800")),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, ("triton",), _PLAIN, _ON_H200,
        _soak("--model gpt-oss --backend triton")),
    Run("DeepSeek", MLA, NO_WINDOW, _MLA,
        ("triton", "fa3", "flashinfer_mla", "flashmla", "trtllm_mla"), _PLAIN, _NEW, _TOYS),
    Run("Llama-4", MHA, CHUNKS, _SWA, ("fa3",), _PLAIN, _NEW, _TOYS),
    Run("LFM2, Qwen3-Next", LINEAR, NO_WINDOW, _LINEAR, ("trtllm_mha", "flashinfer"), _PLAIN, _NEW,
        _TOYS),
)  # fmt: skip
# What SGLang 0.5.23 does not have: these backends for models with this attention. Its layers with
# MLA have classes of their own, and those with sinks have not.
NO_BACKEND: dict[str, tuple[str, ...]] = {
    MLA: ("trtllm_mha", "flashinfer"),
    SINKS: ("flashinfer", "flashinfer_mla", "flashmla", "torch_native", "trtllm_mla"),
    **dict.fromkeys((MHA, LINEAR), ("flashinfer_mla", "flashmla", "trtllm_mla")),
}
# These drafts are made for certain models. If they were run with no model of a class, that class
# does not have them.
NO_OTHER_MODEL = ("FROZEN_KV_MTP", LAYERED)


def was_run(it: Combination, release: str, on_cpu: bool) -> bool:
    """True if this combination was run, as far as it is known."""
    return any(run.is_of(it) for run in there(release, on_cpu))


def nearest(it: Combination, release: str, on_cpu: bool) -> str:
    """What was run there, in words: with models of the same class, or else with which models."""
    runs = there(release, on_cpu)
    alike = [run for run in runs if run.has_class_of(it)]
    if alike:
        found: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
        for run in alike:
            for draft in run.drafts:
                found.setdefault((draft, run.beside), {}).update(dict.fromkeys(run.backends))
        told = (
            f"{' with '.join((draft, *beside))} on {', '.join(backends)}"
            for (draft, beside), backends in found.items()
        )
        return f"such a model was run with {'; '.join(told)}"
    models = (f"{run.models} ({run.attention}, {run.window})" for run in runs)
    return f"run were {'; '.join(dict.fromkeys(models)) or 'none'}"


def there(release: str, on_cpu: bool) -> list[Run]:
    """The lines for a release, and for the CPU engine or for GPUs."""
    return [run for run in RUNS if run.was_at(release, on_cpu)]


def backends_of_gemma(release: str) -> set[str]:
    """The attention backends that the CPU engine served Gemma-4 with an SWA pool on."""
    runs = (run for run in there(release, True) if (run.attention, run.window) == (MHA, SWA_POOL))
    return {name for run in runs for names in run.backends for name in names.split(" and ")}
