"""A plugin for SGLang: a server starts when the benchmark lets it, and tells how far it is.

Importing takes half of a server's start. So a benchmark begins many servers at once. Each imports
everything, and its scheduler waits here, without having touched the GPU, until the server before it
has gone. It reads a pipe, which costs nothing while it waits. Of a server with several ranks the
first that comes waits, and it alone answers.

On SIGUSR2 the scheduler writes into a file how many forwards it has run, how many nodes its prefix
cache has, and which tracers g4debug has armed in it. The plugin hooks nothing.

With the variable SWITCH, SIGUSR1 takes g4debug's tracers out of the way, or the tape alone, and the
next one puts them back: SGLang's functions then lead past their hooks. So one process is measured
with tracers and without. Kernels of ours that are part of a CUDA graph stay in it. Meanwhile the
ledger sees no page handed out, so they are told not to believe it, as if it had been given up.
Whoever switches must empty SGLang's prefix cache first: then no page is held, by SGLang and by the
ledger.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "BENCHMARK_GATE"  # the beginning of the names of the files
SWITCH = "BENCHMARK_SWITCH"  # what can be switched off and on: TRACERS or TAPE
TRACERS, TAPE = "tracers", "tape"
OF_TAPE = ("Taping", "RequestEvents")  # G4DEBUG_TAPE=0 leaves out both
armed = True
ledgers: list[Any] = []
sites: list[str] = []  # where something can be switched


def register() -> None:
    from g4debug import plugin

    gate = os.environ.get(VARIABLE)
    # From 0.5.23 on other children load plugins, too: two at one gate would wait for each other.
    if not gate or plugin.role() != "scheduler":
        return
    signal.signal(signal.SIGUSR2, lambda number, frame: _write(Path(f"{gate}.facts"), frame))
    if os.environ.get(SWITCH):
        make_switchable(of_the_tape if os.environ[SWITCH] == TAPE else of_a_tracer)
        signal.signal(signal.SIGUSR1, lambda number, frame: _switch(Path(f"{gate}.switched")))
    try:
        Path(f"{gate}.claimed").touch(exist_ok=False)
    except FileExistsError:
        return  # another rank of this server is at the gate; it can do nothing without that one
    ready = Path(f"{gate}.ready")
    ready.with_suffix(".tmp").write_text(str(os.getpid()))
    ready.with_suffix(".tmp").rename(ready)
    with open(f"{gate}.pipe") as pipe:
        pipe.read()


def of_a_tracer(entry: Any) -> bool:
    """True of a hook of a tracer, or of a helper of theirs; False of a fix's."""
    from g4debug.hooking.hooks import Order

    return bool(entry.order >= Order.TRACER)


def of_the_tape(entry: Any) -> bool:
    from g4debug.hooking.hooks import Isolated

    hook = entry.before or entry.after
    while isinstance(hook, Isolated):
        hook = hook.hook
    return type(getattr(hook, "__self__", None)).__name__ in OF_TAPE


def make_switchable(switched: Callable[[Any], bool]) -> None:
    """From now on a site leads past these hooks while they are switched off.

    Raises AssertionError if g4debug has put its hooks in place already.
    """
    from g4debug import plugin
    from g4debug.hooking.hooks import Around, Hooks
    from g4debug.ledger.hooks import LedgerHooks

    assert plugin.in_force is None, "g4debug was loaded first"
    compose, install = Hooks._compose, LedgerHooks.install

    def installed(ledger_hooks: LedgerHooks, hooks: Hooks) -> None:
        ledgers.append(ledger_hooks.ledger)
        install(ledger_hooks, hooks)

    def both(hooks: Hooks, site: str) -> Around:
        whole = compose(hooks, site)
        entries = hooks._entries[site]
        hooks._entries[site] = [e for e in entries if not switched(e)]
        if len(entries) == len(hooks._entries[site]):
            return whole
        sites.append(site)
        bare = compose(hooks, site)
        hooks._entries[site] = entries

        def either(original: Around, *args: Any, **kwargs: Any) -> Any:
            return (whole if armed else bare)(original, *args, **kwargs)

        return either

    Hooks._compose = both  # type: ignore[method-assign]
    LedgerHooks.install = installed  # type: ignore[method-assign]


def _switch(path: Path) -> None:
    global armed
    armed = not armed
    for ledger in ledgers:
        if ledger.shadow is not None and not ledger.broken:
            ledger.shadow[-1:].fill_(int(armed))
    path.write_text("on" if armed else "off")


def _write(path: Path, frame: FrameType | None) -> None:
    scheduler = None
    while frame is not None and scheduler is None:
        mine = frame.f_locals.get("self")
        scheduler = mine if type(mine).__name__ == "Scheduler" else None
        frame = frame.f_back
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(facts(scheduler)))
    draft.rename(path)


def facts(scheduler: Any) -> dict[str, Any]:
    """Steps, nodes of the prefix cache, tracers and their hook sites in this process."""
    from g4debug import plugin

    found: dict[str, Any] = {
        "steps": None, "nodes": None, "overlap": None, "tracers": "", "sites": tracer_sites(),
        "switched": len(sites), "tape_steps": tape_steps(), "lacks": "", "findings": 0,
    }  # fmt: skip
    if plugin.in_force is not None:
        parts = plugin.in_force.recorder.status.records()
        found["lacks"] = "; ".join(lacks(parts))
        found["findings"] = sum(sum(part.findings.values()) for part in parts)
        found["tracers"] = " ".join(plugin.in_force.tracers)
    if scheduler is not None:
        found["steps"] = int(scheduler.forward_ct)
        found["overlap"] = bool(scheduler.enable_overlap)
        found["nodes"] = _nodes(scheduler.tree_cache)
    return found


def lacks(parts: Iterable[Any]) -> Iterator[str]:
    """What these parts of a status do not judge, but for what is so with watch or by design."""
    for part in parts:
        for limit in part.limits:
            if not limit.documented and not limit.why.startswith("SGLANG_TRTLLM_MHA_DEBUG=watch "):
                yield f"{part.name}: {limit.what}"
        if part.off and not part.idle:
            yield f"{part.name}: off"
        yield from (f"{part.name}: {x}" for x in (*part.dead, *part.silent))


def tape_steps() -> int:
    """The steps on the tape of this process; -1 if there is none, or if it has given up."""
    from g4debug.tracers.flight_recorder import taping

    tape = taping.current
    return tape.steps if tape is not None and tape.on else -1


def tracer_sites() -> int:
    """How many sites have hooks of tracers or of their helpers. Sites of fixes do not count."""
    from g4debug import discovery, plugin

    if plugin.in_force is None:
        return 0
    hooks, fixes = plugin.in_force.hooks, set(discovery.names("fix"))
    return sum(not set(hooks.owners(site)) <= fixes for site in hooks.sites)


def _nodes(tree: Any) -> int | None:
    """How many nodes a prefix cache has; None if the Rust core of 0.5.23 keeps them to itself."""
    try:
        stack, nodes = [tree.root_node], 0
    except (AttributeError, NotImplementedError):
        return None
    while stack:
        nodes += 1
        stack.extend(stack.pop().children.values())
    return nodes
