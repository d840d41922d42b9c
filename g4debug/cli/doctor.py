"""Tell whether g4debug would work in this environment.

It checks the versions, the plugin, the variables, the dump directory, the hook
sites and the fixes. For that it loads SGLang and its plugins in a process of
its own, as a server does, with every tracer armed. It changes nothing and
starts no server. Without --canary it makes no CUDA context. The exit code is 0
if all that the environment asks for can be done, and 1 if not. Without SGLang it
is 1, and doctor says which commands work all the same. What is as it should be is
counted; --all shows each site, fix and model.

With --pid it asks a running server instead: its model, attention backends and
draft, what each tracer of each of its schedulers judges now, which parts are limited
or off and why, how much was checked so far, and which requests have made no progress
for 3 seconds, and why. PID is the server, anything that started it, or one scheduler.
It must be on the same machine and belong to you, unless you are root. The exit code
is 0 if every tracer that is armed works without a limit, or has nothing to judge on
this server, and 1 if one is limited or off, its hooks do not run, the event loop is
stuck, or turns and serves nobody, or no scheduler shows a status. It is 2 if there is
no such process.

With --pid and --tape FILE it makes the scheduler write a dump without a finding,
whose tape can be replayed, and moves it to FILE. With --pid and --request RID it
shows that request's way by such a dump, as g4debug trace does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from g4debug.cli import CliError, add_console_arguments, console_for, present, program

NAME = "doctor"
HELP = "tell whether g4debug would work here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--all", action="store_true", help="show every hook site, fix, tracer, backend and model"
    )
    parser.add_argument("--pid", type=int, help="ask the running server with this process number")
    parser.add_argument(
        "--tape",
        type=Path,
        metavar="FILE",
        help="with --pid: write the scheduler's tape into this file, a dump without a finding",
    )
    parser.add_argument(
        "--request",
        metavar="RID",
        help="with --pid: follow one request from its arrival on; the beginning of its id will do",
    )
    parser.add_argument(
        "--canary",
        action=argparse.BooleanOptionalAction,
        help="also fire a fault through each tracer and expect the finding and its dump "
        "(default: only where there is no CUDA, because it takes GPU memory)",
    )
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.pid is not None:
        return _running(args)
    for option in ("tape", "request"):
        if getattr(args, option) is not None:
            raise CliError(f"--{option} is of a running server: say which by --pid")
    from g4debug.cli._diagnose import diagnose
    from g4debug.reporters import doctor

    waiting = sys.stderr is not None and sys.stderr.isatty()
    if waiting:
        print("loading SGLang to check its hook sites takes about 10 s …", end="", file=sys.stderr)
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
        more = f"{program()} doctor --all"
        doctor.render(diagnosis, console_for(args), everything=args.all, again=more)
    return 0 if diagnosis.ready else 1


def _running(args: argparse.Namespace) -> int:
    from g4debug.cli._running import look
    from g4debug.reporters import running

    if args.all:
        raise CliError("--all does not go with --pid, which shows all that the server tells")
    if args.canary is not None:
        raise CliError("--canary does not go with --pid: it would run here, not in that server")
    if not os.path.isdir(f"/proc/{args.pid}"):
        raise CliError(f"there is no process {args.pid} on this machine, or there is no /proc")
    if args.tape is not None:
        from g4debug.cli._tape import fetch

        print(fetch(args.pid, args.tape))
        return 0
    if args.request is not None:
        from g4debug.cli._request import follow

        follow(args.pid, args.request, args)
        return 0
    server = look(args.pid)
    present(running, server, args)
    return 0 if server.sound else 1
