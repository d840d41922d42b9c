"""Tell the state of every fix and performance path here, and how to switch it.

G4DEBUG_FIXES=none|needed|all says which are wanted; the first lines say which
of the three is in force. needed, the default, is the fixes for crashes and
wrong results that this SGLang is known to have. all adds the performance paths
and swa-ratio. The switch of a single fix wins over it.

The states are those that a server in this environment would have if it were
started now. They are found by reading SGLang's source, which is not loaded,
and nothing is changed. Whether the hooks are really in place is what g4debug
doctor checks. The exit code is 0, also without SGLang (the states are then
unknown), and 2 if a server would not start with this environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from g4debug.cli import CliError, add_console_arguments, console_for
from g4debug.reporters.fixes import Row

NAME = "fixes"
HELP = "tell the state of every fix and performance path here"

REFUSED = "a server would not start with this environment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.hooking import targets
    from g4debug.reporters import fixes

    found = rows(os.environ)
    version = targets.sglang_version()
    head = [
        f"SGLang {version}" if version else "this Python has no SGLang, so the states are unknown",
        mode(os.environ),
    ]
    if args.json:
        fixes.render_json(found, sys.stdout)
    else:
        fixes.render(found, head, console_for(args))
    return 0


def mode(environ: Mapping[str, str]) -> str:
    """A line with the value of G4DEBUG_FIXES, and its meaning."""
    from g4debug.settings import Settings

    value = Settings.from_environ(environ).fixes
    given = "" if environ.get("G4DEBUG_FIXES", "").strip() else " (the default)"
    means = {
        "none": "only what is switched on one by one",
        "needed": "fixes that this SGLang needs; no paths",
        "all": "what this SGLang needs, performance paths, swa-ratio",
    }[value]
    return f"G4DEBUG_FIXES={value}{given}: {means}"


def rows(environ: Mapping[str, str]) -> list[Row]:
    """All fixes with their states. Raises CliError if a server would not start with ``environ``."""
    from g4debug import discovery
    from g4debug.faults.base import check, recreated_bugs
    from g4debug.faults.grammar import GrammarError, parse
    from g4debug.fixes import base
    from g4debug.hooking import targets
    from g4debug.hooking.hooks import Hooks
    from g4debug.settings import Settings, SettingsError, fix_switch

    why = {}
    try:
        settings = Settings.from_environ(environ)
        plan = parse(settings.faults)
        if targets.sglang_version() is not None:
            check(plan)
            recreated = recreated_bugs(plan)
            states = base.apply_all(
                Hooks(), settings.switches, recreated, settings.forced_by, settings.fixes
            )
            why = {s.fix.id: (s.state, s.why) for s in states}
    except SettingsError as e:
        raise CliError(f"{REFUSED}: {e}") from e
    except GrammarError as e:
        raise CliError(f"{REFUSED}: G4DEBUG_FAULTS: {e}") from e
    found = []
    for name in discovery.names("fix"):
        fix: base.Fix = discovery.load("fix", name)
        state, reason = why.get(name, ("unknown", "this Python has no SGLang"))
        switches = [fix_switch(name), *filter(None, [fix.switch])]
        row = Row(name, fix.title, state, reason, switches, fix.seed, fix.upstream, fix.purpose)
        found.append(row)
    return found
