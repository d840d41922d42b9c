"""What a server is told that runs a combination which was never run, or which cannot be told."""

from __future__ import annotations

from g4debug.combinations.run import nearest, was_run
from g4debug.combinations.seen import Combination
from g4debug.hooking import targets
from g4debug.settings import Settings

WAYS = (
    "Start it with G4DEBUG_MODE=log, which only reports findings; or with "
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1, which takes that risk"
)


def refusal(found: Combination, settings: Settings, on_cpu: bool, whole: bool = False) -> str:
    """Why this combination is refused, and what to do; '' if it was run, as far as it is known.

    whole: the server is complete, so what is not known now is never known.
    """
    release = str(targets.sglang_version() or "of an unknown version")
    where = f"on SGLang {release} {'on the CPU engine' if on_cpu else 'on a GPU'}"
    if whole and found.unknown:
        why = (
            f"this server runs {found}. Not known of it: {', '.join(found.unknown)}. So nobody can "
            f"say whether g4debug was run so {where}"
        )
    elif was_run(found, release, on_cpu):
        return ""
    else:
        why = (
            f"this server runs {found}. That was never run with g4debug {where}: "
            f"{nearest(found, release, on_cpu)}"
        )
    return why + _and_so(settings)


def failure(error: Exception, settings: Settings) -> str:
    """The refusal of a server of which a failure of ours hides what it runs."""
    return (
        "what this server runs cannot be told, so nobody can say whether g4debug was run so. "
        f"A failure of g4debug, which please report: {type(error).__name__}: {error}"
        + _and_so(settings)
    )


def _and_so(settings: Settings) -> str:
    return (
        f". So a finding could be false, and G4DEBUG_MODE={settings.mode} could harm a healthy "
        f"server. {WAYS}; or arm only what keeps a record: G4DEBUG_TRACE=flight-recorder"
    )
