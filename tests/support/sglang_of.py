"""An SGLang that has only the files that a probe is to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from g4debug.hooking import targets


@contextmanager
def sglang_of(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    """``folder`` with these files, looked at by targets and probes. files: path -> text."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with targets.looking_at(folder):
        yield folder
