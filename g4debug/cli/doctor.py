"""Would g4debug work here? Checks versions, plugin, environment, hook sites, fixes, dumps.

Loads SGLang and its plugins in a process of its own, as a server does, with every tracer
armed. It changes nothing, starts no server, and makes no CUDA context without --canary.
Exit code 1 if something that was asked for cannot be honoured, 0 if all can.
"""

from __future__ import annotations

import argparse
import os
import sys

from g4debug.cli._common import make_console

NAME = "doctor"
HELP = "would it work here? versions, plugin, hook sites, fixes, dump directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    parser.add_argument(
        "--canary",
        action=argparse.BooleanOptionalAction,
        help="fire a fault through each tracer and expect the finding and its dump "
        "(default: only without CUDA, as it takes GPU memory)",
    )
    parser.add_argument("--width", type=int, help="columns (default: the terminal's, else 80)")
    parser.add_argument("--no-color", action="store_true", help="plain text (also: NO_COLOR=1)")


def run(args: argparse.Namespace) -> int:
    from g4debug.cli._diagnose import diagnose
    from g4debug.reporters import doctor

    waiting = sys.stderr.isatty()
    if waiting:
        print("loading SGLang to look at its hook sites, about 10 s …", end="", file=sys.stderr)
        sys.stderr.flush()
    try:
        canary = {None: "auto", True: "1", False: "0"}[args.canary]
        diagnosis = diagnose(os.environ, canary)
    finally:
        if waiting:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    if args.json:
        doctor.render_json(diagnosis, sys.stdout)
    else:
        doctor.render(diagnosis, make_console(width=args.width, color=not args.no_color))
    return 1 if diagnosis.problems else 0
