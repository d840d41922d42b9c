"""The table of the combinations that were run: armed in real engines, in silence, and with faults.

A combination that is missing here may be judged wrongly, whatever the code looks like. So nothing
is entered that was only read. Add a line, or a release to a line; docs/supported.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from g4debug.combinations.seen import (
    LINEAR,
    MHA,
    MLA,
    NO_DRAFT,
    NO_WINDOW,
    ONE_POOL,
    SINKS,
    SWA_POOL,
    Combination,
)
from g4debug.hooking.targets import CPU, H100, H200, ran_on

_SWA, _MHA, _MLA = "SWAKVPool of MHATokenToKVPool", "MHATokenToKVPool", "MLATokenToKVPool"
_LINEAR = "HybridLinearKVPool of MHATokenToKVPool"
_BOTH = ("trtllm_mha", "triton")
_PLAIN = (NO_DRAFT,)
_MTP = (NO_DRAFT, "FROZEN_KV_MTP")
_OTHER_DRAFTS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")


@dataclass(frozen=True)
class Run:
    """A class of models, and where it was run on each of these backends with each of these drafts.

    models: those that it was run with, in words. at: SGLang's release -> the places, as in
    ``targets.RUN``.
    """

    models: str
    attention: str
    window: str
    pool: str
    backends: tuple[str, ...]
    drafts: tuple[str, ...]
    at: Mapping[str, tuple[str, ...]]

    @property
    def with_what(self) -> str:
        """``on trtllm_mha, triton with no draft, FROZEN_KV_MTP``."""
        return f"on {', '.join(self.backends)} with {', '.join(self.drafts)}"

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
            and set(it.backends) <= {*self.backends}
            and it.draft in ("", *self.drafts)
        )

    def was_at(self, release: str, on_cpu: bool) -> bool:
        """True if it was run with this release on the CPU engine, or else on a GPU."""
        return ran_on(self.at.get(release, ()), on_cpu)


_EVERYWHERE = {
    "0.5.12.post1": (CPU, H200),
    "0.5.13.post1": (CPU,),
    "0.5.15.post1": (CPU, H200),
    "0.5.23": (CPU, H200),
}
_SUITE = dict.fromkeys(("0.5.12.post1", "0.5.15.post1", "0.5.23"), (CPU,))  # on it tests pass
_OLD, _NEW = {"0.5.12.post1": (CPU,)}, {"0.5.23": (CPU,)}
RUNS: tuple[Run, ...] = (
    Run("Gemma-4", MHA, SWA_POOL, _SWA, _BOTH, _MTP, _EVERYWHERE),
    Run("Gemma-4", MHA, SWA_POOL, _SWA, ("torch_native",), _PLAIN, _OLD),
    Run("Gemma-4 without an SWA pool", MHA, ONE_POOL, _MHA, _BOTH, _MTP, _SUITE),
    Run("Gemma-3", MHA, ONE_POOL, _MHA, _BOTH, _PLAIN, _NEW),
    Run("Gemma-3", MHA, ONE_POOL, _MHA, ("flashinfer",), _PLAIN, _NEW),
    Run("Llama, Qwen3", MHA, NO_WINDOW, _MHA, _BOTH, _PLAIN, _NEW),
    Run("Llama, Qwen3", MHA, NO_WINDOW, _MHA, ("fa3",), _PLAIN, {"0.5.23": (CPU, H100)}),
    Run("Llama, Qwen3", MHA, NO_WINDOW, _MHA, ("flashinfer",), _PLAIN, _NEW),
    Run("Llama, Qwen3", MHA, NO_WINDOW, _MHA, ("torch_native",), _PLAIN, _NEW),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("triton",), (NO_DRAFT, "EAGLE"), {"0.5.12.post1": (H100,)}),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("trtllm_mha",), _OTHER_DRAFTS, _NEW),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("triton",), _OTHER_DRAFTS, _NEW),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("triton", "flashinfer"), _PLAIN, {"0.5.23": (H100,)}),
    Run("Llama", MHA, NO_WINDOW, _MHA, ("fa3",), ("EAGLE",), {"0.5.23": (CPU, H100)}),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, _BOTH, _PLAIN, _NEW),
    Run("gpt-oss", SINKS, SWA_POOL, _SWA, ("fa3",), _PLAIN, {"0.5.23": (CPU, H100)}),
    Run("DeepSeek", MLA, NO_WINDOW, _MLA, ("triton",), _PLAIN, _NEW),
    Run("DeepSeek", MLA, NO_WINDOW, _MLA, ("fa3",), _PLAIN, _NEW),
    Run("DeepSeek", MLA, NO_WINDOW, _MLA, ("flashinfer_mla",), _PLAIN, _NEW),
    Run("DeepSeek", MLA, NO_WINDOW, _MLA, ("flashmla",), _PLAIN, _NEW),
    Run("DeepSeek", MLA, NO_WINDOW, _MLA, ("trtllm_mla",), _PLAIN, _NEW),
    Run("LFM2", LINEAR, NO_WINDOW, _LINEAR, ("trtllm_mha",), _PLAIN, _NEW),
    Run("LFM2", LINEAR, NO_WINDOW, _LINEAR, ("flashinfer",), _PLAIN, _NEW),
)


def was_run(it: Combination, release: str, on_cpu: bool) -> bool:
    """True if this combination was run, as far as it is known."""
    return any(run.is_of(it) for run in there(release, on_cpu))


def nearest(it: Combination, release: str, on_cpu: bool) -> str:
    """What was run there, in words: with models of the same class, or else with which models."""
    runs = there(release, on_cpu)
    alike = [run.with_what for run in runs if run.has_class_of(it)]
    if alike:
        return f"such a model was run {'; '.join(dict.fromkeys(alike))}"
    models = (f"{run.models} ({run.attention}, {run.window})" for run in runs)
    return f"run were {'; '.join(dict.fromkeys(models)) or 'none'}"


def there(release: str, on_cpu: bool) -> list[Run]:
    """The lines for a release, and for the CPU engine or for GPUs."""
    return [run for run in RUNS if run.was_at(release, on_cpu)]


def backends_of_gemma(release: str) -> set[str]:
    """The attention backends that the CPU engine served Gemma-4 with an SWA pool on."""
    runs = (run for run in there(release, True) if (run.attention, run.window) == (MHA, SWA_POOL))
    return {name for run in runs for name in run.backends}
