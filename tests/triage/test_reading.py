"""A log is read as a stream: bounded, whatever is in it, and by what came first."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Iterator
from datetime import datetime

import pytest

from g4debug.findings.kinds import KINDS
from g4debug.triage import lines, patterns, reading, sieve, verdict
from g4debug.triage.entry import by_title
from g4debug.triage.patterns import PATTERNS

pytestmark = pytest.mark.once("a log is read without SGLang")

DIED = b"[2026-09-14 03:22:11 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
CUDA = b"torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
START = b"[2026-09-14 03:20:01] server_args=ServerArgs(model_path='acme/oak', tp_size=2)\n"
LEAK = b"ValueError: pool memory leak detected! [full] total=8\n"


def read(*log: bytes) -> reading.Reading:
    return reading.read(io.BytesIO(b"".join(log)))


def test_every_text_of_a_pattern_passes_the_sieve() -> None:
    """Most lines of a log are never decoded: those must not be dropped that a pattern is about."""
    for one in PATTERNS:
        for text in one.says:
            assert sieve.TRIGGER.search(text.replace("…", "x").encode()), text


def test_the_sieve_finds_each_of_its_words_and_no_other_text() -> None:
    """Words that begin alike, and one that is the beginning of another."""
    regex = re.compile(sieve.any_of(["Xid", "SXid", "in use", "in", "* SIG", "a.b"]))
    for text in ("an Xid", "an SXid 3", "the port in use", "in", "*** SIGSEGV", "a.b"):
        assert regex.search(text), text
    for text in ("Xi", "X id", "i n", "*SIG", "a-b", ""):
        assert regex.search(text) is None, text


def test_every_finding_is_known_by_its_own_words() -> None:
    """Not each of them names one kind alone, but each leads to that kind's entry."""
    for check, of_check in KINDS.items():
        for kind in of_check.values():
            for text in patterns.texts(kind):
                said = re.sub("…", "1", text)
                said = said if said.startswith(check) else f"{check} in x: {said}"
                found = patterns.kind_of(f"g4debug: {said} ")
                if len(text.replace("…", "")) >= 20:
                    assert found is not None, text
                    assert by_title()[found.entry] == by_title()[kind.entry], text


def test_an_endless_line_is_cut_and_the_next_one_is_read() -> None:
    log = b"x" * (5 * lines.LONGEST) + b"CUDA error: misaligned address\n" + LEAK
    found = read(log).chosen.first()
    assert found is not None
    assert (found.line, found.pattern.entry) == (2, 10)


def test_gigabytes_are_not_held() -> None:
    noise = (
        b"[2026-09-14 03:22:11 TP1] CUDA NCCL error sglang memory Connection closed by peer gloo\n"
    )
    count = 4_000  # tracemalloc makes each of them cost half a millisecond

    def endless() -> Iterator[bytes]:
        yield START
        for number in range(count):
            yield noise.replace(b"memory", b"memory %d" % number)
        yield DIED
        yield CUDA

    read(START, noise, DIED, CUDA)  # what is compiled once is no part of it
    tracemalloc.start()
    found = reading.of(endless())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * count  # bytes; the lines themselves are twice as long
    first = found.chosen.first()
    assert first is not None
    assert (first.line, first.pattern.entry) == (count + 3, 7)


def test_many_launches_are_bounded_and_the_last_one_that_ended_is_told() -> None:
    """Known or not: who comes at night wants to know of tonight."""
    one = START + DIED + CUDA
    log = [one] * 80 + [START + DIED + b'  File "a.py", line 1, in f\n' + b"KeyError: 3\n"]
    found = read(*log)
    assert len(found.launches) <= reading.MOST_LAUNCHES
    assert found.left_out == 81 - reading.MOST_LAUNCHES
    told = verdict.of(found)
    assert (told.state, told.begins) == ("unknown", 80 * 3 + 1)
    assert told.first is not None
    assert told.first.text == "KeyError: 3"
    assert told.earlier[-1] == (79 * 3 + 1, "entry 7")
    assert told.later == ()


def test_a_start_behind_the_one_that_ended_is_told_as_later() -> None:
    up = b"[2026-09-15 03:22:11] The server is fired up and ready to roll!\n"
    told = verdict.of(read(START, DIED, CUDA, START, up))
    assert told.entry is not None
    assert (told.entry.number, told.begins) == (7, 1)
    assert told.earlier == ()
    assert told.later == ((4, "it serves in line 5"),)


