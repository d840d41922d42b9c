"""The tracers and faults that there are, for ``g4debug doctor``: which are asked for."""

from __future__ import annotations

from typing import Any

from g4debug import discovery
from g4debug.reporters.doctor import Diagnosis, Row
from g4debug.settings import Settings


def catalogue(d: Diagnosis, settings: Settings | None) -> None:
    """The tracers and faults that there are, and which of them are asked for."""
    from g4debug.faults.grammar import parse

    settings = settings or Settings()
    for name in discovery.names("tracer"):
        tracer = _declared("tracer", name)
        state = "opt-in" if opt_in(name) else "off"
        if name in armed(settings):
            state = f"armed ({settings.mode})"
        d.tracers.append(Row(name, state, getattr(tracer, "title", "")))
    injected = parse(settings.faults).chains
    for name in discovery.names("fault"):
        fault = _declared("fault", name)
        catchers = tuple(getattr(fault, "caught_by", ()))
        what = f"{fault.title}; caught by {', '.join(catchers)}" if fault else ""
        d.faults.append(Row(name, "injected" if name in injected else "off", what))
        if name in injected and settings.tracers and not set(catchers) & set(armed(settings)):
            d.notes.append(
                f"fault {name} is injected, but none of its tracers is armed: {catchers}"
            )


def armed(settings: Settings) -> tuple[str, ...]:
    """The tracers that the server will arm: opt-in ones only if they are named."""
    return tuple(n for n in settings.tracers if settings.trace or not opt_in(n))


def opt_in(tracer: str) -> bool:
    return bool(getattr(_declared("tracer", tracer), "opt_in", False))


def _declared(noun: discovery.Noun, name: str) -> Any:
    """What an item declares, or None where it cannot be imported (no triton on a laptop)."""
    try:
        return discovery.load(noun, name)
    except ImportError:
        return None
