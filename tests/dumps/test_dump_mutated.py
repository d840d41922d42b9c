"""Dumps that were flipped, cut, spliced or lied in: `show` gives an answer, and only that."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile_dumps import repack, saved
from sample_kinds import KINDS
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import writing
from g4debug.findings.record import TrapRecord

pytestmark = pytest.mark.once("reading a dump does not import SGLang")

PICKLE = "archive/data.pkl"
LIMIT = 120.0  # seconds for one dump; the slowest seen took 0.3, a busy machine is slow
DUMPS_PER_WAY = 300
NASTY = (-1, 0, 1 << 63, 1 << 2000, "", "\x1b[2J", "\u202e", "x" * 5000, True, None, [], {}, 1.5)


def recorded() -> TrapRecord:
    """The flight recorder's: every field of a step is set."""
    record = KINDS["crash"]()
    n = range(3)
    steps = tuple(
        dataclasses.replace(
            step,
            time_ns=1_780_000_000_000_000_000 + i * 30_000_000,
            waiting=i,
            rows=tuple(n),
            committed=tuple(100 + i for _ in n),
            allocated=tuple(128 for _ in n),
            evicted=tuple(0 for _ in n),
        )
        for i, step in enumerate(record.steps)
    )
    return dataclasses.replace(record, steps=steps)


@pytest.fixture(scope="module")
def samples() -> list[bytes]:
    """One real dump per kind of finding."""
    records = [sample_record(), recorded(), *(make() for make in KINDS.values())]
    return [writing.encode(r) for r in records]


def mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.randint(1, 64)]
            case 3:
                out[at:at] = out[(start := rng.randrange(len(out))) : start + rng.randint(1, 64)]
            case 4:
                del out[at:]
        if not out:
            break
    return bytes(out)


def scramble(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def splice(a: bytes, b: bytes, rng: random.Random) -> bytes:
    """The head of one and the tail of the other; now and then a piece in the middle."""
    x, y = rng.randrange(len(a)), rng.randrange(len(b))
    if rng.random() < 0.5:
        return a[:x] + b[y:]
    return a[:x] + b[y : y + rng.randint(1, 400)] + a[rng.randrange(x, len(a)) :]


def records_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {n: archive.read(n) for n in archive.namelist()}


def in_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """With right checksums, so that only the walk through the pickle can notice."""
    return repack(data, lambda r: r.update({PICKLE: change(r[PICKLE])}))


def in_tensors(data: bytes, rng: random.Random) -> bytes:
    name = rng.choice([n for n in records_of(data) if n.startswith("archive/data/")])
    return repack(data, lambda r: r.update({name: scramble(r[name], rng)}))


def exchanged(a: bytes, b: bytes, rng: random.Random) -> bytes:
    """Some records of the archive come from another dump."""
    theirs = records_of(b)
    names = rng.sample(sorted(theirs), rng.randint(1, len(theirs)))
    return repack(a, lambda r: r.update({n: theirs[n] for n in names}))


def lied(data: bytes, rng: random.Random) -> bytes:
    """A well-formed dump with some values that no g4debug would write."""
    import torch

    plain = torch.load(io.BytesIO(data), weights_only=True)
    for _ in range(rng.randint(1, 4)):
        place: Any = plain
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], (dict, list)) and rng.random() < 0.9:
                place = place[key]
                continue
            place[key] = rng.choice(NASTY)
            break
    return saved(plain)


Way = Callable[[bytes, bytes, random.Random], bytes]
WAYS: dict[str, Way] = {
    "file": lambda a, b, rng: mutate(a, rng),
    "pickle": lambda a, b, rng: in_pickle(a, lambda p: mutate(p, rng)),
    "tensors": lambda a, b, rng: in_tensors(a, rng),
    "spliced-file": splice,
    "spliced-pickle": lambda a, b, rng: in_pickle(
        a, lambda p: splice(p, records_of(b)[PICKLE], rng)
    ),
    "exchanged": exchanged,
    "lies": lambda a, b, rng: lied(a, rng),
}

_forbidden: list[str] | None = None
RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _forbidden is None:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if event in RUNS or event in WRITES or writes:
        _forbidden.append(f"{event} {arguments}")


sys.addaudithook(_audit)  # cannot be taken off again; idle while _forbidden is None


@contextmanager
def watched() -> Iterator[None]:
    """Fail if the body runs a program, writes, connects, or takes longer than LIMIT."""
    global _forbidden

    def too_long(*args: object) -> None:
        raise TimeoutError(f"took more than {LIMIT} s")

    old = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    _forbidden = []
    try:
        yield
        assert _forbidden == []
    finally:
        _forbidden = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_show_gives_an_answer(
    tmp_path: Path, samples: list[bytes], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(way)
    path = tmp_path / "x.pt"
    for sample in samples:  # Python may write the bytecode of what is imported for the first time
        path.write_bytes(sample)
        assert (
            cli.main(["show", str(path), "--all"]) == cli.main(["show", str(path), "--json"]) == 0
        )
    capsys.readouterr()
    opened = 0
    for number in range(DUMPS_PER_WAY):
        # The first has a page table, and so the tensors.
        sample = samples[0] if way == "tensors" else rng.choice(samples)
        path.write_bytes(WAYS[way](sample, rng.choice(samples), rng))
        more = [["--json"], ["--all"], []][number % 3]
        with watched():
            status = cli.main(["show", str(path), "--no-color", "--width", "80", *more])
        captured = capsys.readouterr()
        assert status in (0, 2)
        assert "Traceback" not in captured.out + captured.err
        assert "\x1b" not in captured.out + captured.err
        # Two lines at most: what is wrong, and what to do.
        assert len(captured.err.splitlines()) <= 2
        assert "cannot be rendered" not in captured.err  # would be a bug of a reporter
        opened += status == 0
        assert bool(captured.out) == (status == 0)
    if way == "tensors":
        assert opened == DUMPS_PER_WAY  # any number is a valid number
    if way == "spliced-file":
        assert opened < DUMPS_PER_WAY // 2


def test_the_watch_notices() -> None:
    with pytest.raises(AssertionError, match=r"os\.system"), watched():
        os.system("true")
    with pytest.raises(AssertionError, match="open"), watched():
        Path(os.devnull).write_text("")
    assert len(WAYS) * DUMPS_PER_WAY >= 1000
