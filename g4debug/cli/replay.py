"""Let a dump's scheduler decide again, on this machine, without a GPU.

It starts SGLang's own scheduler of the dump's release on the CPU engine, gives it
what is on the dump's tape, and compares each step and the finding. The exit code
is 0 if it did the same and found the same, 1 if it did the same and found
something else or nothing, and 2 if that cannot be told. Ctrl-C ends it, and it
says what is known up to there; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from g4debug import discovery
from g4debug.cli import (
    CliError,
    add_console_arguments,
    at_least,
    make_console,
    present,
    report,
)

NAME = "replay"
HELP = "let a dump's scheduler decide again, on this machine"
NEEDS_SGLANG = True
SECONDS = 1800


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dump", type=Path, help="a dump with a tape")
    parser.add_argument(
        "--trace",
        metavar="NAMES",
        help="arm these tracers (default: those that were armed there, and where none of them "
        "made the finding, all)",
    )
    parser.add_argument(
        "--seconds",
        type=at_least(1),
        default=SECONDS,
        metavar="N",
        help=f"give up after so many seconds (default: {SECONDS}), or as soon as the replay takes "
        "three quarters of the memory that was free",
    )
    parser.add_argument(
        "--shrink",
        type=Path,
        metavar="FILE",
        help="look for the smallest workload with which the finding comes (fewest requests, "
        "shortest prompts and answers), for as many seconds again, and write the dump of that "
        "finding into this file",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="look for it as with --shrink, and write it into this file as plain SGLang, if the "
        "bug comes when that is run, for which it takes as many seconds again",
    )
    parser.add_argument(
        "--until",
        type=at_least(1),
        default=0,
        metavar="STEP",
        help="replay no further than to this step of the server",
    )
    parser.add_argument(
        "--pages-only",
        action="store_true",
        help="leave out what the model computes: some three times as fast",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="ID=0|1",
        help="replay it once more with this fix off or on, and tell whether the finding comes",
    )
    parser.add_argument(
        "--sglang",
        action="append",
        default=[],
        metavar="RELEASE",
        help="replay it once more on this release of SGLang, and tell the same; in a clone, its "
        "environment is made if there is none (some minutes, 2.6 GB)",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep log and dumps there")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the result as one HTML page, too"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.dumps import reading
    from g4debug.replay.run import replayed
    from g4debug.reporters import replay as reporter
    from g4debug.reporters import replay_html

    fixes = dict(map(_fix, args.fix))
    trace = () if args.trace is None else _tracers(args.trace)
    for release in args.sglang:
        _refuse_unknown(release)
    if args.until and (args.shrink or args.script or fixes or args.sglang):
        raise CliError(
            "--until leaves out what --shrink, --script, --fix and --sglang need: the rest"
        )
    outputs = [out for out in (args.html, args.shrink, args.script) if out is not None]
    for out in outputs:
        report.refuse_odd(out, args.dump)
    if len({out.resolve() for out in outputs}) < len(outputs):
        raise CliError("--html, --shrink and --script: expected a file for each of them")
    record = reading.read(args.dump)
    with tempfile.TemporaryDirectory(prefix="g4debug-replay-") as temporary:
        folder = Path(temporary) if args.keep is None else args.keep
        folder.mkdir(parents=True, exist_ok=True)
        with _progress() as progress:
            result = replayed(
                args.dump, record, trace, args.seconds, folder, progress, args.shrink,
                args.pages_only, fixes, args.sglang, args.script, args.until,
            )  # fmt: skip
    present(reporter, result, args)
    if args.html:
        report.write(replay_html.render(result, record, str(args.dump)), args.html, args.dump)
    return result.code


def _refuse_unknown(release: str) -> None:
    """Say it before the replay, which takes a while. Raises CliError."""
    from g4debug.replay import host
    from g4debug.replay.setting import CannotReplay

    try:
        host.python(release)
    except CannotReplay as e:
        if release not in host.makeable():
            raise CliError(f"--sglang {release}: {e}") from None


def _tracers(text: str) -> tuple[str, ...]:
    """The tracers of ``--trace``. Raises CliError, before SGLang starts, which takes a while."""
    known, asked = discovery.names("tracer"), discovery.named(text)
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        what = f"there is no tracer {', '.join(unknown)}" if unknown else "it names no tracer"
        raise CliError(f"--trace {text}: {what}; expected some of {', '.join(known)}")
    return asked


def _fix(text: str) -> tuple[str, bool]:
    """``locked-prefix=1`` as (its id, whether it is on)."""
    name, _, value = text.partition("=")
    if value not in ("0", "1") or name not in discovery.names("fix"):
        known = ", ".join(discovery.names("fix"))
        raise CliError(f"--fix {text}: expected ID=0 or ID=1, with one of {known}")
    return name, value == "1"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal. It is told of the steps that are done, and of all."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[at]}"),
        progress.TimeElapsedColumn(),
    )
    console = make_console(stream=sys.stderr)
    shown = sys.stderr.isatty()
    with progress.Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("starting SGLang", total=None, at="")

        def told(done: int, of: int) -> None:
            if done > 0:
                at = f"step {done} of {of}"
                bar.update(task, description="replaying", completed=done, total=of, at=at)
            elif done < 0:
                at = f"{-done} tries; {of} requests are enough"
                bar.update(task, description="shrinking", total=None, at=at)

        yield told