def test_what_the_server_survived_is_told_with_its_line() -> None:
    oom = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    batch = b"[2026-09-14 03:22:11 TP0] Decode batch, #running-req: 1, #queue-req: 0\n"
    told = verdict.of(read(START, oom, batch, batch))
    assert (told.state, told.served) == ("nothing", 4)
    assert [m.line for m in told.survived] == [2]


def test_many_errors_of_a_living_server_leave_room_for_its_end() -> None:
    batch = b"[2026-09-14 03:22:11 TP0] Decode batch, #running-req: 1, #queue-req: 0\n"
    caught = (
        b'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 3\n'
    )
    killed = (
        b"[2026-09-14 03:22:12] Subprocess scheduler_0 (pid=1) crashed with exit code -9. Trigger\n"
    )
    log = read(START, *[caught, batch] * 200, killed)
    first = log.chosen.first()
    assert first is not None
    assert (first.line, first.pattern.entry) == (1 + 5 * 200 + 1, 26)


ASSERT = b"/w/Indexing.cu:1553: f: block: [4,0,0], thread: [96,0,0] Assertion `i < n` failed.\n"


def test_a_line_without_a_time_gets_that_of_the_next_one() -> None:
    """Not that of the last line that was looked at: a busy server's statistics are not."""
    batches = [
        b"[2026-09-14 03:%02d:11 TP0] Decode batch, #running-req: 1, #queue-req: 0\n" % minute
        for minute in range(21, 36)
    ]
    end = DIED.replace(b"03:22:11", b"03:35:20")
    trace = b'  File "a.py", line 1, in f\n'
    cuda = b"torch.AcceleratorError: CUDA error: device-side assert triggered\n"
    found = read(START, *batches, ASSERT, end, trace, cuda).chosen.first()
    assert found is not None
    assert (found.line, found.pattern.entry, found.rank) == (17, 23, "")
    assert str(found.at) == "2026-09-14 03:35:20"


def test_a_server_that_idled_for_an_hour_before_the_assert() -> None:
    end = DIED.replace(b"03:22:11", b"04:35:20")
    found = read(START, ASSERT, end, b"KeyError: 3\n").chosen.first()
    assert found is not None
    assert (found.line, str(found.at)) == (2, "2026-09-14 04:35:20")


def test_the_year_that_syslog_leaves_out() -> None:
    xid = b"Dec 31 23:59:58 node7 kernel: NVRM: Xid (PCI:0000:5e:00): 79, pid=1, x\n"
    end = DIED.replace(b"2026-09-14 03:22:11", b"2027-01-01 00:00:03")
    for log in ([xid, end, CUDA], [end.replace(b"TP1", b"TP0"), xid, CUDA]):
        found = read(*log).chosen.first()
        assert found is not None
        assert str(found.at) == "2026-12-31 23:59:58"
    alone = read(xid.replace(b"Dec 31", b"Feb 29")).chosen.first()
    assert alone is not None
    assert alone.at is None


GEMMA = (
    b"[2026-09-14 03:20:01] server_args=ServerArgs(model_path='google/gemma-4-31B-it', tp_size=1, "
    b"attention_backend='trtllm_mha', speculative_algorithm='FROZEN_KV_MTP')\n"
)


@pytest.mark.parametrize(
    ("installed", "entry", "also"),
    [("", 7, (1,)), ("0.5.23", 7, ()), ("0.5.12.post2.dev3+g1a2b3c4", 1, (7,))],
)
def test_entry_1_where_the_log_does_not_say_the_release(installed, entry, also) -> None:
    """No wheel has its bug, and no line of SGLang's own says the release."""
    found = reading.read(io.BytesIO(GEMMA + DIED + CUDA), installed).chosen.first()
    assert found is not None
    assert (found.pattern.entry, found.pattern.also) == (entry, also)


def test_colours_and_what_steers_a_terminal_do_not_get_through() -> None:
    log = b"\x1b[31mValueError: pool memory leak detected!\x1b[0m "
    log += b"\x1b]0;title\x07\xe2\x80\xaegnp.exe\r\n"
    found = read(log).chosen.first()
    assert found is not None
    assert found.text.isprintable()
    assert "title" not in found.text
    assert found.text.startswith("ValueError: pool memory leak detected!")


