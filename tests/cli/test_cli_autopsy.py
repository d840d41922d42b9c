"""``g4debug autopsy`` and ``where``: what they print, what they write, how they refuse."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import lzma
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import real_cores
from sample_trap import sample_record

from g4debug import cli
from g4debug.autopsy import examine, logs
from g4debug.cli import autopsy, where
from g4debug.dumps import writing
from g4debug.dumps.reading import read
from g4debug.findings.record import SCHEMA, Lookup
from g4debug.reporters import html
from g4debug.tracers.flight_recorder import lookups, report

pytestmark = pytest.mark.once("commands do not import SGLang")
NAME = "decode-uninitialised"
BAD = real_cores.truth(NAME)["expected_k"]
VERDICT = "page 33554431 of K, layer 3 (the SWA pool has pages 0 to 372)"
LAST = max(real_cores.memory(NAME).kv, key=lambda r: r.start)
NEAR = LAST.end + 200 * LAST.page_bytes + 5  # behind the last buffer and its segment
BEHIND = f"behind {LAST}: page {LAST.pages + 200}, token 0, where it has pages 0 to"
DMESG = (
    "[12.5] NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python3, channel 0x00000008, intr 0. MMU "
    "Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_0 faulted @ 0x{high:x}_{low:08x}. Fault is of type "
    "FAULT_PDE ACCESS_TYPE_VIRT_READ"
)
SANITIZER = """========= Invalid __global__ read of size 2 bytes
=========     at gather+0x210 in oob.py:10
=========     {1} 0x{0:x} is {2}
"""
FORMS = [("Address", "out of bounds"), ("Access at", "out of bounds"), ("Access to", "misaligned")]


@pytest.fixture
def core(tmp_path: Path) -> Path:
    path = tmp_path / "core.nvcudmp"
    path.write_bytes(real_cores.core(NAME))
    return path


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    record = dataclasses.replace(sample_record(), memory=real_cores.memory(NAME))
    return writing.write(writing.encode(record), tmp_path, "g4debug-x.pt")


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main([*map(str, arguments)]) == code
    out = capsys.readouterr()
    return " ".join((out.err if code else out.out).split())


def test_it_names_the_page(core, dump, capsys):
    text = run(capsys, "autopsy", core, dump)
    assert text.startswith(f"AUTOPSY {VERDICT}")
    assert "_fwd_grouped_kernel_stage1 at decode_attention.py:357" in text
    assert "CUDA_EXCEPTION_14: warp illegal address" in text
    assert (text.count("_fwd_grouped"), text.count(f"{BAD:#x}")) == (1, 1)
    assert "block (7, 0, 1) of a grid of (8, 2, 2)" in text
    said = "64 of the 64 lanes that faulted hold an address in that page in registers R24 and R25"
    assert said in text


def test_without_a_dump_it_says_what_is_missing(core, capsys):
    text = run(capsys, "autopsy", core)
    assert "which address faulted cannot be told without the memory map" in text
    verdict, _, rest = text.partition("HOW SURE")
    assert "0x" not in verdict
    assert "page" not in verdict
    assert "no dump was given" in rest
    assert f"64 lanes that faulted hold {BAD:#x}, or an address less than 2 MiB from it" in rest
    assert "it may be another address that faulted" in rest
    found = json.loads(run(capsys, "autopsy", core, "--json"))
    assert (found["address"], found["agree"]) == (-1, -1)


def test_json_has_the_same(core, dump, capsys):
    found = json.loads(run(capsys, "autopsy", core, dump, "--json"))
    assert (found["pool"], found["layer"], found["part"], found["page"]) == (
        "swa",
        3,
        "K",
        33554431,
    )
    assert found["address"] == BAD


def test_it_writes_into_the_dump_and_the_reports_print_it(core, dump, capsys):
    before = read(dump)
    run(capsys, "autopsy", core, dump, "--write")
    after = read(dump)
    assert after.autopsy is not None
    assert dataclasses.replace(after, autopsy=None, table=before.table) == before
    assert after.schema == SCHEMA
    assert VERDICT in run(capsys, "show", dump)
    assert VERDICT in " ".join(html.render(after).split())
    assert json.loads(run(capsys, "show", dump, "--json"))["autopsy"]["page"] == 33554431


def test_an_assertion_that_the_error_did_not_name_is_told(tmp_path, capsys):
    """The driver called it an "unspecified launch failure" on a H100, the core dump does not."""
    core = tmp_path / "core.nvcudmp"
    core.write_bytes(real_cores.core("embedding"))
    sample = sample_record()
    error = RuntimeError("CUDA error: unspecified launch failure")
    words = "g4debug: flight-recorder in the event loop: RuntimeError: CUDA error: unspecified"
    assert report.is_cuda(error)
    assert report.is_vague(error)
    died = dataclasses.replace(
        sample.finding, check="flight-recorder", kind="cuda-error", headline=words, cause="innocent"
    )
    look = Lookup(
        "the draft's embedding", "gemma4_mtp.py", "token ids", low=0, high=262_208, rows=131_072
    )
    (judged,) = lookups.judge([look], ())
    record = dataclasses.replace(sample, finding=died, lookups=(judged,))
    dump = writing.write(writing.encode(record), tmp_path, "g4debug-y.pt")
    run(capsys, "autopsy", core, dump, "--write")
    after = read(dump)
    assert after.finding.kind == "device-assert"
    assert after.finding.headline == (
        "g4debug: flight-recorder in the event loop: an assertion failed in a kernel (device-side "
        "assert)"
    )
    assert "the CUDA core dump did" in after.finding.got
    assert "the draft's embedding" in after.finding.cause
    assert after.finding.cause.endswith("innocent")
    assert after.lookups == (judged,)
    assert "an assertion in the kernel failed" in run(capsys, "show", dump)


def test_the_lookups_go_if_it_was_no_assertion(core, tmp_path, capsys):
    sample = sample_record()
    died = dataclasses.replace(sample.finding, check="flight-recorder", kind="cuda-error")
    (judged,) = lookups.judge([Lookup("an embedding", "gemma4_mtp.py", "token ids")], ())
    record = dataclasses.replace(
        sample, finding=died, lookups=(judged,), memory=real_cores.memory(NAME)
    )
    dump = writing.write(writing.encode(record), tmp_path, "g4debug-y.pt")
    run(capsys, "autopsy", core, dump, "--write")
    assert read(dump).finding.kind == "cuda-error"
    assert read(dump).lookups == ()


def test_a_core_that_is_none_is_refused_in_one_line(core, dump, capsys):
    core.write_bytes(b"\x7fELF\x02\x01 no")
    assert run(capsys, "autopsy", core, dump, code=2).startswith(f"g4debug: {core}: it is not")
    assert "No such file" in run(capsys, "autopsy", core.with_name("no"), code=2)
    core.write_bytes(b"")
    assert "it is empty" in run(capsys, "autopsy", core, code=2)
    assert "--write needs the DUMP" in run(capsys, "autopsy", core, "--write", code=2)


def test_a_fifo_is_refused_at_once(core, dump, capsys):
    """Nobody writes to it. The test hangs where it is opened as a file is."""
    fifo = core.with_name("fifo")
    os.mkfifo(fifo)
    begin = time.monotonic()
    text = run(capsys, "autopsy", fifo, dump, code=2)
    assert text.startswith(f"g4debug: {fifo}: it is not a regular file")
    assert "Is a directory" in run(capsys, "autopsy", core.parent, dump, code=2)
    assert time.monotonic() - begin < 60


def turns(*args):
    end = time.process_time() + 60
    while time.process_time() < end:
        pass


def grows(*args):
    kept = [mmap.mmap(-1, 1 << 30) for _ in range(8)]  # reserved, but never touched
    assert not kept


def test_its_time_and_its_memory_are_bounded(core, dump, capsys, monkeypatch):
    limits = {what: resource.getrlimit(what) for what in (resource.RLIMIT_CPU, resource.RLIMIT_AS)}

    monkeypatch.setattr(autopsy, "SECONDS", 1)
    monkeypatch.setattr(examine, "examine", turns)
    text = run(capsys, "autopsy", core, dump, code=2)
    assert f"{core}: reading it took more than 1 s of processor time" in text
    monkeypatch.setattr(autopsy, "SECONDS", 60)
    monkeypatch.setattr(examine, "examine", grows)
    assert "Cannot allocate memory" in run(capsys, "autopsy", core, dump, code=2)
    assert {what: resource.getrlimit(what) for what in limits} == limits
    assert signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL


def test_an_address_is_translated(dump, capsys):
    assert BEHIND in run(capsys, "where", f"{NEAR:#x}", dump)
    buffer = next(r for r in real_cores.memory(NAME).kv if str(r) == "K of layer 0 (swa pool)")
    inside = buffer.start + 5 * buffer.page_bytes + 3 * 1024
    text = run(capsys, "where", f"{inside:x}", dump)
    assert "page 5 of K of layer 0 (swa pool), token 3" in text


def test_what_the_map_had_no_room_for_is_said(tmp_path, capsys):
    record = dataclasses.replace(sample_record(), memory=real_cores.memory(NAME))
    far = LAST.end + (1 << 44)
    for more, words in (
        ({}, ()),
        ({"left_out": 9}, ("9 small buffers or weights had no room",)),
        ({"bare": (far, far + 100)}, ("of 1 place it knows only that PyTorch has memory there",)),
        ({"segments": False}, ("it has not all of PyTorch's segments",)),
    ):
        known = dataclasses.replace(record, memory=dataclasses.replace(record.memory, **more))
        dump = writing.write(writing.encode(known), tmp_path, "g4debug-z.pt")
        text = run(capsys, "where", f"{far:#x}", dump)
        if "bare" in more:
            assert "in PyTorch's memory: a segment of 100 bytes with what had no room" in text
        elif "segments" in more:
            assert "in no buffer of the map" in text
            assert "segment" not in text.partition("The map is of the start")[0]
        else:
            assert "in no buffer and no segment of the map" in text
        said = text.partition("The map is of the start")[2]
        assert all(word in said for word in words)
        assert ("room" in said or "PyTorch" in said) == bool(words)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "140445222404096",
            "it may be hex or decimal; give 0x140445222404096 if it is hex, and 0x7fbbf3978000 if",
        ),
        ("12", "no log has this name, and 0x12 is below all buffers of the dump, of which the"),
        ("dead", "no log has this name, and 0xdead is below all buffers"),
        ("0x10", "0x10 is below all buffers of the dump"),
        ("0x12345678901234567890", "read as hex it has 77 bits, and an address has at most 57"),
        ("12345678901234567890", "if it is decimal, give it as hex: printf '%#x' NUMBER"),
        ("9" * 5000, "read as hex it has 20000 bits"),
    ],
)
def test_what_can_be_no_address_or_one_of_two_is_refused_in_one_sentence(dump, capsys, text, why):
    assert why in run(capsys, "where", text, dump, code=2)


def test_digits_alone_are_hex_where_they_cannot_be_a_decimal_address(dump, capsys):
    assert "0x302000000 in no buffer" in run(capsys, "where", "302000000", dump)
    assert "0x706015400000 in no buffer" in run(capsys, "where", "7060_15400000", dump)


def test_a_file_is_a_log_though_its_name_is_a_number(dump, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dead").write_text(f"fault 0x{NEAR:x}")
    assert BEHIND in run(capsys, "where", "dead", dump)


def test_of_a_long_line_the_part_with_the_address_is_shown(dump, tmp_path, capsys):
    log = tmp_path / "log"
    for front, rear in (
        ("a" * 1500, "b" * 1500),
        ("", "b" * 1500),
        ("  " * 90, ""),
        ("a" * 90, ""),
    ):
        log.write_text(f"{front} fault @ 0x{NEAR:x} {rear}")
        text = run(capsys, "where", log, dump, "--width", "1000")
        line = text.partition(f"{NEAR:#x} a complaint")[0].removeprefix("1: ").strip()
        assert f"fault @ 0x{NEAR:x}" in line
        assert len(line) <= 242
        assert line.startswith("…") == (len(front) == 1500)
        assert line.endswith("…") == bool(rear)


def test_the_time_and_the_memory_of_a_log_are_bounded(dump, tmp_path, capsys, monkeypatch):
    (log := tmp_path / "log").write_text("x")

    monkeypatch.setattr(where, "SECONDS", 1)
    monkeypatch.setattr(logs, "addresses", turns)
    text = run(capsys, "where", log, dump, code=2)
    assert f"{log}: looking for its addresses took more than 1 s of processor time" in text
    monkeypatch.setattr(where, "SECONDS", 60)
    monkeypatch.setattr(logs, "addresses", grows)
    assert "Cannot allocate memory" in run(capsys, "where", log, dump, code=2)
    assert signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL


def test_a_long_log_says_how_far_it_is(dump, tmp_path, capsys, monkeypatch):
    (log := tmp_path / "log").write_text("nothing\n" * 3)
    assert cli.main(["where", str(log), str(dump)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(where, "TOLD", 0.0)
    assert cli.main(["where", str(log), str(dump)]) == 0
    assert capsys.readouterr().err == f"g4debug: {log}: 0 MiB are read\n" * 3


def test_a_fifo_is_a_log_if_somebody_writes_to_it(dump, tmp_path, capsys):
    os.mkfifo(fifo := tmp_path / "fifo")
    begin = time.monotonic()
    assert "a FIFO that nobody writes to" in run(capsys, "where", fifo, dump, code=2)
    command = f"{sys.executable} -c 'import time; time.sleep(1); print(\"fault 0x{NEAR:x}\")'"
    reader = f"{sys.executable} -m g4debug where <({command}) {dump}"
    done = subprocess.run(["bash", "-c", reader], capture_output=True, text=True, timeout=120)
    assert BEHIND in " ".join(done.stdout.split())
    assert time.monotonic() - begin < 120


@pytest.mark.parametrize(
    ("line", "says", "what"),
    [
        (DMESG.format(high=0, low=0), "0x0 Xid in dmesg", "a pointer that was not set doubt"),
        (DMESG.format(high=0, low=4096), "0x1000 Xid in dmesg", "an offset of 4.0 KiB"),
        *((SANITIZER.format(16, *form), "0x10 compute-san", "of 16 bytes") for form in FORMS),
        ("Illegal access to address (@global)0x0 detected.", "0x0 cuda-gdb", "was not set The map"),
        (SANITIZER.format(2**64 - 2**39, *FORMS[0]), "0xffffff8000000000 c", "has at most 57"),
    ],
)
def test_what_a_tool_complains_about_is_told_though_it_is_no_address(
    dump, tmp_path, capsys, line, says, what
):
    (log := tmp_path / "log").write_text(line)
    text = run(capsys, "where", log, dump)
    assert says in text
    assert what in text
    assert "no buffer: " in text


def test_small_numbers_of_other_lines_are_none(dump, tmp_path, capsys):
    (log := tmp_path / "log").write_text(
        "[1.0] NVRM: Xid (PCI:0000:01:00): 63, pid=7, Row Remapper: address bad, addr 0x10\n"
        "illegal PC 0x00000010, flags 0x00000000 fault\nMMU fault at address be\n"
    )
    assert "nobody complains about one" in run(capsys, "where", log, dump)


def test_a_coloured_address_is_read(dump, tmp_path, capsys):
    """As cuda-gdb writes it on a terminal that somebody has recorded."""
    log, coloured = tmp_path / "log", f"\x1b[34m0x{NEAR:x}\x1b[m"
    for line, says in (
        (f"Illegal access to address (@global){coloured} detected.", "cuda-gdb"),
        (f"fault at {coloured}", "a complaint"),
    ):
        log.write_text(line)
        text = run(capsys, "where", log, dump)
        assert f"{NEAR:#x} {says}: " in text
        assert BEHIND in text


def test_a_packed_log_is_read_or_refused(dump, tmp_path, capsys):
    """logrotate leaves kern.log.2.gz."""
    line = DMESG.format(high=NEAR >> 32, low=NEAR & 0xFFFF_FFFF).encode()
    log = tmp_path / "log"
    for packed in (gzip.compress(line), line.decode().encode("utf-16")):
        log.write_bytes(packed)
        assert BEHIND in run(capsys, "where", log, dump)
    log.write_bytes(gzip.compress(line)[:60])
    assert "its gzip is damaged" in run(capsys, "where", log, dump, code=2)
    log.write_bytes(lzma.compress(line))
    assert "xzcat LOG | g4debug where - DUMP" in run(capsys, "where", log, dump, code=2)
    log.write_bytes(gzip.compress(b"0" * (where.MOST + 1)))
    assert "more than 256 MiB" in run(capsys, "where", log, dump, code=2)


def test_a_whole_log_is_read(dump, tmp_path, capsys):
    sanitizer = SANITIZER.format(NEAR + 64, *FORMS[0])
    log = tmp_path / "log"
    xid = DMESG.format(high=NEAR >> 32, low=NEAR & 0xFFFF_FFFF)
    log.write_text("\n".join([xid, "nothing 0x1234567812 here", sanitizer]))
    text = run(capsys, "where", log, dump)
    assert text.count(BEHIND) == 2
    assert "Xid in dmesg" in text
    assert "compute-sanitizer" in text
    assert "0x1234567812 " not in text
    told = json.loads(run(capsys, "where", log, dump, "--json"))
    assert (len(told["found"]), told["left_out"]) == (2, 0)


def xid(dump, tmp_path, capsys, address: int, who: str) -> str:
    """What is told of an Xid with that address and process; the dump is of process 4711."""
    line = DMESG.format(high=address >> 32, low=address & 0xFFFF_FFFF)
    (tmp_path / "xid").write_text(line.replace("pid=77, name=python3", who))
    return run(capsys, "where", tmp_path / "xid", dump)


@pytest.mark.parametrize(
    ("who", "doubt"),
    [
        ("pid=4711, name=sglang::schedul", ""),
        ("pid=4242, name=other_process", "the Xid is of process 4242 (other_process), the dump of"),
        ("pid=4242", "the Xid is of process 4242, the dump of process 4711"),
        ("pid='<unknown>', name=<unknown>", "the Xid does not say whose fault it is"),
        ("pid=99999999999999999999, name=x", "the Xid does not say whose fault it is"),
        ("channel 8", "the Xid does not say whose fault it is"),
    ],
)
def test_an_xid_of_another_process_is_doubted_and_told(dump, tmp_path, capsys, who, doubt):
    text = xid(dump, tmp_path, capsys, NEAR, who)
    assert BEHIND in text
    assert ("doubt: " in text) == bool(doubt)
    assert doubt in text


def test_two_processes_with_one_address_are_both_told(dump, tmp_path, capsys):
    """Ranks have the same addresses. Their lines are told once each, and those of nobody never."""
    log, line = tmp_path / "log", DMESG.format(high=NEAR >> 32, low=NEAR & 0xFFFF_FFFF)
    ours = line.replace("pid=77", "pid=4711")
    log.write_text("\n".join([line, ours, line, ours, f"fault 0x{NEAR:x}"]))
    found = json.loads(run(capsys, "where", log, dump, "--json"))["found"]
    assert [(f["line"], f["process"], bool(f["doubt"])) for f in found] == [
        (1, 77, True),
        (2, 4711, False),
    ]


def test_an_xid_has_no_token_because_its_address_is_rounded_down(dump, tmp_path, capsys):
    pid = "pid=4711, name=python3"
    begin = LAST.start + 384 * LAST.page_bytes
    text = xid(dump, tmp_path, capsys, begin - begin % -4096, pid)
    assert "page 384, where it has pages 0 to" in text
    assert "an Xid has the begin of the GPU's page, not the address" in text
    text = xid(dump, tmp_path, capsys, begin + 8, pid)  # this one was not rounded
    assert "page 384, token 0, where" in text
    assert "begin of the GPU's page" not in text
    text = run(capsys, "where", f"{begin:#x}", dump)  # nor may the user's own have been
    assert "page 384, token 0, where" in text


FAR = NEAR + (1 << 44)  # in nothing that the map knows


@pytest.mark.parametrize(
    ("line", "says"),
    [(SANITIZER.format(FAR, *form), "compute-sanitizer") for form in FORMS]
    + [
        (DMESG.format(high=FAR >> 32, low=FAR & 0xFFFF_FFFF), "Xid in dmesg"),
        (
            f"MMU Fault: ENGINE GRAPHICS faulted @ 0x{FAR >> 32:x}_{FAR & 0xFFFF_FFFF:08x}.",
            "Xid in",
        ),
        (f"rank 0: illegal address 0x{FAR:x}", "a complaint"),
        (f"0x{FAR:x}: the access is out of bounds", "a complaint"),
        (f"x{' ' * 5000}invalid pointer 0x{FAR:x}", "a complaint"),
    ],
)
def test_who_complains_is_told_though_the_map_does_not_know_the_address(
    dump, tmp_path, capsys, line, says
):
    """A fault is where no memory is."""
    log = tmp_path / "log"
    log.write_text(line)
    assert f"{FAR:#x} {says}" in run(capsys, "where", log, dump)


def test_what_nobody_complains_about_counts_only_if_the_map_knows_it(dump, tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(
        f"frame 0x{FAR:x}\ndefault 0x{FAR + 1:x}\ninvalid{' ' * 100}0x{FAR + 2:x}\n"
        f"frame 0x{LAST.start:x}\nframe 0x{LAST.end - 1:x}"
    )
    (found, *more) = json.loads(run(capsys, "where", log, dump, "--json"))["found"]
    assert (found["address"], found["says"], found["line"]) == (LAST.start, "", 4)
    assert [(f["address"], f["line"]) for f in more] == [(LAST.end - 1, 5)]


def test_a_line_of_any_length_is_looked_at_and_no_address_is_cut_in_two(dump, tmp_path, capsys):
    """It is read in pieces."""
    log, size = tmp_path / "log", len(f"fault 0x{FAR:x} ")
    for shift in range(size):
        long = "-" * (where.LONGEST - size + shift) + f" fault 0x{FAR:x} and more"
        log.write_text(f"{long}\nfault 0x{FAR + 1:x}")
        found = json.loads(run(capsys, "where", log, dump, "--json"))["found"]
        assert [(f["address"], f["line"]) for f in found] == [(FAR, 1), (FAR + 1, 2)]
        assert f"0x{FAR:x} and more" in found[0]["text"]


def test_a_hostile_log_is_looked_at_once(monkeypatch):
    """Who writes the words of a fault again and again makes no pattern begin anew at each."""
    looked = []
    memory = real_cores.memory(NAME)
    monkeypatch.setattr(type(memory), "at", lambda self, address: looked.append(address) or ())
    frames = [f"frame 0x{FAR + n:x}\n" for n in range(5000)]
    assert logs.addresses(["NVRM: Xid " * 6000 + "\n", *frames], memory) == ([], 0)
    assert looked == []  # each range is compared with what is told, and with nothing else


def test_addresses_that_are_left_out_are_counted(dump, tmp_path, capsys, monkeypatch):
    log = tmp_path / "log"
    log.write_text("\n".join(SANITIZER.format(NEAR + n, *FORMS[n % 3]) for n in range(1200)))
    assert "200 more addresses are left out; --all tells them" in run(capsys, "where", log, dump)
    told = json.loads(run(capsys, "where", log, dump, "--json"))
    assert (len(told["found"]), told["left_out"]) == (1000, 200)
    text = run(capsys, "where", log, dump, "--all")
    assert text.count(" compute-sanitizer: ") == 1200
    assert "left out" not in text
    monkeypatch.setattr(logs, "MOST", 1000)
    monkeypatch.setattr(logs, "COUNTED", 1100)
    text = run(capsys, "where", log, dump, "--all")
    assert "at least 100 more addresses are left out The map" in text


def test_stdin_is_a_log(dump, capsys, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(
            f"Illegal access to address (@global)0x{NEAR:x} detected\n"
            "The exception was triggered at PC 0x7f6f177b2510  gather (oob.py:10)".encode()
        )

    monkeypatch.setattr("sys.stdin", Stdin)
    text = run(capsys, "where", "-", dump)
    assert BEHIND in text
    assert "0x7f6f177b2510 PC: code of a kernel, and no buffer" in text


def test_a_dump_without_a_map_and_a_log_that_is_none_are_refused(dump, tmp_path, capsys):
    old = writing.write(writing.encode(sample_record()), tmp_path, "g4debug-old.pt")
    assert "no memory map" in run(capsys, "where", "0x7f0000000000", old, code=2)
    assert "neither an address" in run(capsys, "where", "no-such-log", dump, code=2)
