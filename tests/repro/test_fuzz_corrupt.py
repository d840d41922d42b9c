"""repro/fuzz.py --corrupt: a seed is a corruption, every one can come, and each is graded."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from g4debug.hooking import targets

pytestmark = pytest.mark.skipif(
    targets.sglang_version() is None, reason="needs sglang: what is struck is its own"
)


@pytest.fixture
def suite(suite):
    names = ("corruption", "strike", "grade", "forks", "corrupt", "page")
    return SimpleNamespace(**{n: suite(f"fuzz.{n}") for n in names})


def test_a_seed_is_a_corruption(suite):
    draw = suite.corruption.draw
    assert [draw(seed, True) for seed in range(50)] == [draw(seed, True) for seed in range(50)]
    assert len({draw(seed, True) for seed in range(50)}) == 50
    forms = range(suite.corruption.FORMS, suite.corruption.FORMS + 50)
    assert [draw(seed, True) for seed in forms] == [draw(seed, True) for seed in forms]


def test_a_seed_below_the_forms_draws_what_it_always_drew(suite):
    """Whoever noted a seed finds the same again."""
    drawn = [suite.corruption.draw(seed, mtp) for seed, mtp in ((8, True), (37, False), (60, True))]
    assert [(c.what, c.moment, c.to, c.step, c.mode, c.pool, c.slot) for c in drawn] == [
        ("next_tokens", "result", "next", 9, "DECODE", "full", "last"),
        ("free_list", "plan", "outside", 13, "", "full", "last"),
        ("accept_lens", "verified", "minus_one", 24, "", "full", "last"),
    ]
    assert {suite.corruption.draw(s, True).form for s in range(suite.corruption.FORMS)} == {"value"}


@pytest.mark.parametrize("mtp", [True, False])
def test_every_form_can_come_where_there_is_something_to_swap_or_rotate(suite, mtp):
    it = suite.corruption
    drawn = [it.draw(seed, mtp) for seed in range(it.FORMS, it.FORMS + 3000)]
    kinds = {(f, w) for f, of in it.FORM.items() for w in of if mtp or w not in it.SPECULATIVE}
    assert {(c.form, c.what) for c in drawn} == kinds
    assert all(bool(c.to) == (c.form == it.VALUE) for c in drawn)
    assert len({c.words for c in drawn}) > 1000
    swapped = next(c for c in drawn if c.form == it.SWAP)
    assert "swapped with another" in swapped.words


@pytest.mark.parametrize("mtp", [True, False])
def test_every_class_can_come(suite, mtp):
    it = suite.corruption
    drawn = [it.draw(seed, mtp) for seed in range(3000)]
    whats = {name for name in it.WHAT if mtp or name not in it.SPECULATIVE}
    assert {c.what for c in drawn} == whats
    moments = {(w, m) for w in whats for m in it.WHAT[w][1] if mtp or m != it.VERIFY}
    assert {(c.what, c.moment) for c in drawn} == moments
    values = {(w, to) for w in whats for to in it.TO if to not in it.NO.get(w, ())}
    assert {(c.what, c.to) for c in drawn} == values
    assert {c.pool for c in drawn} == {"full", "swa"}
    assert {c.slot for c in drawn} == {"first", "middle", "last"}
    assert {c.mode for c in drawn} == set(it.MODES)
    assert {suite.corrupt.server_of(seed) for seed in range(8)} == set(suite.corrupt.SERVERS)


@pytest.mark.parametrize("mtp", [True, False])
def test_a_seed_from_wider_on_strikes_what_the_host_keeps(suite, mtp):
    it = suite.corruption
    drawn = [it.draw(seed, mtp) for seed in range(it.WIDER, it.WIDER + 3000)]
    assert {(c.form, c.what) for c in drawn} == {
        (f, w) for f, of in it.BOOKS_FORM.items() for w in of
    }
    assert {(c.what, c.moment) for c in drawn} == {(w, m) for w in it.BOOKS for m in it.BOOKS[w][1]}
    assert {c.mode for c in drawn if c.what == "extend_lens"} == {"EXTEND"}
    before = [it.draw(seed, mtp) for seed in range(it.WIDER - 3000, it.WIDER)]
    assert not {c.what for c in before} & {*it.BOOKS}


def test_each_has_somebody_who_knows_where_it_is(suite):
    assert all(hasattr(suite.strike.Strike, f"_{what}") for what in suite.corruption.EVERYWHERE)
    rotated = suite.corruption.FORM[suite.corruption.ROTATE]
    assert all(hasattr(suite.strike.Strike, f"_{what}_pages") for what in rotated)
    assert {what for what, _ in suite.grade.SLOW} <= set(suite.corruption.EVERYWHERE)


def case(suite, **more):
    given = {
        "seed": 1, "what": "next_tokens", "moment": "result", "to": "next", "step": 3, "mode": "",
        "pool": "full", "request": 0.0, "place": 0.99, "slot": "first",
    }  # fmt: skip
    return suite.corruption.Corruption(**{**given, **more})


def test_it_strikes_once_at_its_step_and_in_its_mode(suite):
    clock = SimpleNamespace(step=2)
    strike = suite.strike.Strike(case(suite, mode="DECODE"), None, lambda: clock.step)

    def tokens(mode, moment="result"):
        result = SimpleNamespace(next_token_ids=torch.tensor([5, 6]))
        strike.at(moment, mode, returned=result)
        return result.next_token_ids.tolist()

    assert tokens("DECODE") == [5, 6]  # too early
    clock.step = 3
    assert tokens("EXTEND") == tokens("DECODE", "step") == [5, 6]
    assert strike.fired is None
    assert tokens("TARGET_VERIFY") == [5, 7]
    assert strike.fired == {
        "step": 3, "mode": "TARGET_VERIFY", "words": "next_token_ids[1]: 6 -> 7", "note": ""
    }  # fmt: skip
    assert tokens("DECODE") == [5, 6]
    assert strike.failed == ""


def test_a_mistake_of_the_suite_is_told_apart(suite):
    strike = suite.strike.Strike(case(suite, what="row", moment="step", step=0), None, lambda: 1)
    strike.requests["a"] = object()
    strike.at("step")
    assert strike.failed
    assert suite.grade.grade(case(suite), {"failed": strike.failed}, {}).verdict == "broken"


def request(rid, row, length, computed):
    return SimpleNamespace(
        rid=rid, req_pool_idx=row, kv_allocated_len=length, kv_committed_len=computed, prefix_len=0
    )


@pytest.fixture
def server(suite):
    """``server(**case)``: a strike on two requests with pages of four tokens, in rows 0 and 1."""

    def made(backend="trtllm_mha", computed=10, **more):
        table = torch.arange(4, 36).view(2, 16)
        pages = SimpleNamespace(free_pages=torch.tensor([12]))
        keys = torch.arange(40.0).view(40, 1, 1)
        pages.get_kvcache = lambda: SimpleNamespace(k_buffer=[keys])
        scheduler = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=4, full_attn_allocator=pages),
            server_args=SimpleNamespace(attention_backend=backend),
            tree_cache=SimpleNamespace(),
        )
        given = {"moment": "step", "step": 1, "place": 0.0, **more}
        strike = suite.strike.Strike(case(suite, **given), scheduler, lambda: 1, lambda: 2)
        batch = SimpleNamespace(reqs=[request("a", 0, 12, computed), request("b", 1, 13, 13)])
        strike.at("result", batch=batch)  # a step has run
        strike.batch, strike.keys = batch, keys
        return strike

    return made


def strike_at(strike, moment="step"):
    strike.at(moment, "DECODE", batch=strike.batch)
    assert strike.failed == ""
    return strike.fired


def test_two_elements_are_swapped(server):
    strike = server(what="row", form="swap", to="", other=0.99)
    before = strike.table.clone()
    fired = strike_at(strike)
    assert fired["words"] == "req_to_token[0, 0] of a: 4 -> 12, req_to_token[0, 8] of a: 12 -> 4"
    assert (strike.table != before).nonzero().tolist() == [[0, 0], [0, 8]]
    assert strike.table[0, [0, 8]].tolist() == [12, 4]


def test_what_is_handed_over_as_a_new_tensor_is_swapped_too(suite):
    for other, expected in ((0.0, [6, 5, 5]), (0.99, [6, 5, 5])):
        given = case(suite, form="swap", to="", step=0, place=0.0, other=other)
        result = SimpleNamespace(next_token_ids=torch.tensor([5, 6, 5]))
        kept = result.next_token_ids
        strike = suite.strike.Strike(given, None, lambda: 1)
        strike.at("result", "DECODE", returned=result)
        assert strike.failed == ""
        assert result.next_token_ids.tolist() == expected
        assert kept.tolist() == [5, 6, 5]  # somebody else may hold it
    alone = suite.strike.Strike(given, None, lambda: 1)
    alone.at("result", "DECODE", returned=SimpleNamespace(next_token_ids=torch.tensor([5, 5])))
    assert alone.fired is None  # nothing to be swapped with


def host_keeps(strike):
    """The books of request a and b, and of their pools."""
    a, b = strike.batch.reqs
    a.output_ids, a.origin_input_ids, b.swa_evicted_seqlen = array("q", [7, 8]), [5, 6, 9], 4
    a.swa_evicted_seqlen = 8
    strike.scheduler.req_to_token_pool.free_slots = [2, 3, 4]
    strike.inner("full").release_pages = torch.tensor([3, 9])
    return a, b


@pytest.mark.parametrize(
    ("what", "to", "words", "read"),
    [
        ("lengths", "own", "kv_committed_len of a: 10 -> 5", lambda s, a: a.kv_committed_len),
        ("host_row", "other", "req_pool_idx of a: 0 -> 1", lambda s, a: a.req_pool_idx),
        ("output", "next", "output_ids of a[0]: 7 -> 8", lambda s, a: a.output_ids[0]),
        ("prompt", "own", "origin_input_ids of a[0]: 5 -> 23", lambda s, a: a.origin_input_ids[0]),
        ("free_rows", "other", "the free rows[0]: 2 -> 0",
         lambda s, a: s.scheduler.req_to_token_pool.free_slots[0]),
        ("released", "freed", "a released page of the full pool: 3 -> 12",
         lambda s, a: int(s.inner("full").release_pages[0])),
    ],
)  # fmt: skip
def test_what_the_host_keeps_gets_another_value(server, what, to, words, read):
    strike = server(what=what, to=to)
    a, _ = host_keeps(strike)
    assert strike_at(strike)["words"] == words
    assert read(strike, a) == int(words.rpartition(" ")[2])


def test_two_tokens_of_an_answer_are_swapped_where_they_are(server):
    strike = server(what="output", form="swap", to="", other=0.99)
    a, _ = host_keeps(strike)
    kept = a.output_ids
    strike_at(strike)
    assert a.output_ids is kept
    assert kept.tolist() == [8, 7]


def test_lengths_of_a_batch_are_changed_on_the_host_alone(server):
    strike = server(what="host_lens", to="own", place=0.99)
    strike.batch.seq_lens = torch.tensor([10, 13])
    strike.batch.seq_lens_cpu, strike.batch.prefix_lens = torch.tensor([10, 13]), [4, 6]
    assert strike_at(strike)["words"] == "prefix_lens[1]: 6 -> 3"
    assert strike.batch.prefix_lens == [4, 3]
    assert strike.batch.seq_lens.tolist() == strike.batch.seq_lens_cpu.tolist() == [10, 13]


def test_the_pages_of_a_row_are_rotated(server):
    strike = server(what="row", form="rotate", to="", place=0.99)
    before = strike.table.clone()
    fired = strike_at(strike)
    assert fired["words"] == "req_to_token[1] of b: 3 pages, rotated by one"
    assert torch.equal(strike.table[0], before[0])
    row = before[1].tolist()
    assert strike.table[1].tolist() == [
        *row[4:12],
        *row[:4],
        *row[12:],
    ]  # the last is no whole page


def test_the_swa_pages_of_a_row_are_rotated_behind_its_window(server):
    strike = server(what="mapping", form="rotate", to="")
    mapping = torch.arange(40) * 2
    mapping[4:8] = 0  # evicted
    strike.allocator.full_to_swa_index_mapping = mapping
    fired = strike_at(strike)
    assert fired["words"] == "mapping of the slots of a: 2 pages, rotated by one"
    assert mapping[4:16].tolist() == [0, 0, 0, 0, 24, 26, 28, 30, 16, 18, 20, 22]


def test_the_pages_of_a_page_table_and_of_a_list_are_rotated(server):
    strike = server(what="table", form="rotate", to="", place=0.0, moment="metadata")
    pages = SimpleNamespace(page_table=torch.tensor([[0, 2, 3, 4], [5, 6, 7, 0]]))
    strike.batch.seq_lens = torch.tensor([17, 12])
    strike.at(
        "metadata", "DECODE", batch=strike.batch, backend=SimpleNamespace(forward_metadata=pages)
    )
    assert pages.page_table.tolist() == [[0, 3, 4, 2], [5, 6, 7, 0]]  # behind the window is no page
    strike = server(what="table", form="rotate", to="", place=0.99, moment="metadata")
    lists = SimpleNamespace(kv_indices=torch.arange(17), kv_indptr=torch.tensor([0, 8, 17]))
    strike.batch.seq_lens = torch.tensor([8, 9])
    strike.at(
        "metadata", "DECODE", batch=strike.batch, backend=SimpleNamespace(forward_metadata=lists)
    )
    assert strike.failed == ""
    assert lists.kv_indices.tolist() == [*range(8), 12, 13, 14, 15, 8, 9, 10, 11, 16]


def test_the_pages_of_a_match_are_rotated(server):
    strike = server(what="node", form="rotate", to="", moment="match")
    match, found = torch.arange(40, 50), []
    strike.at("match", returned=match, put=found.append)
    assert strike.failed == ""
    assert found[0].tolist() == [44, 45, 46, 47, 40, 41, 42, 43, 48, 49]
    assert match.tolist() == list(range(40, 50))
    assert strike.fired["step"] == 2  # it belongs to the step that it is matched for


@pytest.mark.parametrize(
    ("computed", "note"),
    [(7, "in the last, unfinished page of a request"), (8, "")],
)
def test_kv_of_an_unfinished_page_is_noted(server, computed, note):
    strike = server(what="kv", to="own", slot="first", computed=computed, place=0.6)  # token 4
    strike.keys[:] = 0.5
    fired = strike_at(strike)
    assert fired["note"] == note
    assert (strike.keys != 0.5).sum() == 1


@pytest.mark.parametrize(
    ("backend", "slot", "computed", "note"),
    [
        ("trtllm_mha", "first", 12, ""),
        ("trtllm_mha", "middle", 12, "not at the begin of a page, where page tables are read"),
        ("triton", "middle", 12, ""),
        ("triton", "middle", 2, "of a token that is not computed yet"),
    ],
)
def test_what_is_read_later_is_noted(server, backend, slot, computed, note):
    strike = server(what="row", to="zero", slot=slot, backend=backend, computed=computed)
    assert strike_at(strike)["note"] == note


def test_a_strike_belongs_to_the_step_that_feels_it_first(server):
    assert strike_at(server(what="row", to="zero", moment="step"))["step"] == 2
    assert strike_at(server(what="row", to="zero", moment="plan"), "plan")["step"] == 2


@pytest.mark.parametrize(("form", "to"), [("value", "zero"), ("swap", ""), ("rotate", "")])
def test_a_request_that_waits_feels_a_strike_when_it_runs_again(server, form, to):
    strike = server(what="row", form=form, to=to)
    a, b = strike.batch.reqs
    clock = SimpleNamespace(step=2)
    strike.step = strike.coming = lambda: clock.step
    assert strike_at_with(strike, [b])["step"] == 2
    for clock.step, running in ((3, [b]), (5, [b, a]), (6, [a])):
        strike_at_with(strike, running)
    assert strike.fired["step"] == 5


def test_a_request_that_runs_feels_a_strike_at_once(server):
    strike = server(what="row", to="zero")
    assert strike_at_with(strike, strike.batch.reqs)["step"] == 2
    strike.coming = lambda: 9
    assert strike_at_with(strike, strike.batch.reqs)["step"] == 2


def test_a_prefill_does_not_feel_what_only_a_decode_reads(server):
    strike = server(what="future", form="value", to="next")
    strike.scheduler.future_map = SimpleNamespace(output_tokens_buf=torch.arange(4))
    clock = SimpleNamespace(step=2)
    strike.step = strike.coming = lambda: clock.step
    both = strike.batch.reqs
    assert strike_at_with(strike, both, extends=True)["step"] == 2
    for clock.step, extends in ((3, True), (4, False), (5, False)):
        strike_at_with(strike, both, extends=extends)
    assert strike.fired["step"] == 4


def strike_at_with(strike, running, extends=False):
    mode = SimpleNamespace(is_extend=lambda: extends)
    strike.at("step", "DECODE", batch=SimpleNamespace(reqs=running, forward_mode=mode))
    assert strike.failed == ""
    return strike.fired


PLAIN = {"tokens": {"a": [1, 2]}, "disarmed": ["spec-lifecycle is off: nothing to check"]}
FIRED = {"fired": {"step": 6, "note": ""}, "tokens": PLAIN["tokens"], "disarmed": PLAIN["disarmed"]}
FINDING = {"check": "page-table", "kind": "stale", "step": 7, "headline": "g4debug: page-table"}


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        ({**FIRED, "finding": FINDING, "tokens": {"a": [9]}}, "told"),
        ({**FIRED, "findings": [["pool-leak", "lost", 7]]}, "told"),
        ({**FIRED, "finding": {**FINDING, "step": 8}}, "late"),
        ({**FIRED, "finding": {**FINDING, "step": 501}}, "late"),
        ({**FIRED, "findings": [["pool-leak", "lost", 8]]}, "late"),
        # Not the last that is told counts.
        (
            {**FIRED, "finding": {**FINDING, "step": 30}, "findings": [["pool-leak", "x", 6]]},
            "told",
        ),
        ({**FIRED, "findings": [["flight-recorder", "hang", 6]]}, "missed"),
        ({**FIRED, "findings": [["flight-recorder", "exception", 6]], "error": "x"}, "missed"),
        ({**FIRED, "finding": {**FINDING, "check": "flight-recorder"}}, "missed"),
        ({**FIRED, "findings": [["flight-recorder", "hang", 6], ["pool-leak", "x", 7]]}, "told"),
        (FIRED, "harmless"),
        ({**FIRED, "tokens": {"a": [9]}}, "missed"),
        ({**FIRED, "error": "IndexError: …"}, "missed"),
        ({**FIRED, "finding": FINDING, "disarmed": ["ledger is off: …"]}, "disarmed"),
        ({**FIRED, "fired": None, "finding": FINDING}, "false"),
        ({**FIRED, "fired": None, "findings": [["pool-leak", "lost", 7]]}, "false"),
        ({**FIRED, "fired": None}, "nothing"),
    ],
)
def test_what_comes_of_it_is_graded(suite, got, verdict):
    graded = suite.grade.grade(case(suite, what="row"), got, PLAIN, page="nothing is said")
    assert graded.verdict == verdict
    if graded.tracer == "page-table" and verdict == "told":
        assert graded.late == 1


def test_what_nothing_reads_before_may_be_told_later_and_not_at_any_time(suite):
    def graded(what, note, late):
        fired = {"step": 6, "note": note}
        got = {**FIRED, "fired": fired, "finding": {**FINDING, "step": 6 + late}}
        return suite.grade.grade(case(suite, what=what), got, PLAIN, page="nothing is said")

    for (what, note), why in suite.grade.SLOW.items():
        assert (graded(what, note, 40).verdict, graded(what, note, 40).allowed) == ("told", why)
        assert graded(what, note, suite.grade.LIFE + 1).verdict == "late"
        assert graded(what, note, 1).allowed == ""
    assert graded("row", "", 2).verdict == "late"
    assert graded("next_tokens", suite.strike.AHEAD, 2).verdict == "late"


def test_what_cannot_be_seen_must_be_said_by_the_page(suite):
    def graded(note, page):
        wrong = {**FIRED, "fired": {"step": 6, "note": note}, "tokens": {"a": [9]}}
        return suite.grade.grade(case(suite, what="kv"), wrong, PLAIN, page)

    note, begin = suite.strike.UNFINISHED, suite.grade.CANNOT_SEE[suite.strike.UNFINISHED]
    page = f"One. It is so that\n{begin} here. Three."
    assert graded(note, page).verdict == "listed"
    assert graded(note, page).text == f"It is so that {begin} here."
    assert graded(note, "One. Three.").verdict == "missed"
    assert graded("", page).verdict == "missed"  # kv-integrity must tell it in a finished page


def test_a_page_in_doubt_disarms(suite):
    doubt = "ledger: a page in doubt counts as what SGLang's own structures say of it: full pages 4"
    got = {
        "fired": {"step": 6, "note": suite.strike.UNFINISHED},
        "tokens": {"a": [9]},
        "disarmed": [*PLAIN["disarmed"], doubt],
    }
    assert suite.grade.grade(case(suite, what="mapping"), got, PLAIN).verdict == "disarmed"


def test_the_page_says_each_sentence(suite):
    page = suite.grade.TRACERS.read_text()
    for note in suite.grade.CANNOT_SEE:
        assert suite.grade.sentence(note, page), note
        assert suite.grade.sentence(note, "") == ""
    assert suite.grade.sentence("", page) == ""


def test_nothing_is_compared_with_a_server_that_is_not_sound(suite):
    unfit = suite.corrupt.unfit
    good = {"tokens": {"a": [1]}}
    assert unfit(good, good) == ""
    assert "different tokens" in unfit(good, {"tokens": {"a": [2]}})
    assert "no requests" in unfit({"tokens": {}}, {"tokens": {}})
    assert "traffic" in unfit({}, good)
    assert "false" in unfit({**good, "finding": FINDING}, good)
    assert "false" in unfit(good, {**good, "findings": [["pool-leak", "lost", 1]]})
    assert "ends" in unfit(good, {**good, "error": "it stood still"})


def test_a_run_prints_a_table_and_a_line_of_json_for_each(suite, monkeypatch, tmp_path):
    from rich.console import Console

    def launch(module, arguments, environ, armed, folder, timeout):
        folder.mkdir(parents=True)
        for name in ("plain", "again"):
            (folder / f"{name}.json").write_text(json.dumps(PLAIN))
        for seed in arguments["seeds"]:
            found = {**FIRED, "finding": FINDING} if seed < 8 else {**FIRED, "tokens": {}}
            (folder / f"{seed}.json").write_text(json.dumps(found))
        return SimpleNamespace(completed=True)

    monkeypatch.setattr(suite.corrupt, "launch", launch)
    with Path(tmp_path / "out").open("w") as sink:
        console = Console(file=sink, width=200)
        out = tmp_path / "fuzz.md"
        assert suite.corrupt.run(console, 1, 7, tmp_path / "good", out)
        bad = suite.corrupt.run(console, 8, 3, tmp_path / "bad")
    lines = [json.loads(x) for x in (tmp_path / "good" / "cases.jsonl").read_text().splitlines()]
    assert sorted(line["seed"] for line in lines) == list(range(1, 8))
    assert {line["verdict"] for line in lines} == {"told"}
    said = (tmp_path / "out").read_text()
    assert "7 told" in said
    assert bad is False
    assert "3 missed" in said
    assert "the seeds 1 to 7," in out.read_text()