def test_a_time_that_is_none_is_text() -> None:
    for line in (b"2026-13-45T25:61:61.1Z ERROR a.b: x", b"[2026-13-45 25:61:61 TP0] x"):
        found = lines.read(1, line)
        assert (found.at, found.rank, found.prefixed) == (None, "", False)
        assert reading.of([line]).read == 1


def test_dynamo_forms_the_countitself() -> None:
    line = b"2026-11-27T06:32:01.1Z ERROR scheduler.run: Scheduler hit an exception: Traceback"
    found = lines.read(1, line)
    assert found.text == "Scheduler hit an exception: Traceback"
    assert (found.at, found.rank, found.prefixed) == (datetime(2026, 11, 27, 6, 32, 1), "", True)


def test_the_ranks_of_a_line() -> None:
    found = lines.read(1, b"[2026-11-27 06:32:01.123 DP0 PP1 ATTN_CP2 MOE_DP3 TP4 EP5] x")
    assert (found.rank, found.text) == ("DP0 PP1 ATTN_CP2 MOE_DP3 TP4 EP5", "x")


def test_bytes_that_are_no_text_are_read() -> None:
    assert read(bytes(range(256)) * 50 + b"\n" + LEAK).chosen.first() is not None


def test_a_line_of_dockers_json() -> None:
    log = json.dumps({"log": LEAK.decode(), "stream": "stderr"}).encode() + b"\n"
    found = read(log).chosen.first()
    assert found is not None
    assert found.pattern.entry == 10
    assert read(b'{"log":\n{"log": 3}\n{"log":"x\n').chosen.first() is None


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("image lmsysorg/sglang:v0.5.23-cu129", "0.5.23"),
        ("Successfully installed sglang-0.5.12.post1", "0.5.12.post1"),
        ("sglang==0.5.15.post1", "0.5.15.post1"),
        ("sglang 0.5.24.dev12+g1a2b3c", "0.5.24.dev12+g1a2b3c"),
        ("/python3.12/site-packages/sglang/srt/managers/x.py", ""),
    ],
)
def test_the_release_of_the_log(text: str, release: str) -> None:
    assert read(text.encode() + b"\n").chosen.server.release == release


def test_what_the_server_was() -> None:
    line = (
        "[2026-09-14 03:20:01] server_args=ServerArgs(model_path='google/gemma-4-E4B-it', "
        "prefill_attention_backend='triton', decode_attention_backend='trtllm_mha', "
        "attention_backend=None, speculative_algorithm='NEXTN', "
        "speculative_draft_model_path='google/gemma-4-E4B-it-assistant', tp_size=2)\n"
    )
    assert read(line.encode()).chosen.server.words() >= {"gemma-4", "trtllm_mha", "mtp", "tp"}


def test_what_a_server_of_0_5_23_was() -> None:
    """It prints its arguments as a dict."""
    line = (
        b"[2026-09-14 03:20:01] server_args={'model_path': 'google/gemma-4-E4B-it', 'tp_size': 2, "
        b"'prefill_attention_backend': 'triton', 'decode_attention_backend': 'trtllm_mha', "
        b"'attention_backend': None, 'speculative_algorithm': 'NEXTN', "
        b"'speculative_draft_model_path': 'google/gemma-4-E4B-it-assistant'}\n"
    )
    found = read(line, DIED, CUDA, line, DIED, LEAK)
    assert [x.begins for x in found.launches] == [1, 4]
    assert found.chosen.server.words() >= {"gemma-4", "trtllm_mha", "mtp", "tp"}


def test_what_g4debug_did_there() -> None:
    line = (
        b"g4debug 0.9 [scheduler] armed: page-table, pool-leak (raise); fixes: 2 in force "
        b"(hybrid-pool-swap, parked-chunk); faults: none; 12 sites hooked; dumps: /tmp/d\n"
    )
    server = read(line).chosen.server
    assert server.armed == "page-table, pool-leak (raise)"
    assert server.fixes == ("hybrid-pool-swap", "parked-chunk")
    assert server.dumps == "/tmp/d"


