"""List the faults that G4DEBUG_FAULTS can inject.

For each fault: what it does, its tasks and selectors, and the tracers that
must catch it. The list needs no SGLang. A process that was not started with
G4DEBUG_FAULTS has no faults.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from g4debug.cli import add_console_arguments, one_line, present

if TYPE_CHECKING:
    from g4debug.faults.base import Fault
    from g4debug.reporters.faults import Entry

NAME = "faults"
HELP = "list the faults that can be injected"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.reporters import faults

    present(faults, entries(), args)
    return 0


def entries() -> list[Entry]:
    """Every fault, by id. A fault whose file cannot be loaded is listed with the reason."""
    from g4debug import discovery
    from g4debug.reporters.faults import Entry

    found = []
    for name in discovery.names("fault"):
        try:
            fault: Fault = discovery.load("fault", name)
        except Exception as e:
            found.append(Entry(name, broken=f"{type(e).__name__}: {one_line(str(e))}"))
            continue
        tasks = {f"{t}(N)" if t in fault.arguments else t: text for t, text in fault.tasks.items()}
        found.append(
            Entry(
                id=fault.id,
                title=fault.title,
                tasks=tasks,
                selectors=fault.selectors,
                caught_by=fault.caught_by,
                recreates=fault.recreates,
                drills=fault.drills,
            )
        )
    return found
