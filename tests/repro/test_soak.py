"""repro/soak.py --v2: if the server stayed on v1, the run tells nothing of v2 and must not pass."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"


@pytest.fixture
def soak(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("soak")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_a_server_on_v2_says_so_in_the_words_that_are_looked_for(soak, sglang, caplog):
    from types import SimpleNamespace

    from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2 import fix, limits

    args = SimpleNamespace(speculative_algorithm="FROZEN_KV_MTP", disable_overlap_schedule=True)
    fix.around_arguments(lambda _: None, args)
    assert "--disable-overlap-schedule" in soak.stayed_on_v1(caplog.text)
    caplog.clear()
    args.disable_overlap_schedule = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "server_limit", lambda args: "")
        fix.around_arguments(lambda _: None, args)
    assert soak.stayed_on_v1(caplog.text) == ""


def test_a_log_that_says_nothing_of_v2_is_no_pass(soak):
    assert "does not say why" in soak.stayed_on_v1("The server is fired up and ready to roll!")


def test_stress_that_never_struck_is_named(soak):
    struck = "abort-request #1: ...\nforced-retract #1: ...\nradix-evict #1: ..."
    assert soak.unstressed(struck) == ""
    assert "Nothing aborted a request in it" in soak.unstressed(struck.replace("abort-request", ""))


def test_what_sglang_retracts_itself_counts(soak):
    text = "abort-request #1\nradix-evict #1\nDecode: #retracted_reqs: {}\n"
    assert soak.unstressed(text.format(3)) == ""
    assert "retracted one" in soak.unstressed(text.format(0))


def test_what_ranks_do_alike_counts_once(soak):
    """Each tensor-parallel rank logs the same abort."""
    did = (
        "[2026-11-28 04:32:08{}] g4debug fault (seed=11) abort-request #1: ...\n"
        "[2026-11-28 04:32:09{}] g4debug fault (seed=11) radix-evict #1: ...\n"
        "[2026-11-28 04:32:09{}] KV cache pool is full. #retracted_reqs: 3, #new_tokens_gained: 7\n"
        "[2026-11-28 04:32:09{}] Prefill batch, #cached-token: 64, \n"
    )
    one = (
        "Aborts: 1. Retractions: 3. Forced evictions: 1. "
        "Prompt tokens that came from the prefix cache: 64."
    )
    for ranks in ([""], [" TP0"], [" TP0", " TP1"], [" DP0 TP0 EP0", " DP0 TP11 EP11"]):
        assert soak.counts("".join(did.replace("{}", rank) for rank in ranks)) == one


def asked(soak, **given):
    usual = {
        "device": "cpu", "requests": 1, "backend": "", "v2": False, "model": "gemma-4", "draft": "",
        "tp": 1, "tokens": 0, "together": 0, "longest": 0, "sampled": False, "grammar": False,
        "clients": False, "watch": False, "fix": [],
    }  # fmt: skip
    return soak.Namespace(**{**usual, **given})


@pytest.mark.parametrize("watch", [True, False])
def test_watch_is_armed_as_people_arm_it(soak, monkeypatch, tmp_path, watch):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append(given))
    monkeypatch.setattr(soak.tracers, "on_one_rank", lambda: ["page-table"])
    soak.run(True, asked(soak, watch=watch), tmp_path, soak.Console(quiet=True))
    environment = seen[0][1]
    assert environment.get("SGLANG_TRTLLM_MHA_DEBUG") == ("watch" if watch else None)
    assert ("G4DEBUG_TRACE" in environment) is not watch


@pytest.mark.parametrize("armed", [True, False])
def test_a_fix_is_on_in_both_runs_and_must_be_in_force(soak, monkeypatch, tmp_path, armed):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append(given))
    monkeypatch.setattr(soak.tracers, "on_one_rank", lambda: ["page-table"])
    soak.run(armed, asked(soak, fix=["verify-attention"]), tmp_path, soak.Console(quiet=True))
    assert seen[0][1]["G4DEBUG_FIX_VERIFY_ATTENTION"] == "1"


def test_a_fix_that_the_log_does_not_have_in_force_is_no_pass(soak):
    said = "armed: page-table (raise); SGLang 0.5.23; fixes: 2 in force (parked-chunk, x); faults"
    assert soak.not_on(said, []) == ""
    assert soak.not_on(said, ["x", "parked-chunk"]) == ""
    assert soak.not_on(said, ["x", "chunk"]) == "Its log does not say that chunk is in force."
    assert "x is in force" in soak.not_on("nothing", ["x"])


def test_a_run_in_which_nothing_was_armed_is_no_pass(soak):
    said = "x\ng4debug 1.0.0 [scheduler] armed: {}; SGLang 0.5.23; fixes: 6 in force\ny"
    assert "says what is armed" in soak.unarmed("The server is fired up", False)
    assert "says what is armed" in soak.unarmed(said.format("none (raise)"), False)
    every, watch = "flight-recorder, page-table (raise)", "flight-recorder, page-table (watch, log)"
    assert soak.unarmed(said.format(every), False) == ""
    assert soak.unarmed(said.format(watch), True) == ""
    assert "Expected watch, got: g4debug 1.0.0" in soak.unarmed(said.format(every), True)
    assert "Expected every tracer, got:" in soak.unarmed(said.format(watch), False)


def test_sizes_of_production_are_those_of_the_server(soak, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append((given, more)))
    args = asked(soak, device="cuda", tokens=262144, together=64, longest=6000)
    soak.run(False, args, tmp_path, soak.Console(quiet=True))
    ((given, more),) = seen
    assert given[5]["max_total_tokens"] == 262144
    assert given[5]["max_running_requests"] == 64
    assert more["longest"] == 6000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("v2", [True, False])
def test_only_v2_asks_for_overlap_scheduling(soak, monkeypatch, tmp_path, device, v2):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append(given))
    monkeypatch.setattr(soak.tracers, "on_one_rank", lambda: ["page-table"])
    args = asked(soak, device=device, v2=v2)
    soak.run(True, args, tmp_path, soak.Console(quiet=True))
    engine = seen[0][5]
    assert engine.get("disable_overlap_schedule") == (False if v2 else None)


def test_a_backend_is_that_of_prefill_and_decode(soak, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append(given))
    args = asked(soak, backend="triton")
    soak.run(False, args, tmp_path, soak.Console(quiet=True))
    engine = seen[0][5]
    assert engine["prefill_attention_backend"] == engine["decode_attention_backend"] == "triton"


def test_every_second_request_samples_if_that_is_asked_for(soak, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append(more["sampling"]))
    for sampled in (False, True):
        soak.run(False, asked(soak, sampled=sampled), tmp_path, soak.Console(quiet=True))
    assert seen == [False, True]
    ways = [soak.mixed.sampled(number, 7) for number in range(3)]
    assert all(way["temperature"] > 0 and way["max_new_tokens"] == 7 for way in ways)
    assert len({frozenset(way) for way in ways}) == 3


def test_every_third_answer_matches_a_grammar_if_that_is_asked_for(soak, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append(more["grammar"]))
    for grammar in (False, True):
        soak.run(False, asked(soak, grammar=grammar), tmp_path, soak.Console(quiet=True))
    assert seen == [False, True]
    drawn = [soak.mixed.parameters(number, 7, False, True) for number in range(9)]
    with_one = [number for number, way in enumerate(drawn) if {"regex", "json_schema"} & {*way}]
    assert with_one == [2, 5, 8]
    assert not any(drawn[number]["ignore_eos"] for number in with_one)
    assert all(soak.mixed.parameters(number, 7, False, False)["ignore_eos"] for number in range(9))


def test_only_an_answer_that_its_grammar_ended_counts(soak):
    ends = dict(enumerate(("stop", "length", "abort", "stop")))
    outputs = {f"r{number}": {"finish": end} for number, end in ends.items()}
    assert soak.ended_by(soak.Namespace(result={"outputs": outputs}), "stop") == 2


def test_clients_come_again_behind_a_flush_and_nothing_is_injected(soak, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(soak.mixed, "run", lambda *given, **more: seen.append((given, more)))
    soak.run(False, asked(soak, clients=True, requests=100), tmp_path, soak.Console(quiet=True))
    soak.run(False, asked(soak, requests=100), tmp_path, soak.Console(quiet=True))
    (with_clients, more), (usual, less) = seen
    assert "G4DEBUG_FAULTS" not in with_clients[1]
    assert (with_clients[4], more["waves"], more["clients"]) == (100, 2, True)
    assert "G4DEBUG_FAULTS" in usual[1]
    assert (usual[4], less["waves"], less["clients"]) == (100, 1, False)


def test_some_clients_go_at_once_some_in_the_middle_and_most_stay(soak):
    clients = importlib.import_module("harness.clients")
    leave = [clients.leaves_after(number, 10) for number in range(300)]
    assert leave.count(0) == 12
    assert leave.count(5) == 24
    assert leave.count(None) == 300 - 36


def test_without_faults_only_a_retraction_is_asked_for(soak):
    assert soak.unstressed("#retracted_reqs: 2", clients=True) == ""
    assert "Nothing retracted one in it" in soak.unstressed("", clients=True)
