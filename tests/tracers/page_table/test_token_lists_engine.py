"""Real engines on the triton backend, alone and as one half of a split one: faults, and health."""

from __future__ import annotations

import json
import re
from pathlib import Path

import drive_tracers
import pytest
from drive_tracers import LENGTHS, OUTPUT
from real_engine import ENGINE, WhenAsked, drive

from g4debug.hooking import targets

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
DRIVER = Path(drive_tracers.__file__)
HEALTHY = Path(__file__).with_name("drive_healthy.py")
# Prompts of 370, 130 and 250 tokens, in chunks of 128, so that a prefill has a prefix to list.
TRITON = {"attention_backend": "triton", "chunked_prefill_size": 128}
SPLIT = {
    "attention_backend": None,
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "trtllm_mha",
    "chunked_prefill_size": 128,
}
SEED = 7
WRONG = {"stale", "other-request", "mismatch"}
# One firing of each fault, each at a place of its own, and what it is found as.
EACH = {
    "token-oob": ("1*on@mode=extend@runner=target", {"out-of-range"}),
    "token-alias": ("1*on@mode=decode@runner=draft", {"other-request"}),
    "token-freed": ("1*on@mode=target_verify@step=12", {"stale"}),
    "indptr-off-by-one": ("1*on@mode=target_verify@step=14", {"list-bounds"}),
    "token-pool-swap": (
        "1*on@mode=target_verify@step=16", WRONG | {"full-index-in-swa-table", "out-of-range"}
    ),
}  # fmt: skip
FIRED = re.compile(
    rf"g4debug fault \(seed={SEED}\) ([a-z-]+) #1: (\w+) (\w+): (full|window) list row .* "
    r"\[step (\d+): "
)
# There both pools hand out the same numbers in this workload, so that a swap changes nothing.
IN_LOCKSTEP = targets.matches("==0.5.15.post1")
# In a decode, SGLang's triton reads one key less than in a prefill (docs/fixes.md), so an answer
# depends on which of its tokens a retracted request computes again in a prefill, and that on when
# the requests arrive. With the fix it does not.
WHOLE_WINDOW = {"G4DEBUG_FIX_TRITON_DECODE_WINDOW": "1"}
# The healthy engines: backends of prefill and decode, whether there is a draft, and page size.
# Pages of one token are what SGLang takes by itself with triton.
ENGINES = {
    "triton": ("triton,triton", True, 64),
    "split": ("triton,trtllm_mha", True, 64),
    "plain": ("triton,triton", False, 64),
    "page-1": ("triton,triton", True, 1),
    "page-1-plain": ("triton,triton", False, 1),
}

LONG = pytest.mark.long("an engine for each kind of server")
NAMES = [pytest.param(name, marks=() if name == "split" else LONG) for name in ENGINES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")

    def run(name, *command, armed=True, **environ):
        if armed:
            environ["SGLANG_TRTLLM_MHA_DEBUG"] = "1"
        return lambda: drive(folder / name, *map(str, command), **environ)

    def healthy(name, armed=True):
        backends, mtp, page = ENGINES[name]
        command = [HEALTHY, "--backends", backends, "--page", page, *([] if mtp else ["--plain"])]
        return run(f"{name}-{armed}", *command, armed=armed, **WHOLE_WINDOW)

    each = ";".join([f"seed={SEED}", *(f"{name}={chain}" for name, (chain, _) in EACH.items())])
    extend = "seed=3;token-oob=1*on@mode=extend"
    return WhenAsked(
        each=run(
            "each", DRIVER, json.dumps(TRITON), G4DEBUG_MODE="contain", G4DEBUG_FAULTS=each,
            G4DEBUG_TRACE="page-table",
        ),
        raised=run("raised", DRIVER, json.dumps(SPLIT), G4DEBUG_FAULTS=extend),
        bare=run("bare", DRIVER, json.dumps(SPLIT), armed=False, G4DEBUG_FAULTS=extend),
        unarmed=healthy("triton", armed=False),
        **{name: healthy(name) for name in ENGINES},
    )  # fmt: skip


def test_each_fault_is_found_in_the_step_in_which_it_fires(runs):
    run = runs["each"]
    assert run.status == 0, run.log[-3000:]
    assert run.result == [OUTPUT] * len(LENGTHS) * 2
    fired, drawn = {}, {}
    for name, runner, mode, which, step in FIRED.findall(run.log):
        fired[name], drawn[name] = (runner, mode.upper(), int(step)), which
    due = {name: e for name, e in EACH.items() if not (IN_LOCKSTEP and name == "token-pool-swap")}
    assert set(fired) == set(due)
    found = {}
    for record in run.dumps:
        where = record.finding.location
        found.setdefault((where.runner, where.forward_mode, where.step), record.finding)
    assert set(found) == set(fired.values())  # each at its own place, and nothing else
    for name, (_, kinds) in due.items():
        finding = found[fired[name]]
        assert finding.kind in kinds, (name, finding.headline)
        if name != "indptr-off-by-one":  # rows before it end where they must, in both lists
            layers = "sliding" if drawn[name] == "window" else "full"
            assert finding.location.layer_kind == layers, name
    assert "of request len" in found[fired["token-alias"]].headline
    assert "illegal memory access" not in run.log


def test_the_dump_shows_the_bad_entry(runs):
    for record in runs["each"].dumps:
        if record.finding.kind == "list-bounds":
            continue
        row, position, token = record.table.bad[0].tolist()
        where = record.finding.location
        assert (where.row, where.column) == (row, position)
        at = record.table.values[row - record.table.row0, position - record.table.column0]
        assert int(at) == token
        assert record.table.pool.page_size == 1


def test_raise_mode_stops_before_a_prefill_of_a_split_backend_reads_it(runs):
    run = runs["raised"]
    assert run.status != 0
    assert "RESULT" not in run.log
    (record,) = run.dumps
    assert record.finding.kind == "out-of-range"
    where = record.finding.location
    assert (where.runner, where.forward_mode) == ("target", "EXTEND")
    assert "illegal memory access" not in run.log
    assert run.log.index(record.finding.headline) < run.log.index("Scheduler hit an exception")


@pytest.mark.long("an engine without tracers")
def test_without_tracers_the_device_breaks(runs):
    assert runs["bare"].status != 0
    assert "illegal memory access" in runs["bare"].log


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_server_is_left_alone(runs, name):
    """Prefix hits, chunked prefill, retraction through a small pool, aborts.

    SGLang answers all of them alike, whichever the backend, with a draft or without.
    """
    run = runs[name]
    assert run.status == 0, run.log[-3000:]
    assert run.dumps == []
    assert run.result == runs["unarmed"].result
    assert "g4debug: page-table is" not in run.log  # neither limited nor off
    assert "g4debug: the page ledger is off" not in run.log
    assert "SGLang's own tables do not confirm it" not in run.log  # not even a suspicion
    assert "Retract requests" in run.log


@pytest.mark.parametrize("name", NAMES)
def test_the_start_says_which_phase_runs_where(runs, name):
    backends, mtp, _ = ENGINES[name]
    prefill, decode = backends.split(",")
    spec = f", verify on {prefill}, draft on {decode}" if mtp else ""
    line = f"g4debug: page-table: prefill on {prefill}, decode on {decode}{spec}; all guarded"
    assert line in runs[name].log
    assert line not in runs["unarmed"].log
