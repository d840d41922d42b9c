"""One committed snapshot per reporter and width, plain text.

A change of a report is a change of its snapshot, seen in review. To accept it:

    UPDATE_SNAPSHOTS=1 pytest tests/reporters/test_report_snapshots.py; git diff tests
"""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import real_cores
from sample_kinds import KINDS
from sample_trap import FULL, SWA, sample_record, sample_steps, sample_table

from g4debug.autopsy import examine, logs
from g4debug.autopsy.core import Core
from g4debug.cli import make_console
from g4debug.dumps import heads
from g4debug.dumps.heads import Head, quoted
from g4debug.dumps.incidents import Dump, group
from g4debug.findings.record import PageEvent
from g4debug.reporters import _evidence, autopsy, json, listing, terminal, where
from g4debug.reporters._evidence import table_view

pytestmark = pytest.mark.once("a report is made without SGLang")

SNAPSHOTS = Path(__file__).parent / "snapshots"
SOURCE = "/tmp/g4debug/g4debug-page-table-20260601T031415Z-4711-1.pt"
LATER = (
    SOURCE.replace("031415Z", "031417Z").replace("4711", "99").replace("page-table", "pool-leak")
)


def dump(path: str, time: str, size: int, broken: str = "", **head: object) -> Dump:
    where = {"host": "node7", "rank": 0, "pid": 4711, "step": 118, "launch": "auto-1"}
    known = Head(**{"check": "page-table", "headline": HEADLINE, **where, **head})
    return Dump(Path(path), size, time, Head() if broken else known, broken)


HEADLINE = sample_record().finding.headline
INCIDENTS = group(
    [
        dump(SOURCE, "2026-06-01T03:14:15.120+00:00", 6963),
        dump(
            LATER,
            "2026-06-01T03:14:17.500+00:00",
            9999,
            check="pool-leak",
            headline=KINDS["leak"]().finding.headline,
            host="node8",
            rank=1,
            pid=99,
        ),
        dump(
            "/tmp/g4debug/half.pt",
            "2026-05-31T23:59:59.000+00:00",
            1234567,
            broken="truncated or damaged: its zip directory is missing",
        ),
        dump("/tmp/g4debug/\x1b[2J $(touch X).pt", "2026-05-30T00:00:00.000+00:00", 9, launch="b"),
    ]
)


class AsciiStream(io.StringIO):
    encoding = "ascii"


def text(render: Callable[..., None], width: int, stream: io.StringIO | None = None) -> str:
    stream = io.StringIO() if stream is None else stream
    console = make_console(width=width, color=False, stream=stream)
    render(console)
    return stream.getvalue()


