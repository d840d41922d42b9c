"""Real servers are recorded and replayed, on the CPU engine."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import releases
import small_tape
from drive_recorded import SALTED, SALTS
from real_engine import ENGINE, drive, dumps_in
from warm_replay import warm_replays

from g4debug import cli
from g4debug.dumps import reading, writing
from g4debug.findings import tape
from g4debug.findings.decisive import DECISIVE
from g4debug.findings.record import TrapRecord
from g4debug.findings.tape import Code
from g4debug.findings.tape_record import data, pack
from g4debug.hooking import targets
from g4debug.replay import host
from g4debug.replay.setting import CannotReplay

pytestmark = ENGINE
DRIVER = str(Path(__file__).with_name("drive_recorded.py"))
ENGINE_ARGUMENTS = {
    "max_total_tokens": 4096,
    "chunked_prefill_size": 512,
    "max_running_requests": 6,
}


def recorded(
    folder: Path,
    mtp: bool,
    requests: int,
    engine: dict[str, Any] | None = None,
    together: int = 5,
    more: dict[str, Any] | None = None,
    **environ: str,
) -> TrapRecord:
    """The dump that is left: of a finding, or of a healthy server that was asked for its tape."""
    target = folder / "tape.pt"
    order = {
        "seed": 2, "requests": requests, "together": together, "mtp": mtp,
        "engine": {**ENGINE_ARGUMENTS, **(engine or {})}, "tape": str(target), **(more or {}),
    }  # fmt: skip
    # SGLang reads some variables when it is imported, which a warm process has done.
    cold = not DECISIVE.isdisjoint(environ)
    run = drive(
        folder, DRIVER, json.dumps(order), cold=cold, SGLANG_TRTLLM_MHA_DEBUG="1", **environ
    )
    if target.exists():
        return reading.read(target)
    assert dumps_in(folder), run.log[-3000:]
    return dumps_in(folder)[0]


def replay(folder: Path, record: TrapRecord, capsys: Any, *more: str, cold: bool = False) -> Any:
    """The result, as JSON. cold: its process imports SGLang, as it does for a user."""
    path = folder / "replayed.pt"
    path.write_bytes(writing.encode(record))
    with contextlib.nullcontext() if cold else warm_replays():
        code = cli.main(["replay", str(path), "--keep", str(folder / "kept"), "--json", *more])
    result = json.loads(capsys.readouterr().out)
    assert code == result["code"]
    return result


def changed(record: TrapRecord, old: bytes, new: bytes) -> TrapRecord:
    on = record.tape
    assert on is not None
    whole = data(on)
    assert old in whole
    made = pack(
        [whole.replace(old, new, 1)], b"", on.page, on.firsts, on.steps, on.requests,
        on.scheduler, {},
    )  # fmt: skip
    return dataclasses.replace(record, tape=made)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> TrapRecord:
    return recorded(tmp_path_factory.mktemp("healthy"), True, 40)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.once("the model computes alike on each release")),
        ("--pages-only",),
    ],
    ids=["exact", "pages"],
)
def test_a_healthy_server_with_mtp_decides_the_same_in_each_step(
    more: tuple[str, ...], healthy: TrapRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert healthy.finding.kind == "asked"
    assert healthy.tape is not None
    result = replay(tmp_path, healthy, capsys, *more, cold="--pages-only" in more)
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] == healthy.tape.steps > 30
    assert result["pages_compared"] >= 1


@pytest.mark.long("an engine, and its replay")
@pytest.mark.once("pages of one token are replayed alike on each release")
@pytest.mark.parametrize(
    "mtp",
    [True, pytest.param(False, marks=pytest.mark.long("an engine on triton, and its replay"))],
    ids=["mtp", "plain"],
)
def test_pages_of_one_token(mtp: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As SGLang has them by default, with most attention backends."""
    record = recorded(tmp_path, mtp, 16, {"attention_backend": "triton", "page_size": 1})
    assert record.tape is not None
    assert record.tape.page == 1
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] == record.tape.steps > 10


