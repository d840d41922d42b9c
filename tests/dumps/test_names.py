"""Names of dumps: each process has its own, and no dump ever replaces another one."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug.dumps import errors, heads, reading, writing
from g4debug.findings.record import TrapRecord

pytestmark = pytest.mark.once("writing a dump is g4debug's own code")

AT = datetime(2026, 6, 1, 3, 14, 15, tzinfo=UTC)
OLD = "g4debug-page-table-20260601T031415Z-4711-1.pt"


def record_at(**location: object) -> TrapRecord:
    record = sample_record()
    where = dataclasses.replace(record.finding.location, **location)
    return dataclasses.replace(record, finding=dataclasses.replace(record.finding, location=where))


def test_what_a_name_says() -> None:
    name = heads.dump_name("page-table", AT, "node-7.cluster", (1, 0, 2), 4711, 3, "0f3a9c51")
    assert name == "g4debug-page-table-20260601T031415Z-node-7-dp1-tp0-pp2-4711-3-0f3a9c51.pt"
    time = "2026-06-01T03:14:15.000+00:00"
    assert heads.from_name(name) == heads.Head(
        check="page-table", time=time, host="node-7", dp_rank=1, rank=0, pp_rank=2, pid=4711
    )
    short = heads.dump_name("pool-leak", AT, "h", (-1, 5, -1), 1, 1, "00000000")
    assert short == "g4debug-pool-leak-20260601T031415Z-h-tp5-1-1-00000000.pt"
    assert heads.from_name(short) == heads.Head(
        check="pool-leak", time=time, host="h", rank=5, pid=1
    )
    alone = heads.dump_name("pool-leak", AT, "9", (-1, -1, -1), 1, 1, "00000000")
    assert heads.from_name(alone) == heads.Head(check="pool-leak", time=time, host="9", pid=1)


def test_names_of_older_versions_and_other_files() -> None:
    time = "2026-06-01T03:14:15.000+00:00"
    assert heads.from_name(OLD) == heads.Head(check="page-table", time=time, pid=4711)
    for other in ("notes.pt", "x.pt", OLD.replace("0601", "0631"), OLD + "x", "g4debug-.pt", ""):
        assert heads.from_name(other) == heads.Head()


@pytest.mark.parametrize(
    ("host", "part"),
    [
        ("node7.example", "node7"),
        ("sglang-7d9f8b6c5d-" + "x" * 60 + "-x2v4q", "x" * 34 + "-x2v4q"),
        ("a/b\n\x1b[2J", "a_b_2J"),
        ("../etc", "host"),
        ("ü", "_"),
        ("", "host"),
        ("--", "host"),
    ],
)
def test_a_host_is_cleaned(host: str, part: str) -> None:
    assert heads.host_part(host) == part
    name = heads.dump_name("a", AT, host, (0, 0, 0), 1, 1, "0f3a9c51")
    assert len(name) < 143  # the shortest limit of a file system in use
    named = heads.from_name(name)
    assert named.host == part


def test_a_dump_that_is_written_says_who_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_at(dp_rank=1, rank=3, pp_rank=0)
    monkeypatch.setattr(writing.socket, "gethostname", lambda: "node7.example")
    path = writing.write_dump(record, writing.encode(record), tmp_path, 2)
    named = heads.from_name(path.name)
    assert (named.host, named.dp_rank, named.rank, named.pp_rank) == ("node7", 1, 3, 0)
    assert path.name.split("-")[-3:-1] == [str(os.getpid()), "2"]
    assert reading.read(path).finding == record.finding
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


TWIN = """
import os, secrets, sys
from datetime import UTC, datetime
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from sample_trap import sample_record
from g4debug.dumps import writing

os.getpid = lambda: 1
writing.socket.gethostname = lambda: "pod"
writing.now = lambda: datetime(2026, 6, 1, tzinfo=UTC)
if sys.argv[3] == "without-links":
    def link(*a, **k):
        raise PermissionError(1, "Operation not permitted")
    os.link = link
record = sample_record()
data = writing.encode(record)
draws = iter(sys.argv[2].split(","))
if sys.argv[2] != "real":
    secrets.token_hex = lambda n: next(draws)
print("ready", flush=True)
sys.stdin.readline()
for number in range(1, 9):
    print(writing.write_dump(record, data, Path(sys.argv[1]), 1), flush=True)
"""


@pytest.mark.parametrize("links", ["with-links", "without-links"])
@pytest.mark.parametrize("draws", ["real", "same"])
def test_two_containers_with_equal_pids_and_clocks_lose_no_dump(
    tmp_path: Path, links: str, draws: str
) -> None:
    """They start at once. With ``same`` even their random numbers are equal."""
    support = str(Path(__file__).parents[1] / "support")
    random = "real" if draws == "real" else ",".join(f"{n:08x}" for n in range(16))
    command = [sys.executable, "-c", TWIN, str(tmp_path / "volume"), random, links, support]
    pipe = subprocess.PIPE
    twins = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)
    ]
    for twin in twins:
        assert twin.stdout is not None
        assert twin.stdout.readline() == "ready\n"
    for twin in twins:
        assert twin.stdin is not None
        twin.stdin.write("go\n")
        twin.stdin.flush()
    said = []
    for twin in twins:
        out, err = twin.communicate(timeout=120)
        assert twin.returncode == 0, err
        said.append(out.split())
    written = list(itertools.chain(*said))
    assert len(set(written)) == len(written) == 16
    assert sorted(map(str, (tmp_path / "volume").iterdir())) == sorted(written)
    for path in written:
        assert reading.read(Path(path)).finding.check == "page-table"


def test_names_that_are_all_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing.secrets, "token_hex", lambda n: "0f3a9c51")
    monkeypatch.setattr(writing, "now", lambda: AT)
    data = writing.encode(sample_record())
    path = writing.write_dump(sample_record(), data, tmp_path, 1)
    with pytest.raises(errors.DumpError, match="16 names"):
        writing.write_dump(sample_record(), b"another", tmp_path, 1)
    assert path.read_bytes() == data
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network file system may do: the link is made, and the second try finds it."""
    link = os.link

    def twice(source: str, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    path = writing.write_dump(sample_record(), b"data", tmp_path, 1)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("links", [True, False])
def test_a_failure_leaves_no_name_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def fails(number: int) -> object:
        def call(*args: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "link", fails(errno.EIO if links else errno.EPERM))
    monkeypatch.setattr(os, "replace", fails(errno.ENOSPC))
    with pytest.raises(errors.DumpError, match="Input/output error" if links else "No space left"):
        writing.write_dump(sample_record(), b"data", tmp_path, 1)
    assert os.listdir(tmp_path) == []


EVIL = ["plain.pt", "two words.pt", "$(touch X).pt", "it's.pt", "-x.pt", "~.pt", "a  b.pt"]
EVIL += ["\x1b[31mred.pt", "new\nline.pt", "'\x07\\1.pt", "\u202ert.pt", "\udcff\udc80.pt"]


@pytest.mark.parametrize("name", EVIL)
def test_a_quoted_path_is_that_path_to_a_shell_and_harmless_to_a_terminal(
    tmp_path: Path, name: str
) -> None:
    text = heads.quoted(name)
    assert text.isprintable()
    command = b"printf %s " + text.encode()
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.removeprefix(b"./") == os.fsencode(name)
    assert not done.stdout.startswith(b"-")
    assert os.listdir(tmp_path) == []
