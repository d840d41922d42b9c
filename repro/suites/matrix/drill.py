"""One row of the matrix: a fault is run twice, without and with tracers, and judged.

A fault's *drill* is the firing plan that the matrix gives it (see ``Fault.drills``).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness import mixed
from harness.processes import Outcome
from harness.workload import without_mtp

from g4debug import backends as adapters
from g4debug import discovery
from g4debug.backends.base import ListAdapter, TableAdapter
from g4debug.cpu.server import DEFAULT
from g4debug.cpu.toy import Toy
from g4debug.dumps import reading
from g4debug.faults.base import Asked, Fault
from g4debug.settings import fix_switch

REQUESTS, WAVES = 14, 2
TIMEOUT = 240.0  # seconds of one run; one without a fault takes 15 on an idle machine
_FIRED = re.compile(r"g4debug fault \(seed=\d+\) \S+ #\d+: .*\[step (\d+): ")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Trap\w*)\b.*)$", re.MULTILINE)
_PLACE = re.compile(r"\[/\S+\] ")  # a source file of the machine on which a library was built
_LEAK = "memory leak detected"


@dataclass
class Row:
    """named: the tracers that must catch it. seen: what a user sees without tracers.

    mtp: the server drafts. fired: the step of the first firing, -1 if it never fired. caught:
    tracer -> steps from there to its first finding. kinds: tracer -> the kind of that finding.
    watched: the tracer by which SGLANG_TRTLLM_MHA_DEBUG=watch must tell it, '' if it need not.
    watch: the same as caught, of a server with watch; None if there was no such run.
    """

    fault: str
    drill: str
    named: tuple[str, ...]
    mtp: bool = True
    seen: str = ""
    fired: int = -1
    caught: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    watched: str = ""
    watch: dict[str, int] | None = None

    @property
    def blind(self) -> bool:
        """True if watch was to tell it, and did not."""
        return self.watch is not None and bool(self.watched) and self.watched not in self.watch

    @property
    def false_watch(self) -> bool:
        """True if watch told something where nothing is wrong."""
        return not self.named and bool(self.watch)

    @property
    def name(self) -> str:
        return f"{self.fault}={self.drill}{'' if self.mtp else ', without MTP'}"

    @property
    def missed(self) -> list[str]:
        return [t for t in self.named if t not in self.caught]

    @property
    def good(self) -> bool:
        if self.problem or self.fired < 0 or self.blind or self.false_watch:
            return False
        return not self.missed if self.named else not self.caught

    @property
    def verdict(self) -> str:
        if self.problem:
            return self.problem
        if self.fired < 0:
            return "The fault NEVER FIRED."
        if self.false_watch:
            return f"FALSE ALARM of watch, by {', '.join(self.watch or ())}."
        if not self.named:
            if self.good:
                return "No tracer reports anything, as it should be."
            kinds = ", ".join(f"{kind} by {tracer}" for tracer, kind in self.kinds.items())
            return f"FALSE ALARM: {kinds}."
        found = [f"{t} {_later(self.caught[t])}" for t in self.named if t in self.caught]
        said = [f"It is caught by {', '.join(found)}."] if found else []
        said += [f"It is MISSED by {', '.join(self.missed)}."] if self.missed else []
        others = [t for t in self.caught if t not in self.named]
        said += [f"Also found by {', '.join(others)}."] if others else []
        if self.watch:
            told = [f"{t} {_later(n)}" for t, n in self.watch.items()]
            said += [f"With watch it is told by {', '.join(told)}."]
        if self.blind:
            said += [f"Watch MISSES it, which {self.watched} was to tell."]
        return " ".join(said)


def _later(steps: int) -> str:
    if not steps:
        return "in the same step"
    return f"{steps} step{'s' * (steps != 1)} later"


@dataclass
class Clean:
    """The run without a fault, with which all others are compared."""

    outputs: dict[str, Any]
    accept_length: float
    seen: str
    verdict: str
    good: bool
    backend: str = ""
    mtp: bool = True
    model: str = DEFAULT

    @property
    def on(self) -> str:
        return f"{self.backend and f', on {self.backend}'}{'' if self.mtp else ', without MTP'}"


Result = TypeVar("Result", Row, Clean)


def kept(made: type[Result], name: str, folder: Path, run: Callable[[], Result]) -> Result:
    """The good result of this name that an earlier call left in the folder, or that of a run."""
    path = folder / f"{_file(name)}.result"
    if path.is_file():
        return made(**json.loads(path.read_text()))
    result = run()
    if result.good:
        path.write_text(json.dumps(dataclasses.asdict(result)))
    return result


def _file(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


# Fixes that stay on with several ranks: without them those do not get as far as the fault.
FOR_RANKS = ("draft-embedding-shard",)


def environment(faults: str, armed: bool, folder: Path, ranks: int = 1) -> dict[str, str]:
    env = {
        fix_switch(name): "0"
        for name in discovery.names("fix")
        if ranks == 1 or name not in FOR_RANKS
    }
    if faults:
        env["G4DEBUG_FAULTS"] = faults
    if armed:
        env |= {
            "G4DEBUG_TRACE": ",".join(discovery.names("tracer")),
            "G4DEBUG_MODE": "log",
            "G4DEBUG_LEAK_STEPS": "4",
            "G4DEBUG_MAX_DUMPS": "100",
            "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder),
        }
    return env


def watching(faults: str, folder: Path, ranks: int = 1) -> dict[str, str]:
    """The environment of a server that stays watched, as people start it."""
    return environment(faults, False, folder, ranks) | {
        "SGLANG_TRTLLM_MHA_DEBUG": "watch",
        "G4DEBUG_MAX_DUMPS": "100",
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder),
    }


def run(
    name: str,
    env: Mapping[str, str],
    folder: Path,
    backend: str = "",
    ranks: int = 1,
    mtp: bool = True,
    model: str = DEFAULT,
) -> Outcome:
    """One run of the mixed workload in a process of its own.

    backend: the attention backend, '' for the model's first. ranks: tensor-parallel ranks; each is
    a process with as much to do as a single one has.
    """
    arguments: dict[str, Any] = {"model": model}
    if backend:
        arguments["attention_backend"] = backend
    if ranks > 1:
        arguments["tp_size"] = ranks
    if not mtp:
        arguments |= without_mtp()
    return mixed.run(
        name, env, folder, TIMEOUT * ranks, REQUESTS, arguments, waves=WAVES, last_words=_LEAK
    )


def run_clean(folder: Path, backend: str = "", mtp: bool = True, model: str = DEFAULT) -> Clean:
    """Without a fault. backend: the attention backend, '' for the model's first."""
    name = f"clean-{backend}" if backend else "clean"
    name += "" if mtp else "-plain"
    of: dict[str, Any] = {"mtp": mtp, "model": model}
    plain = run(name, environment("", False, folder), folder, backend, **of)
    if not plain.completed:
        raise SystemExit(
            f"The run without a fault did not complete. The end of its log:\n{plain.text[-3000:]}"
        )
    outputs, accept = plain.result["outputs"], plain.result["accept_length"]
    seen = f"completes, {len(outputs)} requests, accept length {accept:.2f}"
    dumps = folder / f"{name}-armed-dumps"
    armed = run(f"{name}-armed", environment("", True, dumps), folder, backend, **of)
    bad = ""
    if not armed.completed:
        bad = "DID NOT COMPLETE"
    elif findings := _findings(dumps):
        bad = f"FALSE ALARM: {findings}"
    elif armed.result["outputs"] != outputs:
        bad = "OTHER TOKENS"
    said = bad or "no finding, the same tokens"
    return Clean(outputs, accept, seen, said, not bad, backend, mtp, model)


