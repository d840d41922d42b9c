"""SGLang frees cached pages while a request still reads them, and its answer is silently wrong.

    python repro/locked_prefix.py [--variant NAME] [--requests N] [--json] [--keep]

No fault is injected: this is SGLang 0.5.12.post1 to 0.5.14 as released. It takes a system prompt
that many requests share, one long answer, and a SWA pool that is nearly full. The script runs on
the CPU engine only.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments, on a machine with a GPU or on SGLang 0.5.15 and later.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _locked_prefix import DEVICES
from _run import Outcome
from _variants import (
    CPU_ONLY,
    DEBUG,
    Repro,
    Variant,
    Verdict,
    dump_of,
    main,
    no_dump,
    not_comparable,
    not_completed,
    same_outputs,
)

OFF = {"G4DEBUG_FIX_LOCKED_PREFIX": "0"}


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, not_completed(run))
    return Verdict(True, f"It completes all {len(run.result['tokens'])} requests.")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    why_not = not_comparable(run, clean)
    if why_not or clean is None:
        return Verdict(False, why_not)
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    wrong = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not wrong:
        return Verdict(False, "It completes, and all answers are right: the bug was not met.")
    first = next(n for n, (a, b) in enumerate(zip(*pairs[wrong[0]], strict=True)) if a != b)
    return Verdict(
        True,
        f"It completes and reports nothing, but {len(wrong)} of {len(pairs)} answers are wrong. "
        f"The answer to request {wrong[0]} is wrong from its token {first} on.",
    )


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return no_dump(run)
    finding = record.finding
    if finding.kind != "freed-while-read":
        return Verdict(False, f"It stops with another finding: {finding.headline}.")
    who = [e for e in record.events if e.kind == "free"]
    if not who or "_insert_helper" not in who[-1].caller:
        return Verdict(False, f"The finding does not say who frees the page: {finding.headline}.")
    return Verdict(
        True,
        f"g4debug stops it. The tracer {finding.check} reports {finding.kind}, before the page is "
        f"free, and names who frees it: {who[-1].caller}.",
    )


REPRO = Repro(
    title="locked_prefix: a shared prefix, one long answer, a SWA pool that is nearly full",
    variants={
        "clean": Variant(
            "without a prefix cache, the fix is off", OFF, judge_clean, "_locked_prefix:UNCACHED"
        ),
        "broken": Variant("the fix is off, debugging is off", OFF, judge_broken, "_locked_prefix"),
        "diagnosed": Variant(
            "the fix is off, debugging is on",
            {**OFF, **DEBUG},
            judge_diagnosed,
            "_locked_prefix",
            "finding",
        ),
        "fixed": Variant("the fix locked-prefix is on", {}, same_outputs, "_locked_prefix"),
    },
    devices=DEVICES,
    releases="<0.5.15",
    compares=("broken", "fixed"),
    elsewhere=CPU_ONLY.format("locked_prefix"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "24"))
