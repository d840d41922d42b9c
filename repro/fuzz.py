"""Draws healthy servers at random, and looks for false findings.

Each server is real SGLang on the CPU engine: page size, pools, chunks, backends, draft, scheduling
and traffic are drawn by its seed, so a seed is enough to have the same server again. Every tracer
is armed in mode ``raise``, which stops at the first finding. A finding is bad in any case: it is
false, or it is a bug of SGLang's, and somebody has to look. Where an armed server ends or stands
without one, the same server runs without tracers. If it ends in the same way, that is SGLang's own
and proves nothing; if not, it is bad. From the tape of a good server its scheduler then decides
again, by ``g4debug replay``. A step that differs is bad, too.

With ``--corrupt`` it is the other way round: a seed draws what is corrupted in a server, where,
when and to which value, and the tracers must tell it. The corruption is made inside of all hooks,
in a fork of a warmed scheduler, and the answers are compared with those of a fork that nothing
struck.
Bad is what is missed (other answers, or an end of SGLang's own, and silence), what is told late,
what disarms a tracer, and what is false. Each case is a line of ``cases.jsonl`` in the folder.

With ``--narrow`` the servers' SWA pools are smaller than two chunks, and half of them run without
the fixes, so that some of them stand. Bad is a request that stands and is not told as ``hang`` or
``starved``, one that stands with the fixes, and a server that is accused although each request got
its answer. If fewer than one in five servers stood, the run proves nothing, and fails.

With ``--out FILE`` the result is written as a page, too.

With ``--model any`` the model is drawn by the seed, too. A model without a draft of its own gets
one of those that the CPU engine has for it, by chance.

The exit code is 0 if nothing is bad and some server did all that it was asked for, 1 if not, and 2
for wrong arguments.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness import render
from harness.options import Parser, logs
from harness.processes import Outcome, script
from harness.render import Block
from harness.replays import replayed
from harness.tracers import accuses
from harness.verdicts import not_completed
from rich.console import Console
from suites.fuzz import corrupt, narrow, narrow_draw, page
from suites.fuzz.draw import Shape, draw, model_of
from suites.healthy.run import FAILED, checked_of, counts, launch

from g4debug.cli import at_least
from g4debug.cpu.server import DEFAULT
from g4debug.dumps import reading
from g4debug.hooking import targets

SERVERS = 20
ANY = "any"  # the model is drawn, too
# They have something to check on any server.
ALWAYS = ("page-table", "pool-leak", "kv-allocator")
TOKENS = (
    "spec-lifecycle"  # it follows tokens where there is a draft, and elsewhere if SGLang lets it
)
TIMEOUT = 400.0  # seconds of one server
_END = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|NotExercised)\b.*)$", re.MULTILINE)
GOOD, BAD, NOTHING = "good", "bad", "proves nothing"


def main() -> int:
    parser = Parser(__doc__)
    parser.model(ANY)
    what = (
        f"the seed of the first server (default: 1; with --corrupt {corrupt.FIRST}, "
        f"with --narrow {narrow_draw.FIRST})"
    )
    parser.add_argument("--first", type=int, metavar="SEED", help=what)
    parser.number("--servers", "how many servers", SERVERS, type=at_least(1))
    what = "strike healthy servers, and look if the tracers tell it"
    parser.add_argument("--corrupt", action="store_true", help=what)
    what = "servers that may stand, and look if the flight recorder tells it"
    parser.add_argument("--narrow", action="store_true", help=what)
    parser.number("--runs", "how many corruptions", corrupt.RUNS, type=at_least(1))
    parser.out("write the result as a page, too (docs/fuzz-RELEASE.md is one of --corrupt)")
    parser.results("keep logs and dumps here")
    args = parser.parse_args()
    if args.model != DEFAULT and (args.corrupt or args.narrow):
        parser.error(f"--model {args.model}: --corrupt and --narrow are for {DEFAULT} only")
    console = Console(highlight=False)
    first = args.first
    if first is None:
        first = corrupt.FIRST if args.corrupt else narrow_draw.FIRST if args.narrow else 1
    if args.corrupt or args.narrow:
        run, count = (corrupt.run, args.runs) if args.corrupt else (narrow.run, args.servers)
        with logs("fuzz", console, "Logs and dumps are in:", given=args.results) as kept:
            kept.good = run(console, first, count, kept.folder, args.out)
        return kept.status
    seeds, every = range(first, first + args.servers), list[page.Server]()
    found = {GOOD: 0, BAD: 0, NOTHING: 0}
    with logs("fuzz", console, "Logs and dumps are in:", given=args.results) as kept:
        for seed in seeds:
            folder = kept.folder / str(seed)
            model = model_of(seed) if args.model == ANY else args.model
            verdict, text, seconds = one(seed, folder, model)
            title = draw(seed, model).words
            found[verdict] += 1
            every.append(page.Server(seed, title, verdict, text))
            render.block(console, Block(str(seed), verdict != BAD, text, title, seconds))
        render.say(console, ", ".join(f"{n} {verdict}" for verdict, n in found.items()) + ".")
        if args.out:
            asked = "" if args.model == DEFAULT else args.model
            page.servers(args.out, seeds, every, asked)
            render.for_copying(console, "The page is in:", str(args.out))
        kept.good = found[GOOD] > 0 and not found[BAD]
    return kept.status


def one(seed: int, folder: Path, model: str = DEFAULT) -> tuple[str, str, float]:
    """Run the server of a seed: the verdict, what happened, and the seconds it took."""
    armed = start(seed, True, folder, model)
    problem = trouble(armed, follows_tokens(draw(seed, model)), folder)
    if problem:
        return BAD, problem, armed.seconds
    if armed.completed:
        status = armed.result["status"]
        checks = sum(checked_of(counts(status)).values())
        same, told = replayed(folder)
        if not same:
            return BAD, f"Replayed: {told}", armed.seconds
        text = f"{armed.result['requests']} requests, {checks} checks, no finding."
        text += f" Replayed: {told}."
        if idle := ", ".join(r["name"] for r in status if r["off"]):
            text += f" Nothing to check here: {idle}."
        return GOOD, text, armed.seconds
    return *blame(armed, start(seed, False, folder, model)), armed.seconds


def start(seed: int, armed: bool, folder: Path, model: str) -> Outcome:
    # This is the script that runs what was never run: two backends together, for example.
    order = {"seed": seed, "model": model}
    return launch("suites.fuzz.variant", order, corrupt.ANYWHERE, armed, folder, TIMEOUT)


def follows_tokens(shape: Shape) -> bool:
    """True if spec-lifecycle has something to judge on this server."""
    return shape.speculates or (
        targets.counts_with_result() and not shape.engine.get("enable_mixed_chunk")
    )


def trouble(armed: Outcome, tokens: bool, folder: Path) -> str:
    """A failure that nothing can excuse: a finding, or a tracer that does not work; '' if none.

    tokens: spec-lifecycle has something to judge. The flight recorder's dumps accuse nobody: they
    tell how SGLang itself ended; but on a server that completes, nobody stands.
    """
    records = [reading.read(path) for path in sorted((folder / "dumps").glob("*.pt"))]
    findings = [r.finding for r in records if accuses(r.finding, armed.completed)]
    if findings:
        return f"A finding: {findings[0].headline}"
    failed = FAILED.search(armed.text)
    if failed is not None:
        return f"g4debug failed: {failed[0]}"
    if not armed.completed:
        return ""
    status, due = armed.result["status"], (*ALWAYS, *((TOKENS,) if tokens else ()))
    off = [f"{r['name']} ({r['off']})" for r in status if r["off"] and r["name"] in due]
    if off:
        return f"Off: {', '.join(off)}."
    checked = checked_of(counts(status))
    idle = [t for t in due if not checked.get(t)]
    return f"Checked nothing: {', '.join(idle)}." if idle else ""


def blame(armed: Outcome, bare: Outcome) -> tuple[str, str]:
    """Whether a server that does not complete ends in the same way without tracers."""
    if bare.completed:
        return BAD, f"{ending(armed)} Without tracers it completes."
    if (armed.status is None) != (bare.status is None) or errors(armed) != errors(bare):
        return BAD, f"{ending(armed)} Without tracers it ends otherwise: {ending(bare)}"
    return NOTHING, f"It is SGLang's own, and the same without tracers: {ending(bare)}"


def errors(run: Outcome) -> frozenset[str]:
    """The last lines of all tracebacks in its log, without what differs from run to run."""
    return frozenset(re.sub(r"\d+", "N", e) for e in _END.findall(run.text))


def ending(run: Outcome) -> str:
    """How a server ended that did not do all, in a sentence."""
    said = errors(run)
    died = f" Its errors: {'; '.join(e[:120] for e in sorted(said)[:3])}." if said else ""
    return not_completed(run) + died


if __name__ == "__main__":
    raise SystemExit(script(main))