@dataclass(frozen=True)
class Drill:
    """A chain of a fault's. mtp: on a server that drafts. without: why the model cannot have it.

    on: the attention backend, '' for the model's first.
    """

    fault: Fault
    chain: str
    mtp: bool = True
    without: str = ""
    on: str = ""

    def __str__(self) -> str:
        return f"{self.fault.id}={self.chain}"


def name_of(model: str, backend: str) -> str:
    """What a page of the matrix is called after: a model, or a model on a backend."""
    return f"{model}-{backend}" if backend else model


def drills(faults: Sequence[Fault], toy: Toy, backend: str = "") -> list[Drill]:
    """The drills of the faults on a model: those on a server that drafts come first.

    A model without a draft has those that need none, and its decode where another one verifies.
    backend: the attention backend of all of them; '' for each fault's own, or the model's first.
    """

    def drill(fault: Fault, chain: str, mtp: bool) -> Drill:
        why = _without(fault, chain, toy, backend)
        return Drill(fault, chain, mtp, why, backend or fault.backend)

    if toy.draft:
        found = [drill(f, chain, True) for f in faults for chain in f.drills]
        plain = [(f, chain) for f in faults for chain in f.plain_drills]
    else:
        found = []
        plain = [
            (f, chain.replace("@runner=target", "").replace("target_verify", "decode"))
            for f in faults
            for chain in f.plain_drills or f.drills
        ]
    return found + [drill(f, chain, False) for f, chain in plain]


