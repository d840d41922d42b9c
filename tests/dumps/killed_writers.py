"""Writers of a dump that stop at a known call to the system, so that they are killed right there.

``killed_writers.py FOLDER NAME HOW OLD`` forks one writer after the other. Each stops one step
later than the one before it, is killed by SIGKILL and leaves its directory, ``FOLDER/<number>``;
the last one comes to its end. Printed is, for each that was killed, where (``before fsync``) and
what it left under NAME and as a temporary file: none, empty, part, whole, old or new. HOW is
``atomic`` or ``created``, g4debug's own, or ``naive``, which writes in place; OLD is ``old`` if
there is a file of that name before. :func:`register` makes an SGLang scheduler stop in the same
way.
"""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("mkdir", "scandir", "open", "write", "fsync", "close", "link", "replace", "unlink")
PARTS = 4  # in which a file is written: the system may take less than it is offered


class Raw(io.RawIOBase):
    """A file that is written by ``os.write``, where its steps are seen."""

    def __init__(self, fd: int, part: int) -> None:
        self._fd, self._part = fd, part

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._fd, bytes(data[: self._part]))

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def announce(step: Callable[[str], None], part: int) -> None:
    """Call ``step`` before and after each call that writes, in this process from now on."""

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            step(f"before {name}")
            result = real(*args, **kwargs)
            step(f"after {name}")
            return result

        return call

    real_open = open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb":
            return real_open(file, mode, *args, **kwargs)
        if not isinstance(file, int):
            file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        return io.BufferedWriter(Raw(file, part))

    for name in CALLS:
        setattr(os, name, wrapped(name))
    io.open = builtins.open = opened


def atomic(data: bytes, folder: Path, name: str) -> None:
    from g4debug.dumps import writing

    writing.write(data, folder, name)


def created(data: bytes, folder: Path, name: str) -> None:
    """As write_dump does it, under a name that is known before."""
    from g4debug.dumps import writing

    writing._write(data, folder, name, writing._create)


def naive(data: bytes, folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / name, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def state(path: Path | None, old: bytes, new: bytes) -> str:
    if path is None or not path.exists():
        return "none"
    found = path.read_bytes()
    whole = "whole" if path.suffix == ".tmp" else "new"
    return {b"": "empty", old: "old", new: whole}.get(found, "part")


def killed_at(number: int, write: Callable[[], None], part: int) -> str:
    """Fork a writer, kill it at its step of that number; where that was, empty: it came through."""
    read, told = os.pipe()
    write_to_pipe = os.write
    pid = os.fork()
    if pid == 0:
        os.close(read)
        seen = 0

        def step(name: str) -> None:
            nonlocal seen
            seen += 1
            if seen > number:
                write_to_pipe(told, name.encode())
                while True:
                    signal.pause()

        announce(step, part)
        try:
            write()
        except BaseException as e:
            write_to_pipe(told, f"failed: {e!r}".encode())
        os._exit(0)
    os.close(told)
    where = os.read(read, 200).decode()  # nothing, if the writer ended
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    return where


def main() -> None:
    place, name, how, before = Path(sys.argv[1]), *sys.argv[2:]
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from sample_trap import sample_record

    from g4debug.dumps import writing

    def variant(letter: str) -> bytes:
        record = sample_record()
        rids = (letter * 32,) * 2_000
        return writing.encode(
            dataclasses.replace(record, steps=(dataclasses.replace(record.steps[0], rids=rids),))
        )

    old, new = variant("a"), variant("b")
    writer = {"atomic": atomic, "created": created, "naive": naive}[how]
    for number in range(1000):
        folder = place / str(number)
        if before == "old":
            writing.write(old, folder, name)
        where = killed_at(number, lambda f=folder: writer(new, f, name), len(new) // PARTS)
        if not where:
            assert (folder / name).read_bytes() == new
            return
        if where.startswith("failed"):
            sys.exit(where)
        strays = [p for p in folder.iterdir() if p.name != name] if folder.exists() else []
        assert len(strays) < 2, strays
        found = (state(folder / name, old, new), state(strays[0] if strays else None, old, new))
        print(json.dumps([where, *found]))


def register() -> None:
    """As an SGLang plugin: a scheduler that writes a dump stops at a step, and says who it is."""
    import multiprocessing
    import threading

    if multiprocessing.current_process().name == "MainProcess":
        return
    wanted, note = json.loads(os.environ["STOP_WRITER"])
    from g4debug.dumps import writing

    real = writing.write_dump

    def write(*args: Any, **kwargs: Any) -> Any:
        def step(name: str) -> None:
            # Other threads open and close files, too.
            if name == wanted and threading.current_thread().name == "g4debug-disk":
                Path(note + ".part").write_text(str(os.getpid()))
                os.rename(note + ".part", note)
                while True:
                    signal.pause()

        announce(step, 1 << 16)
        return real(*args, **kwargs)

    writing.write_dump = write


if __name__ == "__main__":
    main()
