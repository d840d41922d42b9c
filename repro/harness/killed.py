"""The four variants of a script whose request SGLang ends with HTTP 500, as the pool has no room.

*clean* has a pool with room, in *broken* and *diagnosed* the request is killed, and *fixed* serves
it with the pool of *broken*. SGLang 0.5.12 to 0.5.15, on the CPU engine only.
"""

from __future__ import annotations

from g4debug.settings import fix_switch
from harness.processes import Outcome
from harness.variants import CPU_ONLY, Repro, Variant, broken, diagnosed
from harness.verdicts import Bad, answers, died_otherwise, dump_path, judge, same_outputs

KILLED = "Out of memory even after retracting all other requests in the decode batch"


def repro(name: str, fix: str, serves: str, seen: str) -> Repro:
    """The script ``name``. fix: its id. seen: what a user sees, before SGLang's own words."""
    off = {fix_switch(fix): "0"}

    def ended(run: Outcome) -> str:
        """Raises Bad if all requests are served, or the server ends otherwise."""
        if run.completed or KILLED not in run.text:
            raise Bad(died_otherwise(run, KILLED))
        return f"{seen}: {KILLED}."

    @judge
    def judge_broken(run: Outcome) -> str:
        return ended(run)

    @judge
    def judge_diagnosed(run: Outcome) -> str:
        what = ended(run)
        if path := dump_path(run):
            raise Bad(f"A tracer has a finding, though nothing is corrupted: {path}.")
        return (
            f"{what} No tracer has a finding, because nothing is corrupted. TRIAGE.md has the "
            "message."
        )

    return Repro(
        name=name,
        serves=serves,
        refuses=", on a machine with a GPU or on SGLang 0.5.18 and later",
        variants={
            "clean": Variant("a SWA pool of 6528 tokens, the fix is off", off, answers, "ROOMY"),
            "broken": broken("the fix is off, debugging is off", off, judge_broken),
            "diagnosed": diagnosed("the fix is off, debugging is on", off, judge_diagnosed),
            "fixed": Variant(f"the fix {fix} is on", {}, same_outputs),
        },
        releases="<0.5.18",
        elsewhere=CPU_ONLY,
    )
