"""What the addresses of a log are, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from g4debug.autopsy import logs
from g4debug.autopsy.logs import Found
from g4debug.findings.memory_map import MemoryMap
from g4debug.findings.names import clean
from g4debug.reporters.text import hang

SHOWN = 160  # characters of a log's line


def render(found: Sequence[Found], more: int, memory: MemoryMap, console: Console) -> None:
    """Print each address and what it is, and how old the map is. more: so many are left out."""
    for one in found:
        if one.text:
            hang(console, Text(clean(one.text[:SHOWN]), "dim"), Text(f"{one.line}: ", "dim"))
        says = f"{one.says}: " if one.says else ""
        hang(console, Text(f"{says}{clean(one.where)}"), Text(f"{one.address:#x}  ", "bold"))
        if one.doubt:
            hang(console, Text(clean(one.doubt), "yellow"), Text("doubt: ", "yellow"))
    if not found:
        console.print(Text("no address in it is known, and nobody complains about one", "yellow"))
    if more:
        least = "at least " if len(found) + more >= logs.COUNTED else ""
        way = "; --all tells them" if len(found) < logs.MOST else ""
        hang(console, Text(f"{least}{more:,} more addresses are left out{way}", "yellow"))
    age = (
        f"The map was made in step {memory.step}" if memory.step > 0 else "The map is of the start"
    )
    small = f"; {memory.left_out} small buffers had no room in it" if memory.left_out else ""
    console.print(Text(f"{age}, of {len(memory.ranges)} buffers{small}.", "dim"))
