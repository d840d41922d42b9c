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

SHOWN = 240  # characters of a log's line
BEFORE = 180  # of them in front of the address: an Xid's says there whose fault it is


def render(found: Sequence[Found], more: int, memory: MemoryMap, console: Console) -> None:
    """Print each address and what it is, and how old the map is. more: so many are left out."""
    for one in found:
        if one.text:
            hang(console, Text(clean(_excerpt(one)), "dim"), Text(f"{one.line}: ", "dim"))
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
    small = f"; {memory.left_out} small buffers or weights had no room" if memory.left_out else ""
    if memory.bare:
        n = len(memory.bare) // 2
        small += f"; of {n} place{'s' * (n != 1)} it knows only that PyTorch has memory there"
    if not memory.segments and memory.device != "cpu":
        small += "; it has not all of PyTorch's segments, so what it does not know may be in one"
    console.print(Text(f"{age}, of {len(memory.ranges)} buffers{small}.", "dim"))


def _excerpt(one: Found) -> str:
    """The part of the line in which the address is, with an ellipsis where it was cut."""
    if len(one.text) <= SHOWN:
        return one.text
    begin = max(0, min(one.at - BEFORE, len(one.text) - SHOWN))
    end = begin + SHOWN
    front, rear = "…" * (begin > 0), "…" * (end < len(one.text))
    return f"{front}{one.text[begin:end]}{rear}"
