"""The autopsy of a CUDA core dump, on a terminal. In a report it is a block of its own."""

from __future__ import annotations

from rich.console import Console

from g4debug.findings.record import Autopsy
from g4debug.reporters import _facts, terminal
from g4debug.reporters.text import cleaned, fit


def render(autopsy: Autopsy, console: Console) -> None:
    """Print the verdict, and what it was made of."""
    terminal.entries(cleaned([_facts.autopsy(autopsy)], fit)[0], console)
