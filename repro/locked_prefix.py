"""Cached pages are freed while a request reads them: silent wrong answers of SGLang itself.

    python repro/locked_prefix.py [--arm NAME] [--requests N] [--json] [--keep]

No fault is injected: SGLang 0.5.12.post1 to 0.5.14 as installed. A system prompt that many
requests share, one long answer, and a SWA pool under pressure are enough. Exit code 0 only if
every arm did as it should, 1 if one did not, 2 for wrong arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import DEBUG, Arm, Repro, Verdict, dump_of, main, same_outputs
from _locked_prefix import DEVICES
from _run import Outcome

OFF = {"G4DEBUG_FIX_LOCKED_PREFIX": "0"}


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    return Verdict(True, f"completes {len(run.result['tokens'])} requests")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    if clean is None:
        return Verdict(False, "completes, but there is no clean run to compare with")
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not wrong:
        return Verdict(False, "all answers are right: the bug was not reached")
    first = next(n for n, (a, b) in enumerate(zip(*pairs[wrong[0]], strict=True)) if a != b)
    return Verdict(
        True,
        f"completes, nothing is reported, and {len(wrong)} of {len(pairs)} answers are wrong "
        f"(request {wrong[0]} from token {first} on)",
    )


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return Verdict(False, f"no finding (status {run.status}); log: {run.log}")
    finding = record.finding
    if finding.kind != "use-after-free":
        return Verdict(False, f"another finding: {finding.headline}")
    who = [e for e in record.events if e.kind == "free"]
    if not who or "_insert_helper" not in who[-1].caller:
        return Verdict(False, f"does not say who freed the page: {finding.headline}")
    return Verdict(True, f"{finding.check}: {finding.kind}, freed by {who[-1].caller}")


REPRO = Repro(
    title="locked_prefix: a shared prefix, one long answer, SWA pool under pressure",
    arms={
        "clean": Arm("no prefix cache, fix off", OFF, judge_clean, "_locked_prefix:UNCACHED"),
        "broken": Arm("fix off, debugging off", OFF, judge_broken, "_locked_prefix"),
        "diagnosed": Arm(
            "fix off, debugging on", {**OFF, **DEBUG}, judge_diagnosed, "_locked_prefix", "finding"
        ),
        "fixed": Arm("fix on", {}, same_outputs, "_locked_prefix"),
    },
    devices=DEVICES,
    compares=("broken", "fixed"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "24"))