UP = b"[2026-09-14 03:20:05] The server is fired up and ready to roll!\n"
ANSWERED = b'[2026-09-14 03:20:06] INFO:     10.0.0.4:4432 - "POST /generate HTTP/1.1" %d x\n'


@pytest.mark.parametrize(
    "said",
    [
        b"[2026-09-14 03:20:06] [http_server] Error: my log says: " + CUDA,
        b"[2026-09-14 03:20:06] Error in request: template error near:\n" + CUDA + b"please help\n",
    ],
)
def test_what_a_refused_client_wrote_is_not_the_servers(said: bytes) -> None:
    assert read(UP, said, ANSWERED % 400).chosen.first() is None


def test_what_stands_below_an_error_of_the_server_is_its_own() -> None:
    """It answers 500 and not 4xx, and did not serve since."""
    found = read(UP, b"[2026-09-14 03:20:06] Error in request: x\n", CUDA, ANSWERED % 500)
    assert found.chosen.first() is not None


USAGE = (
    b"[2026-09-14 03:%02d:11 TP0] Decode batch, #running-req: %d, full token usage: %s, "
    b"swa token usage: %s, #queue-req: %d\n"
)


@pytest.mark.parametrize(
    ("minutes", "runs", "full", "swa", "waits", "entry"),
    [
        (3, 6, b"0.07", b"0.99", 61, 2),
        (1, 6, b"0.07", b"0.99", 61, 0),  # a moment
        (3, 6, b"0.07", b"0.99", 0, 0),  # nobody waits
        (3, 6, b"0.90", b"0.99", 61, 0),  # both are full
        (3, 0, b"0.90", b"0.99", 61, 8),
    ],
)
def test_the_figures_of_a_server_that_is_slow(minutes, runs, full, swa, waits, entry) -> None:
    log = [USAGE % (20 + i, runs, full, swa, waits) for i in range(minutes)]
    first = read(UP, *log).chosen.first()
    assert (first.pattern.entry if first else 0) == entry


def test_a_retraction_is_a_sign_only_if_one_pool_is_full() -> None:
    gemma = b"[2026-09-14 03:20:01] server_args=ServerArgs(model_path='google/gemma-4-31B-it')\n"
    retracts = b"[2026-09-14 03:20:12 TP0] KV cache pool is full. Retract requests. #r: 1\n"
    for swa, entry in ((b"0.91", 0), (b"0.10", 2)):
        first = read(gemma, USAGE % (20, 6, b"0.97", swa, 4), retracts).chosen.first()
        assert (first.pattern.entry if first else 0) == entry


def test_what_g4debug_says_of_the_server() -> None:
    """SGLang itself never says its release."""
    server = read(
        b"g4debug 1.0.0 [scheduler] armed: page-table (watch, contain); SGLang 0.5.23; "
        b"fixes: none; faults: none; 12 sites hooked; dumps: /tmp/d\n",
        b"g4debug: this server runs Gemma4ForCausalLM (SWAKVPool of MHATokenToKVPool) on "
        b"trtllm_mha, draft FROZEN_KV_MTP. Judged: page-table\n",
    ).chosen.server
    assert (server.release, server.armed) == ("0.5.23", "page-table (watch, contain)")
    assert server.words() >= {"gemma-4", "trtllm_mha", "mtp"}


BATCH = b"[2026-09-14 03:%02d:11 TP0] Decode batch, #running-req: 1, #queue-req: 0\n"


def test_a_log_whose_newest_line_comes_first_is_to_be_turned_round() -> None:
    """What followed stands above its cause there, and a batch above the error as if it went on."""
    log = [UP, *(BATCH % minute for minute in range(21, 24)), DIED.replace(b"22:", b"24:"), CUDA]
    log.append(b"[2026-09-14 03:24:12] Received sigquit from a child process. It usually means x\n")
    told = verdict.of(read(*reversed(log)))
    assert (told.state, told.first, told.next_command) == ("unknown", None, "")
    assert "tac LOG" in told.why
    assert verdict.of(read(*log)).entry is not None


def test_two_servers_one_after_the_other_are_no_log_that_goes_back() -> None:
    batches = [BATCH % minute for minute in range(10, 20)]
    told = verdict.of(read(UP, *batches, UP, *batches, UP, *batches))
    assert told.state == "nothing"