def _without(fault: Fault, chain: str, toy: Toy, backend: str) -> str:
    """Why the fault cannot fire so on a model, '' if it can. backend: '' for the fault's own."""
    adapter = adapters.adapter(backend or fault.backend or toy.backends[0])
    has: dict[Asked, bool] = {
        "a draft": bool(toy.draft),
        "a draft model": bool(toy.draft),
        "a draft that reads the target's KV": bool(toy.draft),
        "hidden states that a draft begins with": bool(toy.draft),
        "a SWA pool": toy.pool == "swa",
        "page tables": isinstance(adapter, TableAdapter) and bool(adapter.tables),
        "lists of tokens": isinstance(adapter, ListAdapter),
        "a prefix cache": not toy.arguments.get("disable_radix_cache"),
    }
    asked: list[Asked] = [] if fault.plain_drills else [*fault.asks]
    if "@runner=draft" in chain:
        asked.append("a draft")
    if "*swa" in chain:
        asked.append("a SWA pool")
    missing = [what for what in dict.fromkeys(asked) if not has[what]]
    if missing:
        return f"it asks for {' and '.join(missing)}"
    if fault.backend and not backend and fault.backend not in toy.backends:
        return f"it strikes {fault.backend}, and the CPU engine serves it on {toy.backends[0]}"
    return ""


def row_of(fault: Fault, drill: str, clean: Clean) -> Row:
    return Row(fault.id, drill, fault.caught_by, clean.mtp, watched=fault.watched)


def run_drill(fault: Fault, drill: str, clean: Clean, folder: Path, watch: bool = False) -> Row:
    """watch: run it on a server with ``SGLANG_TRTLLM_MHA_DEBUG=watch``, too."""
    row = row_of(fault, drill, clean)
    name = _file(row.name)
    faults = f"seed=1;{fault.id}={drill}"
    needs: dict[str, Any] = {"backend": clean.backend, "ranks": fault.ranks, "mtp": clean.mtp}
    needs["model"] = clean.model
    bare = run(name, environment(faults, False, folder, fault.ranks), folder, **needs)
    row.seen = what_a_user_sees(bare, clean)
    dumps = folder / f"{name}-dumps"
    armed = run(f"{name}-armed", environment(faults, True, dumps, fault.ranks), folder, **needs)
    fired = [int(step) for step in _FIRED.findall(armed.text)]
    if not fired and not _FIRED.search(bare.text):
        row.problem = "" if armed.completed else "It DIED BEFORE THE FAULT FIRED."
        return row
    row.fired = fired[0] if fired else -1
    for tracer, kind, step in _findings(dumps):
        if tracer not in row.caught:
            row.caught[tracer], row.kinds[tracer] = max(0, step - row.fired), kind
    if not row.named and not armed.completed and bare.completed:
        row.problem = "It DIED, but only with tracers."
    if watch:
        kept_in = folder / f"{name}-watch-dumps"
        seen = run(f"{name}-watch", watching(faults, kept_in, fault.ranks), folder, **needs)
        row.watch = {}
        began = [int(step) for step in _FIRED.findall(seen.text)]
        for tracer, _, step in _findings(kept_in):
            row.watch.setdefault(tracer, max(0, step - began[0]) if began else 0)
        if not seen.completed and bare.completed:
            row.problem = "It DIED, but only with watch."
    return row


def _findings(folder: Path) -> list[tuple[str, str, int]]:
    """(tracer, kind, step) of every dump, in the order of their steps."""
    records = [reading.read(path).finding for path in folder.glob("*.pt")]
    return sorted(((f.check, f.kind, f.location.step) for f in records), key=lambda f: f[2])


def what_a_user_sees(run: Outcome, clean: Clean) -> str:
    """In a few words, from the log and the outputs of a run without tracers."""
    if _LEAK in run.text:
        return "dies at idle: SGLang's 'memory leak detected'"
    scheduler = run.text.rpartition("Scheduler hit an exception")[2]
    if scheduler != run.text:
        errors = _EXCEPTION.findall(scheduler)
        words = _PLACE.sub("", errors[0]).removeprefix("torch.") if errors else ""
        return f"dies: {words[:90]}" if words else "dies"
    if run.status is None:
        return f"hangs (stopped after {run.seconds:.0f} s)"
    if not run.completed:
        return f"dies with status {run.status}"
    outputs = run.result["outputs"]
    aborted = sum(o["finish"] == "abort" for o in outputs.values())
    other = sum(
        o["tokens"] != clean.outputs[rid]["tokens"]
        for rid, o in outputs.items()
        if o["finish"] != "abort"
    )
    parts = [f"{other} of {len(outputs)} answers are wrong"] if other else []
    if aborted:
        parts.append(f"{aborted} aborted")
    if abs(run.result["accept_length"] - clean.accept_length) >= 0.005:
        parts.append(f"accept length {run.result['accept_length']:.2f}")
    return ", ".join(parts) if parts else "nothing"