@pytest.mark.long("an engine, and its replay")
def test_the_steps_up_to_one_of_them(
    healthy: TrapRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert healthy.tape is not None
    page = tmp_path / "a.html"
    result = replay(tmp_path, healthy, capsys, "--until", "50", "--pages-only", "--html", str(page))
    n = f"50 of {healthy.tape.steps} steps are equal"
    assert result["text"] == f"equal up to step 50: {n}, and nothing was found up to there"
    assert result["equal"] == 50
    assert n.replace(" steps", "") in page.read_text()


@pytest.mark.long("an engine, and its replay")
@pytest.mark.once("priorities are on a tape alike on each release")
@pytest.mark.parametrize(
    "more",
    [
        {"prefill_max_requests": 1},
        {"schedule_low_priority_values_first": True, "disable_priority_preemption": True},
    ],
    ids=["high first", "low first"],
)
def test_no_priority_is_not_priority_0(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang puts a request without a priority behind all others, also behind those below 0.

    The other arguments decide, too, and a replay's server has to get them.
    """
    engine = {"enable_priority_scheduling": True, "max_running_requests": 4, **more}
    mixed = {"priorities": [None, -1, 0, 2]}
    record = recorded(tmp_path, False, 25, engine, together=8, more=mixed)
    assert record.tape is not None
    assert more.items() <= record.tape.scheduler.items()
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] > 25


@pytest.mark.long("an engine, and its replay")
@pytest.mark.once("a salt is hashed alike on each release")
def test_a_prompt_that_the_prefix_cache_keeps_apart_by_salts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests with another ``extra_key`` or ``cache_salt`` share no page, here either."""
    record = recorded(tmp_path, False, 6, more={"salted": 3})
    on = record.tape
    assert on is not None
    requests = tape.read(data(on), on.page, on.firsts).requests.values()
    first = tape.hash_bytes(on.page, on.page, 0, on.firsts)
    prompts = [r.hashes[:first] for r in requests if r.prompt == SALTED][-3 * len(SALTS) :]
    assert (len(prompts), len({*prompts})) == (3 * len(SALTS), len(SALTS))
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] == on.steps > 3 * len(SALTS)


@pytest.mark.once("who ends a replay, and what it leaves, is up to the replay")
@pytest.mark.parametrize("when", ["starting SGLang", "step 2"])
def test_ctrl_c_tells_what_is_known_and_leaves_no_process(
    when: str, healthy: TrapRecord, tmp_path: Path
) -> None:
    """On a terminal, where there is a bar to see how far it is."""
    path = tmp_path / "replayed.pt"
    path.write_bytes(writing.encode(healthy))
    command = [sys.executable, "-m", "g4debug", "replay", str(path), "--keep", str(tmp_path / "k")]
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nohup and & leave it ignored
        os.execv(sys.executable, command)
    said, stopped, end = b"", False, time.monotonic() + 300
    with contextlib.suppress(OSError):  # the other side of the terminal is closed
        while time.monotonic() < end:
            said += os.read(terminal, 4096)
            if not stopped and when.encode() in said:
                time.sleep(1)
                before = _alive(tmp_path)
                os.write(terminal, b"\x03")
                stopped = True
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert stopped, said
    if when == "step 2":
        assert (status, b"stopped by Ctrl-C; equal up to step" in said) == (2, True), said
    else:
        assert status == 130, said
    assert before
    end = time.monotonic() + 60  # the kernel ends them with their parent, when it comes to it
    while (left := _alive(tmp_path)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def _alive(folder: Path) -> set[Path]:
    """The processes that write their output there. SGLang changes their names."""
    found = set()
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if output.readlink().is_relative_to(folder):
                found.add(output)
    return found


@pytest.mark.once("steps are compared alike on each release")
def test_a_tape_that_was_changed_is_told(
    healthy: TrapRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another number of accepted tokens in the first verify of all."""
    assert healthy.tape is not None
    whole = data(healthy.tape)
    recording = tape.read(whole, healthy.tape.page, healthy.tape.firsts)
    counts = next(
        whole[at : at + 2 + whole[at + 1]]
        for at in range(len(whole))
        if whole[at] == Code.ACCEPT and 0 < whole[at + 1] < 7 and max(whole[at + 2 : at + 3]) < 4
    )
    other = counts[:2] + bytes(n % 4 + 1 for n in counts[2:])
    result = replay(tmp_path, changed(healthy, counts, other), capsys)
    assert result["code"] == 2, result
    assert "states differ from step" in result["text"]
    assert 0 < result["differs"] < recording.steps


@pytest.mark.parametrize(
    "mtp",
    [True, pytest.param(False, marks=pytest.mark.long("an engine, and its replay"))],
    ids=["mtp", "plain"],
)
def test_a_finding_comes_again(
    mtp: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drill of g4debug's own: a page table gets a page that is none."""
    record = recorded(tmp_path, mtp, 30, G4DEBUG_FAULTS="page-oob=1*on@step=30")
    assert record.finding.check == "page-table"
    result = replay(tmp_path, record, capsys)
    assert result["code"] == 0, result
    assert result["text"].startswith("reproduced: g4debug: page-table")
    assert result["equal"] == result["steps"] == record.finding.location.step
    # Without the fault the same steps find nothing, and nothing that the host decides is guilty.
    innocent = dataclasses.replace(
        record, faults=(), environment={**record.environment, "G4DEBUG_FAULTS": ""}
    )
    result = replay(tmp_path, innocent, capsys)
    if not mtp and targets.matches("<0.5.14"):
        # With overlap, page-table does not see all there, so it makes nobody innocent.
        assert result["code"] == 2, result
        assert any("page-table did not look at all of it" in line for line in result["more"])
        return
    assert (result["code"], result["text"]) == (1, "not reproduced, states equal"), result


POOLS = "0.5.23 alone serves Llama's toy armed"


# Each has pools or a draft of another class, or is a model that another one's toy stands for.
SERVERS: list[tuple[dict[str, Any], tuple[str, bool]]] = [
    ({"model": "llama"}, ("MHA", False)),
    ({"model": "qwen3"}, ("MHA", False)),
    ({"model": "deepseek"}, ("MLA", False)),
    ({"model": "gpt-oss"}, ("MHA", True)),
    ({"model": "gemma-3"}, ("MHA", False)),
    ({"model": "llama", "draft": "eagle"}, ("MHA", False)),
    ({"model": "llama", "draft": "eagle3"}, ("MHA", False)),
    ({"model": "llama", "draft": "standalone"}, ("MHA", False)),
    ({"model": "llama", "draft": "ngram"}, ("MHA", False)),
    ({"model": "mimo-v2", "draft": "multi-layer-eagle"}, ("MHA", True)),
]
LONG = pytest.mark.long("an engine, and its replay")
# MLA's toy has lists of tokens in place of page tables.
FAULTS = {True: "token-oob=1*on@mode=decode", False: "page-oob=1*on@step=20"}


def named(value: Any) -> str | None:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else ""


@pytest.mark.once(POOLS)
@pytest.mark.parametrize(
    ("engine", "pools"), [SERVERS[0], *(pytest.param(*s, marks=LONG) for s in SERVERS[1:])],
    ids=named,
)  # fmt: skip
def test_a_finding_on_a_server_of_another_model(
    engine: dict[str, Any],
    pools: tuple[str, bool],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page table, or a list of tokens, gets a page that is none. All steps are equal, too."""
    record = recorded(tmp_path, False, 30, engine, G4DEBUG_FAULTS=FAULTS[pools == ("MLA", False)])
    assert record.tape is not None
    facts = record.tape.scheduler
    assert (facts["kv_pool"], facts["size_swa"] is not None) == pools
    assert record.finding.check == "page-table"
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["text"].startswith("reproduced: g4debug: page-table")
    assert result["equal"] == result["steps"] == record.finding.location.step
    assert result["pages_compared"] >= 1  # how many there are hangs on how busy the machine is


@LONG
@pytest.mark.once(POOLS)
@pytest.mark.parametrize(("engine", "pools"), SERVERS, ids=named)
def test_healthy_servers_of_other_models(
    engine: dict[str, Any],
    pools: tuple[str, bool],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = recorded(tmp_path, False, 30, {"max_total_tokens": 3072, **engine})
    assert record.tape is not None
    facts = record.tape.scheduler
    assert (facts["kv_pool"], facts["size_swa"] is not None) == pools
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] == record.tape.steps > 30
    assert result["pages_compared"] >= 1


@pytest.mark.written_for("locked-prefix")
def test_a_bug_of_sglangs_own_comes_again_with_fewer_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded by drive_recorded.py once, because whether the bug comes hangs on arrivals."""
    record = reading.read(Path(__file__).with_name("locked-prefix-0.5.12.post1.pt"))
    assert record.finding.check == "kv-allocator"
    small = tmp_path / "small.pt"
    result = replay(
        tmp_path, record, capsys, "--shrink", str(small), "--pages-only", "--seconds", "90",
        "--fix", "locked-prefix=1",
    )  # fmt: skip
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"]
    assert _does_not_come(result, "fix locked-prefix on")
    shrunk = result["shrunk"]
    assert len(shrunk["kept"]) < shrunk["before"] / 3
    again = replay(tmp_path, reading.read(small), capsys)
    assert again["code"] == 0, again
    assert again["requests"] == len(shrunk["kept"])


@pytest.mark.written_for("locked-prefix")
def test_it_does_not_come_on_the_newest_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler of another release, from an environment that is there, gets the requests."""
    newest = str(releases.newest())
    try:
        host.python(newest)
    except CannotReplay as e:
        pytest.skip(str(e))
    record = reading.read(Path(__file__).with_name("locked-prefix-0.5.12.post1.pt"))
    result = replay(tmp_path, record, capsys, "--pages-only", "--sglang", newest)
    assert result["code"] == 0, result
    assert _does_not_come(result, f"SGLang {newest}")


@pytest.mark.once("its dump is of the newest release")
def test_a_hang_of_sglangs_own_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """sglang #36458, from the history suite's parked-chunk, shrunk: a single prompt hangs."""
    record = reading.read(Path(__file__).with_name("parked-chunk-0.5.23.pt"))
    assert record.finding.kind == "hang"
    result = replay(tmp_path, record, capsys, "--pages-only", "--fix", "parked-chunk=1")
    assert result["code"] == 0, result
    assert result["text"].startswith("reproduced: g4debug: flight-recorder: the scheduler hangs")
    assert result["equal"] == result["steps"]
    assert _does_not_come(result, "fix parked-chunk on")


@pytest.mark.once("its dump is of the newest release")
def test_a_hang_before_the_first_step_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request that SGLang never admits is on the tape (fix ignore-eos-admission), and no step.

    This dump was shrunk: the server had two such requests.
    """
    record = reading.read(Path(__file__).with_name("ignore-eos-admission-0.5.23.pt"))
    assert record.tape is not None
    assert (record.finding.kind, record.tape.steps, record.tape.requests) == ("hang", 0, 1)
    result = replay(tmp_path, record, capsys, "--fix", "ignore-eos-admission=1")
    assert (result["code"], result["steps"]) == (0, 0), result
    assert result["text"].startswith("reproduced: g4debug: flight-recorder: the scheduler hangs")
    assert _does_not_come(result, "fix ignore-eos-admission on")


@pytest.mark.long("a search for fewer requests, and three servers")
@pytest.mark.once("its dump is of the newest release")
def test_a_hang_of_the_newest_release_becomes_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its request has no answer after 30 s, from a server that lives and says nothing."""
    record = reading.read(Path(__file__).with_name("parked-chunk-0.5.23.pt"))
    script = tmp_path / "script.py"
    result = replay(
        tmp_path, record, capsys, "--pages-only", "--script", str(script), "--seconds", "1500"
    )
    assert result["code"] == 0, result
    assert result["script"]["file"] == str(script), result["script"]
    assert result["script"]["text"].endswith("nobody: request 1 got 0 of 1 tokens in 30 s")
    assert "g4debug." not in script.read_text().partition('"""\n\n')[2]


@pytest.mark.long("an engine, and its replay")
@pytest.mark.once("a tape loses its beginning alike on each release")
def test_a_hang_of_a_server_whose_tape_has_lost_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with each server that has run for long: which pages were in use is not known."""
    engine = {
        **ENGINE_ARGUMENTS, "max_total_tokens": 8192, "swa_full_tokens_ratio": 0.1,
        "disable_radix_cache": True, "max_running_requests": None,
    }  # fmt: skip
    order = {
        "seed": 5, "requests": 30, "together": 6, "mtp": False, "engine": engine,
        "parked": 1600,
    }  # fmt: skip
    environ = small_tape.installed(tmp_path / "plugin", 1200)
    drive(
        tmp_path, DRIVER, json.dumps(order), SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_FIXES="none",
        G4DEBUG_HANG_SECONDS="2", **environ,
    )  # fmt: skip
    (record,) = dumps_in(tmp_path)
    assert record.tape is not None
    assert record.finding.kind == "hang"
    assert record.tape.begins in ("idle", "busy")
    assert record.tape.first > 0
    small = tmp_path / "small.pt"
    result = replay(
        tmp_path, record, capsys, "--pages-only", "--fix", "parked-chunk=1", "--shrink", str(small)
    )
    assert result["code"] == 0, result
    assert result["text"].startswith("reproduced, on other pages: g4debug: flight-recorder")
    assert f"where the server was {record.tape.begins}" in result["more"][0]
    assert _does_not_come(result, "fix parked-chunk on")
    shrunk = reading.read(small)
    assert shrunk.finding.kind == "hang"
    assert len(result["shrunk"]["kept"]) == 1


@pytest.mark.long("a replay that shrinks, and one of what is left")
@pytest.mark.once("its dump is of the newest release")
def test_a_shrunk_dump_of_a_tape_that_begins_at_a_flush_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its dump and on its tape steps count alike: from where the first tape begins."""
    record = later(reading.read(Path(__file__).with_name("parked-chunk-0.5.23.pt")), 500)
    assert record.tape is not None
    assert (record.tape.begins, record.tape.first) == ("flush", 500)
    small = tmp_path / "small.pt"
    result = replay(
        tmp_path, record, capsys, "--pages-only", "--shrink", str(small), "--seconds", "60"
    )
    assert result["code"] == 0, result
    assert result["shrunk"]["kept"], result
    again = replay(tmp_path, reading.read(small), capsys, "--pages-only")
    assert again["code"] == 0, again
    assert again["text"].startswith("reproduced: ")
    assert again["equal"] == again["steps"] > 0


def later(record: TrapRecord, steps: int) -> TrapRecord:
    """The dump as if there had been so many steps, and then a flush, before its tape."""
    on = record.tape
    assert on is not None
    parts, whole = [], data(on)
    events = [*tape._Reader(whole, on.page, on.firsts).events(), (len(whole), None)]
    for (at, event), (end, _) in itertools.pairwise(events):
        part = whole[at:end]
        if isinstance(event, tape.Start):
            rest = tape.start(
                event.round, event.steps + steps, event.requests, event.forwards, event.ratio,
                event.checksum,
            )  # fmt: skip
            part = bytes((Code.START, tape.Why.FLUSH)) + rest
        elif isinstance(event, tape._Pages):
            part = bytes((Code.PAGES,)) + tape.number(event.step + steps) + part[-8:]
        parts.append(part)
    made = pack(
        [b"".join(parts)], b"", on.page, on.firsts, on.steps + steps, on.requests, on.scheduler, {},
        on.variables, (), on.format,
    )  # fmt: skip
    at = dataclasses.replace(record.finding.location, step=record.finding.location.step + steps)
    return dataclasses.replace(
        record,
        finding=dataclasses.replace(record.finding, location=at),
        tape=made,
        steps=tuple(dataclasses.replace(s, step=s.step + steps) for s in record.steps),
        allocator=tuple(dataclasses.replace(e, step=e.step + steps) for e in record.allocator),
    )


def _does_not_come(result: Any, way: str) -> bool:
    ((name, text),) = result["tried"]
    says = r"it does not come in \d+ steps, by which all requests had ended"
    return bool(name == way and re.fullmatch(says, text))


@pytest.mark.written_for("idle-draft-input")
def test_an_exception_of_sglangs_own_comes_again_and_becomes_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its server had the flight recorder alone, so all there is is SGLang's own exception."""
    order = {
        "seed": 1, "requests": 0, "together": 1, "mtp": True, "waiting": 8,
        "engine": {"max_total_tokens": 512, "chunked_prefill_size": 512},
    }  # fmt: skip
    run = drive(
        tmp_path, DRIVER, json.dumps(order), SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_FIXES="none",
        G4DEBUG_TRACE="flight-recorder",
    )  # fmt: skip
    record = run.dumps[0]
    assert (record.finding.check, record.finding.kind) == ("flight-recorder", "exception")
    explained = replay(tmp_path, record, capsys)
    assert explained["code"] == 0, explained
    assert explained["text"].startswith("explained: ")
    assert "spec-lifecycle" in explained["text"]
    small, script = tmp_path / "small.pt", tmp_path / "script.py"
    result = replay(
        tmp_path, record, capsys, "--trace", "flight-recorder", "--pages-only", "--seconds", "200",
        "--shrink", str(small), "--script", str(script),
    )  # fmt: skip
    assert result["code"] == 0, result
    assert result["text"].startswith("reproduced: ")
    assert "AttributeError" in result["text"]
    assert len(result["shrunk"]["kept"]) == 2
    assert "SGLang's own error: AttributeError" in result["script"]["text"]
    assert "g4debug." not in script.read_text().partition('"""\n\n')[2]
    again = replay(tmp_path, reading.read(small), capsys, "--trace", "flight-recorder")
    assert again["code"] == 0, again
    assert again["text"].startswith("reproduced: ")


def simulates_on_cuda() -> bool:
    """True where SGLang makes simulated accept lengths on CUDA, whatever the server's device is."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "srt/speculative/spec_utils.py").read_text()
    body = source.partition("def generate_simulated_accept_index")[2].partition("\ndef ")[0]
    return 'device="cuda"' in body


@pytest.mark.long("four servers from cold, and their replays")
@pytest.mark.once("a dump's variables are handed to a replay alike on each release")
def test_variables_by_which_the_host_decides_are_those_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that are kept out of a dump's environment, as TOKEN in a name may be a secret."""
    environ = {
        "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD": "-1",
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
        "SGLANG_INIT_NEW_TOKEN_RATIO": "0.2",
    }
    engine = {"max_total_tokens": 1536, "schedule_policy": "lpm"}
    accepted = {} if simulates_on_cuda() else {"SGLANG_SIMULATE_ACC_LEN": "2"}
    record = recorded(tmp_path, True, 40, engine, 16, **accepted, **environ)
    assert record.tape is not None
    assert record.tape.variables == environ
    assert record.tape.limits == ()
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] == record.tape.steps > 30


@pytest.mark.long("an engine, and its replay")
@pytest.mark.once("a tape begins anew alike on each release")
def test_a_server_that_had_a_grammar_is_replayed_from_where_its_tape_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(tmp_path, False, 5, more={"grammar": 1, "flush": 20})
    assert record.tape is not None
    assert (record.tape.limits, record.tape.begins) == ((), "flush")
    log = (tmp_path / "log").read_text()
    assert "the tape is limited" in log
    assert "the tape is not limited any more" in log
    result = replay(tmp_path, record, capsys, "--pages-only")
    assert result["code"] == 0, result
    assert result["equal"] == result["steps"] == record.tape.steps > 20
