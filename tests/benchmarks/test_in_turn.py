"""benchmarks/in_turn.py: whose turn it is, step by step, and what its figures are made of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import in_turn
from served import turns

BENCHMARKS = Path(in_turn.__file__).parent
OURS = pytest.mark.once("the code is ours alone")


class Server:
    """Launches steps of a batch, each as long as the hooks let it be."""

    def __init__(self, steps: int = 8) -> None:
        self.on, self.wanted, self.now, self.seen = True, True, 0.0, []
        self.turns = turns.Turns(self.switch, lambda: self.wanted, steps)

    def switch(self, on: bool) -> None:
        self.on = on

    def decode(self, steps: int, requests: int = 3) -> None:
        for _ in range(steps):
            self.turns.launch(True, requests, self.now)
            self.seen.append(self.on)
            self.now += 0.011 if self.on else 0.010

    def prefill(self) -> None:
        self.turns.launch(False, 1, self.now)
        self.seen.append(self.on)
        self.now += 0.1


@OURS
def test_a_block_has_each_turn_there_and_back_and_the_steps_of_another_turn_do_not_count():
    server = Server()
    server.prefill()
    server.decode(10 * 6 * 8 + 1)
    assert len(server.turns.done) == 60
    for n in range(0, 60, 6):
        block = server.turns.done[n : n + 6]
        assert {turn[0] for turn in block} == {n // 6}
        there, back = ([turn[1] for turn in half] for half in (block[:3], block[3:]))
        assert sorted(there) == sorted(turns.ARMS)
        assert back == there[::-1]
    for _, arm, requests, steps, mean, median in server.turns.done:
        assert (requests, steps) == (3, 8 - turns.SKIPPED)
        assert mean == pytest.approx(11 if arm == turns.ON else 10) == median
    orders = {tuple(t[1] for t in server.turns.done[n : n + 3]) for n in range(0, 60, 6)}
    assert len(orders) > 1


@OURS
@pytest.mark.parametrize("other", ["prefill", "another batch"])
def test_another_batch_ends_a_turn_and_its_block_begins_again(other):
    server = Server()
    server.prefill()
    server.decode(8 * 2 + 5)  # in the third turn of the first block
    if other == "prefill":
        server.prefill()
        assert server.seen[-1]  # with the hooks in place
    else:
        server.decode(1, requests=2)
    assert server.turns.done == []
    server.decode(8 * 6 + 1, requests=2)
    assert [turn[0] for turn in server.turns.done] == [0] * 6
    assert {turn[2] for turn in server.turns.done} == {2}


@OURS
def test_nothing_is_switched_while_no_turns_are_wanted():
    server = Server()
    server.wanted = False
    server.on = False  # as somebody's signal left it
    server.prefill()
    server.decode(100)
    server.prefill()
    assert not any(server.seen)
    assert server.turns.done == []


@OURS
def test_it_ends_with_the_hooks_in_place():
    server = Server()
    server.prefill()
    server.decode(5)
    server.wanted = False
    server.prefill()
    server.decode(50)
    assert all(server.seen[-51:])


@OURS
def test_a_page_ledger_is_never_left_out(monkeypatch):
    monkeypatch.setattr(turns.gate, "ledgers", [object()])
    monkeypatch.setattr(turns.gate, "armed", True)
    with pytest.raises(RuntimeError, match="beside a page ledger"):
        turns._switch(False)
    assert turns.gate.armed


def steps(cost: float, blocks: int = 12) -> list[dict[str, str]]:
    """steps.csv of a server that drifts by far more than the hooks cost."""
    found = []
    for block in range(blocks):
        drift = 10 * (1 + 0.3 * block)
        for variant, slower in (("off", 1.0), ("off-again", 1.0), ("watch", 1 + cost)):
            row = {"round": f"1.{block}", "variant": variant, "batch": "8", "steps": "36"}
            found.append({**row, "mean_ms": str(drift * slower), "median_ms": "0"})
    return found


@OURS
@pytest.mark.parametrize(
    ("cost", "word"), [(0.004, "holds"), (0.006, "FAILS"), (-0.002, "faster than without")]
)
def test_a_drift_of_the_machine_is_in_all_turns_of_a_block(cost, word):
    verdicts = {(v.batch, v.variant, v.metric): v for v in in_turn.judge(steps(cost), [])}
    mine = verdicts[8, "watch", in_turn.STEP]
    assert mine.word == word
    assert mine.figure.value == pytest.approx(cost)
    assert verdicts[8, "off-again", in_turn.STEP].word == ""
    assert verdicts[64, "watch", in_turn.STEP].word == "not measured"
    assert verdicts[8, "watch", "first token"].word == "not measured"


@OURS
def test_steps_that_grow_longer_within_a_block_are_no_cost():
    """In each block ``watch`` comes last on the way there, and first on the way back."""
    rows, time = [], 10.0
    for block in range(12):
        for variant in ("off", "off-again", "watch", "watch", "off-again", "off"):
            row = {"round": f"1.{block}", "variant": variant, "batch": "8", "steps": "20"}
            rows.append({**row, "mean_ms": str(time), "median_ms": "0"})
            time += 0.3
    for verdict in in_turn.judge(rows, []):
        if verdict.metric == in_turn.STEP and verdict.figure is not None:
            assert verdict.figure.value == pytest.approx(0)


@OURS
def test_each_figure_is_of_its_own_turns():
    rows = []
    for block in range(12):
        for variant, slower in (("off", 1.0), ("off-again", 1.0), ("watch", 1.002)):
            for phase, first in (("prompts", 50.0), ("served", 90.0 * slower**40)):
                at = {"round": f"1.{block}", "variant": variant, "phase": phase, "batch": "1"}
                tpot = "" if phase == "prompts" else str(4 * slower)
                times = {"sent_ms": "0", "ttft_ms": str(first * slower), "tpot_ms": tpot}
                end = 500 if phase == "prompts" else 700 * slower
                rest = {"step_ms": "", "end_ms": str(end), "tokens": "100"}
                rows.append({**at, "number": "0", **times, **rest})
    found = in_turn.figures([], rows, 1, "off", "watch")
    assert {metric: round(figure.value, 5) for metric, figure in found.items()} == {
        "first token": 0.002, "first token, p99": 0.002, "time per token": 0.002,
        "throughput": 0.002,
    }  # fmt: skip


@pytest.mark.long("one server on the CPU engine, a minute")
def test_a_real_server_takes_turns_and_nothing_is_found(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "in_turn.py"), "--device", "cpu", "--quick"]
    limits = ["--seconds", "400", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, timeout=500)
    assert done.returncode == in_turn.leave_it_on.DOES_NOT_HOLD, done.stdout + done.stderr
    of_steps = in_turn.results.read(tmp_path / "steps.csv")[1]
    assert {row["variant"] for row in of_steps} == {"off", "off-again", "watch"}
    assert {row["batch"] for row in of_steps} >= {"1", "4"}
    server = in_turn.results.read(tmp_path / "servers.csv")[1][0]
    assert (server["findings"], server["lacks"]) == ("0", "")
    # The steps of the turns without hooks are not on the tape.
    assert 0 < int(server["tape_steps"]) < int(server["steps"]), json.dumps(server)
