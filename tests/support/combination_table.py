"""The two tables of docs/supported.md on combinations, from g4debug/combinations/run.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from g4debug.backends import adapters
from g4debug.combinations.run import NO_BACKEND, NO_OTHER_MODEL, RUNS, Run
from g4debug.combinations.seen import LAYERED, NO_DRAFT

DRAFTS = (
    NO_DRAFT, "FROZEN_KV_MTP", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NGRAM, a tree", LAYERED,
)  # fmt: skip
REFUSED, NOT_THERE = "refused", "not there"
NO_COMMAND = "not written down"


def row_of(run: Run) -> str:
    """``CPU engine: 0.5.12.post1, 0.5.23; H200: 0.5.23`` in the last cell but one."""
    places = dict.fromkeys(place for where in run.at.values() for place in where)
    releases = sorted(run.at)
    at = (f"{p}: {', '.join(r for r in releases if p in run.at[r])}" for p in places)
    cells = (
        run.models, run.attention, run.window, f"`{run.pool}`", _code(run.backends, ", "),
        "; ".join(run.drafts), ", ".join(run.beside) or "–", "; ".join(at),
        _code(run.by, ", ") or NO_COMMAND,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def lines() -> list[str]:
    """A row for each line of the table."""
    head = ("models", "attention", "windows", "KV pool", "attention backends", "drafts")
    head = (*head, "beside", "where it was run", "by")
    return [*_head(head), *map(row_of, RUNS)]


def families() -> list[str]:
    """A row for each class of models and backend, a column for each draft. Equal rows are one."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for models, backend, cells in _families():
        rows.setdefault((models, cells), []).append(backend)
    told = (
        f"| {models} | {_code(backends, ', ')} | {' | '.join(cells)} |"
        for (models, cells), backends in rows.items()
    )
    return [*_head(("models", "attention backends", *DRAFTS)), *told]


def _families() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    classes: dict[tuple[str, str, str], list[Run]] = {}
    for run in RUNS:
        if not run.beside:
            classes.setdefault((run.attention, run.window, run.pool), []).append(run)
    for runs in classes.values():
        names = itertools.chain(*(run.models.split(", ") for run in runs))
        models = ", ".join(dict.fromkeys(names))
        backends = [adapter.name for adapter in adapters()]
        backends += dict.fromkeys(b for r in runs for b in r.backends if b not in backends)
        for backend in backends:
            yield models, backend, tuple(_cell(runs, backend, draft) for draft in DRAFTS)


def _cell(runs: list[Run], backend: str, draft: str) -> str:
    """``run: CPU engine, H100``; with some release, which the other table names."""
    places = dict.fromkeys(
        place
        for run in runs
        if backend in run.backends and draft in run.drafts
        for where in run.at.values()
        for place in where
    )
    if places:
        return f"run: {', '.join(places)}"
    known = {d for run in runs for d in run.drafts}
    absent = backend in NO_BACKEND.get(runs[0].attention, ())
    return NOT_THERE if absent or (draft in NO_OTHER_MODEL and draft not in known) else REFUSED


def _head(cells: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(cells)} |", "|" + "---|" * len(cells)]


def _code(names: tuple[str, ...] | list[str], between: str) -> str:
    return between.join(f"`{name}`" for name in names).replace(" and ", "` and `")
