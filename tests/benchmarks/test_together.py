"""Servers that sleep between their turns: real processes, each with a child."""

import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tracer_overhead
from measuring import tracers
from measuring.servers import ServerDied
from measuring.together import Crowd

pytestmark = pytest.mark.once("the code is ours alone")

PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)


@dataclass
class Asleep:
    """What Crowd needs of a server."""

    process: subprocess.Popen[str]
    child: int

    @classmethod
    def begun(cls) -> "Asleep":
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return cls(process, int(process.stdout.readline()))

    def start(self) -> dict[str, str]:
        return {"device": "cpu"}

    def stop(self) -> None:
        for pid in (self.child, self.process.pid):
            psutil.Process(pid).kill()
        self.process.wait()

    def states(self) -> set[str]:
        return {psutil.Process(p).status() for p in (self.process.pid, self.child)}


def settled(server: Asleep, stopped: bool) -> bool:
    """True as soon as all its processes are stopped, or none is."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found = server.states()
        if (found == {psutil.STATUS_STOPPED}) == stopped and (
            stopped or psutil.STATUS_STOPPED not in found
        ):
            return True
        time.sleep(0.01)
    return False


def test_one_server_at_a_time_is_awake():
    first, servers = Asleep.begun(), [Asleep.begun(), Asleep.begun(), Asleep.begun()]
    prepared = []

    def prepare(server):
        assert server is first or first.process.poll() is not None  # gone from the device
        prepared.append(server)

    with Crowd(first, servers) as crowd:
        assert crowd.start(prepare) == "cpu"
        assert prepared[0] is first
        assert {id(s) for s in prepared[1:]} == {id(s) for s in servers}
        assert crowd.servers == servers
        assert all(settled(s, True) for s in servers)
        with crowd.awake(servers[1]):
            assert settled(servers[1], False)
            assert settled(servers[0], True)
            assert settled(servers[2], True)
        assert settled(servers[1], True)
    assert all(s.process.poll() is not None for s in servers)


def fail_while_awake(first: Asleep, servers: list[Asleep]) -> None:
    with Crowd(first, servers) as crowd:
        crowd.start(lambda server: None)
        with crowd.awake(servers[0]):
            raise ValueError("no answer")


def test_a_server_that_fails_is_not_left_asleep():
    servers = [Asleep.begun(), Asleep.begun()]
    with pytest.raises(ValueError, match="no answer"):
        fail_while_awake(Asleep.begun(), servers)
    assert all(s.process.poll() is not None for s in servers)


def test_if_the_first_dies_the_others_are_stopped_too():
    first, servers = Asleep.begun(), [Asleep.begun()]
    with pytest.raises(ServerDied), Crowd(first, servers) as crowd:
        crowd.start(mock.Mock(side_effect=ServerDied("at its start")))
    assert all(s.process.poll() is not None for s in (first, *servers))


def test_no_server_that_is_compared_starts_first_and_alone(tmp_path, monkeypatch):
    """It would be faster than one like it for as long as both live."""
    started, orders = [], set()

    class Told:
        def __init__(self, name, variant, device, folder):
            self.name, self.variant = name, variant

    class Seen(Crowd):
        def __enter__(self):
            started.append((self.first, self.servers))
            raise KeyboardInterrupt

    monkeypatch.setattr(tracer_overhead, "Gated", Told)
    monkeypatch.setattr(tracer_overhead, "Crowd", Seen)
    monkeypatch.setattr(tracers, "installed", lambda: None)
    for call in range(6):
        args = Namespace(
            seconds=1, device="cpu", contexts=(), tp=1, model="E4B", quick=True, together=1,
            variants=("off", "off-again", "watch", "armed"), seed=1, first_round=100 * call,
            out=tmp_path,
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            tracer_overhead.measure_together(args, tmp_path)
        first, compared = started.pop()
        assert (first.name, "G4DEBUG_TRACE" in first.variant.environment) == ("first", True)
        assert sorted(s.name for s in compared) == ["armed-0", "off-0", "off-again-0", "watch-0"]
        orders.add(tuple(s.name for s in compared))
    assert len(orders) > 1


def test_a_second_server_of_a_base_is_compared_with_the_first():
    rows = [
        {"variant": v, "copy": c, "round": f"1.{n}.{c}"}
        for v in ("off", "armed")
        for c in ("0", "1")
        for n in (0, 1)
    ]
    found = tracer_overhead.twins(rows, "off")
    assert [(r["variant"], r["round"]) for r in found] == [
        ("off", "1.0.0"), ("off", "1.1.0"), ("again", "1.0.0"), ("again", "1.1.0"),
    ]  # fmt: skip
    assert rows[2]["variant"] == "off"


def test_a_turn_is_a_part_of_the_load_that_fills_no_cache():
    whole = tracers.LOADS["cuda", False]
    turn = whole.turn()
    assert turn.fill == (0, 0)
    assert [batch for batch, _ in turn.phases] == [batch for batch, _ in whole.phases]
    assert all(t <= w and t >= b for (b, t), (_, w) in zip(turn.phases, whole.phases, strict=True))


@pytest.mark.parametrize(("model", "vocab"), [("E4B", {}), ("E4B-32k", {"vocab": 32_768})])
def test_a_model_is_asked_in_its_own_vocabulary(model, vocab):
    asked = []

    def put(question):
        asked.append(question)
        return {"rows": [{"number": 0}]}

    load = tracers.loaded(Namespace(device="cuda", model=model, contexts=()), quick=True)
    rows = tracers.ask(SimpleNamespace(put=put), load.turn(), seed=1)
    assert [question["serve"] for question in asked] == [row["batch"] for row in rows] == [1, 8, 64]
    assert all(question.items() >= vocab.items() for question in asked)
    assert ("vocab" in asked[0]) == bool(vocab)
