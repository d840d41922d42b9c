"""Chooses the toy that a replay serves: with the KV pools and the draft of the recorded server.

Which page goes where depends on the class of the pools, on page size and on the draft's width, and
on no weight. So one toy stands for all models of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4debug import discovery, speculation
from g4debug.combinations import run
from g4debug.cpu import drafts, toys
from g4debug.cpu.server import DEFAULT, backend_for, server_arguments
from g4debug.cpu.toy import MAX_POSITION, Draft, Size
from g4debug.findings.record import Plain
from g4debug.speculation import multi_layer_eagle

WINDOWLESS = "llama"  # stands for all models without sliding layers, but those with MLA
COMPRESSED = "deepseek"  # for those with MLA
SHARED = "gemma-3"  # for those whose sliding layers share the others' pool
LAYERED = "mimo-v2"  # for those with an SWA pool and a draft layer for each step
# Of each toy: how the names of SGLang's classes of such a model begin, and its name.
KNOWN = {
    DEFAULT: ("Gemma4", "Gemma-4"),
    WINDOWLESS: ("Llama", "Llama"),
    COMPRESSED: ("Deepseek", "DeepSeek"),
    SHARED: ("Gemma3", "Gemma-3"),
    LAYERED: ("MiMoV2", "MiMo-V2"),
}
# SGLang's releases on which servers with one KV pool for all layers were replayed.
RELEASES = ("0.5.23",)


class NoToy(Exception):
    """No toy has these pools and this draft. The text says why, after "because"."""


@dataclass(frozen=True)
class Model:
    """A toy of a certain size, in the user's cache directory.

    toy: its name. draft: the name of a draft that takes the place of its own, '' for none.
    """

    toy: str
    draft: str
    vocab: int
    window: int
    context: int

    @property
    def architecture(self) -> str:
        """How the names of SGLang's classes of such a model begin."""
        return KNOWN[self.toy][0]

    @property
    def name(self) -> str:
        return f"a toy {KNOWN[self.toy][1]}"

    @property
    def algorithm(self) -> str:
        """SGLang's name of the draft that takes the place of the toy's own, '' for none."""
        if not self.draft:
            return ""
        return (drafts.load(self.draft, self.toy).runs_as or self.draft).upper()

    @property
    def needed(self) -> str:
        """Which model a script needs that was shrunk with this one, in a sentence."""
        if self.toy == COMPRESSED:
            return "MODEL: one with MLA, as DeepSeek."
        if self.toy == WINDOWLESS:
            return "MODEL: one without sliding layers, as Llama."
        like = f"as {KNOWN[self.toy][1]}, whose window is {self.window} tokens"
        return f"MODEL: one with sliding layers, {like}."

    def write(self) -> tuple[Path, ...]:
        """The folders of the target and of its draft, if that is a model."""
        size, toy = Size(self.vocab, self.context, self.window), toys.load(self.toy)
        assert toy.sized is not None
        found = toy.sized(size)
        return (*found, *drafts.load(self.draft, self.toy).sized(size)) if self.draft else found

    def serve(self, speculates: bool, **overrides: Any) -> dict[str, Any]:
        """SGLang's arguments. speculates: whether with a draft."""
        folders = self.write()
        own = [str(f) for f in folders[1:2] if speculates]
        more = {"speculative_draft_model_path": own[0]} if own else {}
        return server_arguments(
            folders, speculates, self.toy, self.draft or None, **{**more, **overrides}
        )

    def backend(self, asked: Plain, page: int, release: str) -> str:
        """The attention backend: the one that was asked for, or else one that serves this toy."""
        toy = toys.load(self.toy)
        known = run.backends_of_gemma(release) if self.toy == DEFAULT else {*toy.backends}
        if isinstance(asked, str) and asked in known:
            return asked
        return str(toy.arguments.get("attention_backend", backend_for(page)))


def chosen(
    facts: Mapping[str, Plain],
    release: str,
    vocab: int,
    window: int,
    context: int,
    serves: str = "",
) -> Model:
    """The toy for a tape. facts: see ``Tape.scheduler``. window: as SGLang counts it, 0 for none.
    serves: what the server ran, in words.

    Raises NoToy.
    """
    algorithm = facts.get("speculative_algorithm")
    # SGLang has one name for two workers.
    if algorithm and f"draft {multi_layer_eagle.NAME}" in serves:
        algorithm = multi_layer_eagle.NAME
    if algorithm is not None and algorithm not in speculation.replayed(release):
        raise NoToy(f"the speculative algorithm {algorithm} was never replayed")
    if (facts.get("speculative_eagle_topk") or 1) != 1:
        raise NoToy("several draft paths (speculative_eagle_topk) were never replayed")
    named = str(algorithm).lower().replace(" ", "-")
    draft = named if named in discovery.names("draft") else ""  # or else it is the toy's own
    layered = algorithm == multi_layer_eagle.NAME and facts.get("size_swa") is not None
    toy = LAYERED if layered else _stands_for(facts, window)
    if toy != DEFAULT and release not in RELEASES:
        raise NoToy(
            f"it is of SGLang {release}, and servers with one KV pool for all layers were replayed "
            f"on {', '.join(RELEASES)} only"
        )
    if algorithm is not None and not _drafts(toy, draft):
        raise NoToy(f"the draft {algorithm} was never replayed with {_pools_of(toy)}")
    return Model(toy, draft, vocab, window + 1, max(context + 64, MAX_POSITION))


def _stands_for(facts: Mapping[str, Plain], window: int) -> str:
    """The toy with the KV pools of a server. window: 0 for none."""
    if facts.get("size_swa") is not None:
        return DEFAULT
    if facts.get("kv_pool") == "MLA":
        if window:
            raise NoToy("sliding layers with a KV pool of MLA were never replayed")
        return COMPRESSED
    return SHARED if window else WINDOWLESS


def _drafts(toy: str, draft: str) -> bool:
    if not draft:
        return bool(toys.load(toy).draft)
    found: Draft = discovery.load("draft", draft)
    return toy in found.targets


def _pools_of(toy: str) -> str:
    return {
        **dict.fromkeys((DEFAULT, LAYERED), "a KV pool that is divided for sliding layers"),
        WINDOWLESS: "one KV pool for all layers",
        COMPRESSED: "a KV pool of MLA",
        SHARED: "sliding layers that share the others' KV pool",
    }[toy]
