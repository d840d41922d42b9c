"""What a server is told that runs a combination which was never run."""

from __future__ import annotations

from g4debug.combinations.run import nearest, was_run
from g4debug.combinations.seen import Combination
from g4debug.hooking import targets
from g4debug.settings import Settings

WAYS = (
    "Start it with G4DEBUG_MODE=log, which only reports findings; or with "
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1, which takes that risk"
)


def refusal(found: Combination, settings: Settings, on_cpu: bool) -> str:
    """Why this combination is refused, and what to do; '' if it was run, as far as it is known."""
    release = str(targets.sglang_version() or "of an unknown version")
    if was_run(found, release, on_cpu):
        return ""
    where = "on the CPU engine" if on_cpu else "on a GPU"
    return (
        f"this server runs {found}. That was never run with g4debug on SGLang {release} {where}: "
        f"{nearest(found, release, on_cpu)}. So a finding could be false, and "
        f"G4DEBUG_MODE={settings.mode} could harm a healthy server. {WAYS}; or arm only what keeps "
        "a record: G4DEBUG_TRACE=flight-recorder"
    )