def compare(name: str, got: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8"), f"{name} changed; see this file's docstring"


def fits(got: str, width: int) -> None:
    assert "\x1b" not in got
    for line in got.splitlines():
        assert len(line) <= width or line.startswith("NEXT"), line
        assert line == line.rstrip()


@pytest.mark.parametrize("width", [80, 120])
def test_terminal(width: int) -> None:
    got = text(lambda c: terminal.render(sample_record(), c, source=SOURCE), width)
    fits(got, width)
    compare(f"terminal-{width}.txt", got)


def test_terminal_ascii() -> None:
    stream = AsciiStream()
    got = text(lambda c: terminal.render(sample_record(), c, source=SOURCE), 80, stream)
    assert got.isascii()
    assert ">57<" in got
    compare("terminal-ascii-80.txt", got)


def test_terminal_with_little_known() -> None:
    """A dump made after the device died: no table, no steps, no pools."""
    record = sample_record()
    finding = dataclasses.replace(
        record.finding,
        location=dataclasses.replace(
            record.finding.location, row=-1, column=-1, request="", layer=-1, layer_kind=""
        ),
        owner="",
        history=(),
        cause="",
        reference="",
        next_command="",
    )
    bare = dataclasses.replace(
        record, finding=finding, table=None, steps=(), pools=(), fixes={}, tracers=(), geometry={},
        faults=("page-oob@step=118",),
    )  # fmt: skip
    got = text(lambda c: terminal.render(bare, c, source=SOURCE), 80)
    fits(got, 80)
    compare("terminal-bare-80.txt", got)


@pytest.mark.parametrize("kind", KINDS)
def test_terminal_of_each_kind(kind: str) -> None:
    for width in (80, 120):
        got = text(lambda c, w=width: terminal.render(KINDS[kind](), c, source=SOURCE), width)
        fits(got, width)
        compare(f"kind-{kind}-{width}.txt", got)
    plain = text(lambda c: terminal.render(KINDS[kind](), c, everything=True), 80, AsciiStream())
    assert plain.isascii()
    fits(plain, 80)
    assert "--all" not in plain


def big_table() -> object:
    """256 rows x 2048 columns, two bad cells far apart, huge and negative."""
    table = sample_table()
    generator = torch.Generator().manual_seed(1)  # the snapshots have its numbers
    values = torch.randint(1, 36, (256, 2048), generator=generator).numpy()
    lengths = torch.randint(1, 2048 * 64, (256,), generator=generator).numpy()
    lengths[130] = 2048 * 64
    values[130, 2000] = 1 << 40
    values[7, 0] = -3
    return dataclasses.replace(
        table,
        values=values,
        seq_lens=lengths,
        first_live=np.zeros(256, dtype=np.int64),
        bad=np.array([[130, 2000, 1 << 40]]),
        window=-1,
        rows_total=256,
        columns_total=2048,
        rids=(),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_page_map_of_a_large_table(width: int) -> None:
    table = big_table()
    got = text(lambda c: terminal.page_map(table_view(table, 130, 2000, (FULL, SWA)), c), width)
    fits(got, width)
    assert len(got.splitlines()) < 30
    compare(f"page-map-large-{width}.txt", got)


@pytest.mark.parametrize("width", [80, 120])
def test_steps(width: int) -> None:
    got = text(
        lambda c: terminal.history(_evidence.step_grid(sample_steps(), (FULL, SWA), at=118), c),
        width,
    )
    fits(got, width)
    compare(f"steps-all-{width}.txt", got)


@pytest.mark.parametrize("width", [80, 120])
def test_listing(width: int) -> None:
    got = text(lambda c: listing.render(INCIDENTS, c), width)
    assert "\x1b" not in got
    for incident in INCIDENTS:
        for one in incident.dumps:  # whole, so that it can be copied
            assert f"  {quoted(one.path.name)}\n" in got
    names = [quoted(d.path.name) for i in INCIDENTS for d in i.dumps]
    lines = [x for x in got.splitlines() if x.strip() not in names and "show: " not in x]
    assert all(len(line) <= width for line in lines)
    compare(f"listing-{width}.txt", got)


def test_listing_of_each_kind() -> None:
    checks = []
    for make in KINDS.values():
        finding = make().finding
        one = dump(SOURCE, "2026-06-01T03:14:15.000+00:00", 9999, check=finding.check)
        one = dataclasses.replace(one, head=heads.of(make()))
        got = text(lambda c, one=one: listing.render(group([one]), c), 80)
        checks.append(got)
        assert finding.check in got.splitlines()[0]
    compare("listing-kinds-80.txt", "".join(checks))


@pytest.mark.parametrize("width", [80, 120])
def test_autopsy(width: int) -> None:
    name = "decode-larger-pool"
    event = PageEvent(6, "alloc", "full", (384,), 1, "request-5", "schedule_batch.py:27 alloc")
    record = real_cores.record(name, allocator=(event,))
    core = Core(memoryview(real_cores.core(name)))
    found = examine.of_core(core, "core.nvcudmp", record)
    got = text(lambda c: autopsy.render(found, c), width)
    fits(got, width)
    compare(f"autopsy-{width}.txt", got)


def test_where() -> None:
    memory = real_cores.memory("decode-larger-pool")
    kv = next(r for r in memory.kv if (r.pool, r.layer, r.part) == ("swa", 2, "K"))
    log = [
        "NVRM: Xid (PCI:0000:01:00): 31, pid=7, MMU Fault: ENGINE GRAPHICS faulted @ "
        f"0x{kv.end >> 32:x}_{kv.end & 0xFFFFFFFF:08x}. Fault is of type FAULT_PDE\n",
        f"copy to 0x{kv.start + 5 * kv.page_bytes:x}\n",
    ]
    got = text(lambda c: where.render(*logs.addresses(log, memory), memory, c), 80)
    fits(got, 80)
    compare("where-80.txt", got)


def test_listing_json() -> None:
    stream = io.StringIO()
    listing.render_json(INCIDENTS, stream)
    compare("listing.json", stream.getvalue())


def test_json() -> None:
    stream = io.StringIO()
    json.render(sample_record(), stream)
    compare("record.json", stream.getvalue())
