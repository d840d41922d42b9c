"""Every fix: its state in the installed SGLang under this environment, and how to switch it.

The states are the ones that a server started now would say in its first line. SGLang's
source is read for them; it is not loaded, no CUDA context is made, nothing is changed.
Whether the hooks really are in place: g4debug doctor. Exit code 0, also where there is no
SGLang (the states are unknown then); 2 if such a server would refuse to start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from g4debug.cli._common import CliError, make_console
from g4debug.reporters.fixes import Row

NAME = "fixes"
HELP = "the fixes: which are applied here, why, and how to switch them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON list of objects")
    parser.add_argument("--width", type=int, help="columns (default: the terminal's, else 80)")
    parser.add_argument("--no-color", action="store_true", help="plain text (also: NO_COLOR=1)")


def run(args: argparse.Namespace) -> int:
    from g4debug.hooking import targets
    from g4debug.reporters import fixes

    found = rows(os.environ)
    version = targets.sglang_version()
    head = f"SGLang {version}" if version else "no SGLang here, so the states are unknown"
    if args.json:
        fixes.render_json(found, sys.stdout)
    else:
        fixes.render(found, head, make_console(width=args.width, color=not args.no_color))
    return 0


def rows(environ: Mapping[str, str]) -> list[Row]:
    """All fixes with their states. Raises CliError if a server with ``environ`` would not start."""
    from g4debug import discovery
    from g4debug.faults.base import recreated_bugs
    from g4debug.faults.grammar import parse
    from g4debug.fixes import base
    from g4debug.hooking import targets
    from g4debug.hooking.hooks import Hooks
    from g4debug.settings import Settings, SettingsError, fix_switch

    why = {}
    try:
        settings = Settings.from_environ(environ)
        if targets.sglang_version() is not None:
            recreated = recreated_bugs(parse(settings.faults))
            states = base.apply_all(Hooks(), settings.fixes, recreated, settings.forced_by)
            why = {s.fix.id: (s.state, s.why) for s in states}
    except SettingsError as e:
        raise CliError(f"a server would not start with this environment: {e}") from e
    found = []
    for name in discovery.names("fix"):
        fix: base.Fix = discovery.load("fix", name)
        state, reason = why.get(name, ("unknown", "no SGLang here"))
        switches = [fix_switch(name), *filter(None, [fix.switch])]
        found.append(Row(name, fix.title, state, reason, switches, fix.seed, fix.upstream))
    return found
