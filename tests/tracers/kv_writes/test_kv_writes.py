"""kv-writes on SGLang's real pools, allocator and backend: findings, words and repairs."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, PlainRig, Rig
from served_rows import TOKENS
from writing import ARMED, NEW, Writing, put, scheduled, swa_loc

from g4debug import plugin
from g4debug.tracers.kv_writes import canary, check
from g4debug.tracers.kv_writes.tracer import KvWritesTracer
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


@pytest.fixture
def it(arm):
    arm(**ARMED)
    return Writing()


@pytest.fixture
def contained(arm):
    arm(**ARMED, G4DEBUG_MODE="contain")
    return Writing()


@pytest.mark.parametrize("mode", NEW)
@pytest.mark.parametrize("rig", [Rig, PlainRig])
def test_sound_writes_are_looked_at_and_left_alone(arm, mode, rig):
    arm(**ARMED)
    it = Writing.__new__(Writing)
    it.rig_class = rig
    it.__init__()
    batch = it.forward(mode)
    status = next(t for t in plugin.in_force.recorder.status.records() if t.name == "kv-writes")
    pools = 2 if rig is Rig else 1
    assert {c.what: c.count for c in status.checked}["locations"] == (
        pools * len(batch.out_cache_loc)
    )
    assert not plugin.in_force.recorder.status.records()[0].limits


@pytest.mark.parametrize("mode", NEW)
def test_each_row_of_each_mode_is_compared_with_its_own_place(it, mode):
    """The first and the last token of each row are moved to a page that nobody has."""
    new = NEW[mode]
    free = [p for p in it.rig.allocator.full_attn_allocator.free_pages.tolist() if p]
    for row, rid in enumerate(TOKENS):
        for j in {0, new - 1}:
            spoil = put(row * new + j, free[0] * PAGE + 5)
            finding, _ = it.found(mode, spoil, it.full_layers())
            position = TOKENS[rid] - new + j
            place = it.right(rid, position)
            assert finding.kind == "stale"
            assert f"token {position} (request {rid}, row {row})" in finding.headline
            assert f"its place is slot {place} (page {place // PAGE})" in finding.headline
            assert finding.location.row == row
            assert finding.location.column == position // PAGE


def test_a_location_that_the_pool_does_not_have(it):
    slots = it.rig.allocator.size_full + PAGE
    finding, _ = it.found("decode", put(1, slots), it.full_layers())
    assert finding.kind == "out-of-range"
    assert f"slot {slots}, but its FULL pool has {slots} slots" in finding.headline
    assert "target decode: full layer 2" in finding.headline
    finding, _ = it.found("decode", put(1, -1), it.full_layers())
    assert finding.kind == "negative"


def test_another_requests_place(it):
    theirs = it.right("c", 30)
    finding, record = it.found("decode", put(0, theirs), it.full_layers())
    assert finding.kind == "other-request"
    assert f"slot {theirs}, page {theirs // PAGE} of request c, but its place" in finding.headline
    assert "was handed out to request c for tokens 16..31, and is still held" in finding.owner
    assert record.events


def test_a_free_page(it):
    page = next(p for p in it.rig.allocator.full_attn_allocator.free_pages.tolist() if p)
    finding, _ = it.found("decode", put(0, page * PAGE), it.full_layers())
    assert finding.kind == "stale"
    assert f"page {page} (free)" in finding.headline


def test_the_reserved_page(it):
    finding, _ = it.found("decode", put(0, 3), it.full_layers())
    assert finding.kind == "page-zero"


def test_two_tokens_at_one_place(it):
    theirs = it.right("b", TOKENS["b"] - 1)
    finding, _ = it.found("decode", put(0, theirs), it.full_layers())
    assert finding.kind == "written-twice"
    assert f"another token of row 1 to the same place, slot {theirs}" in finding.headline


@pytest.mark.parametrize("name", ["extend_seq_lens", "extend_start_loc"])
@pytest.mark.parametrize("value", [-1, 0, 9, 11, 1 << 20])
def test_wrong_numbers_of_a_prefill_on_the_device_switch_nothing_off(it, name, value):
    """The host has them, too, and has laid the tokens one behind the other."""
    batch = it.made("extend")
    getattr(batch, name)[0] = value
    it.backend.forward_metadata = it.metadata()
    it.write(batch)
    status = plugin.in_force.recorder.status.records()
    assert not next(t for t in status if t.name == "kv-writes").limits
    batch.out_cache_loc[3] += 1
    with pytest.raises(TrapError):
        it.write(batch)


def test_a_row_that_names_one_page_twice(it):
    """Each location is what req_to_token says, and still two tokens share one."""
    row = it.row("b")
    row[80:96] = row[64:80].clone()
    batch = it.made("extend")
    batch.extend_prefix_lens, batch.extend_seq_lens = torch.tensor([64]), torch.tensor([32])
    batch.extend_start_loc, batch.extend_seq_lens_cpu = torch.tensor([0]), [32]
    batch.req_pool_indices = batch.req_pool_indices[1:2]
    batch.out_cache_loc = row[64:96].long()
    it.backend.forward_metadata = it.metadata()
    with pytest.raises(TrapError) as error:
        it.write(batch, it.full_layers())
    assert error.value.finding.kind == "written-twice"
    assert "which is its own" in error.value.finding.headline
    assert "two cells of req_to_token name one place" in error.value.finding.cause


@pytest.mark.parametrize("layers", ["full_layers", "sliding_layers"])
def test_a_row_that_was_overwritten_behind_the_allocation_is_blamed_itself(it, layers):
    """The location is right, and the row names the request's first page in its last column."""
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    row = it.row("b")
    row[96:112] = row[:16].clone()
    with pytest.raises(TrapError) as error:
        it.write(batch, getattr(it, layers)())
    finding = error.value.finding
    assert finding.kind in ("mismatch", "other-request")
    assert "of req_to_token is wrong: it names page " in finding.cause
    assert "which was handed out to the request itself for tokens 0..15" in finding.cause
    assert re.search(r"its place is slot \d+ \(page \d+\) by row \d+ of", finding.headline)
    assert "for this token" not in finding.expected


def test_a_wrong_cache_protected_len_costs_no_judgement_of_whose_a_page_is(arm, caplog):
    """The prefix cache holds nothing of what it counts as cached, in step after step."""
    arm(**ARMED, G4DEBUG_MODE="contain")
    it = Writing(cached=48)
    scheduled(it)
    for _ in range(12):
        it.forward("extend", None, it.full_layers())
    assert any("the prefix cache does not hold page" in line for line in caplog.messages)
    assert it.ledger.owners.given_up == ""


def test_no_kv_is_written_to_the_page_that_a_wrong_row_names(contained):
    it = contained
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    row = it.row("b")
    row[96:112] = row[:16].clone()
    slots, keys = row[:16].long(), [x.layer_id for x in it.full_layers()]
    before = [it.rig.pool.get_key_buffer(n)[slots].clone() for n in keys]
    it.write(batch, it.full_layers())
    after = [it.rig.pool.get_key_buffer(n)[slots] for n in keys]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_sliding_layers_have_places_of_their_own(it):
    def spoil(batch):
        swa_loc(it)[1] += 1

    finding, _ = it.found("decode", spoil, it.sliding_layers())
    assert finding.location.layer_kind == "sliding"
    assert "sliding layer 0 writes the KV of token 99 (request b, row 1)" in finding.headline
    mapped = int(it.rig.allocator.full_to_swa_index_mapping[it.right("b", 99)])
    assert f"its place is slot {mapped} (page {mapped // PAGE})" in finding.headline


def test_a_mapping_that_is_wrong_is_found_and_does_not_cost_the_ledger(it):
    """The location is what the mapping says, and the mapping names another request's page."""
    scheduled(it)
    it.ledger.holders.scheduler.running_batch = SimpleNamespace(reqs=list(it.requests.values()))
    mapping = it.rig.allocator.full_to_swa_index_mapping
    theirs = int(mapping[it.right("c", 59)]) // PAGE * PAGE
    begin = it.right("a", 48) // PAGE * PAGE
    mapping[begin : begin + PAGE] = torch.arange(theirs, theirs + PAGE)
    finding, _ = it.found("decode", None, it.sliding_layers())
    assert finding.kind == "other-request"
    assert "full_to_swa_index_mapping is wrong" in finding.cause
    assert not it.ledger.broken


def test_full_locations_in_a_sliding_layer(it):
    def spoil(batch):
        swa_loc(it).copy_(batch.out_cache_loc)

    finding, _ = it.found("decode", spoil, it.sliding_layers())
    assert finding.kind in ("out-of-range", "other-request", "stale", "mismatch")


def test_a_place_that_was_freed(it):
    """The row still names it, and the allocator may give it to anybody."""
    place = it.right("a", TOKENS["a"] - 1)
    it.rig.allocator.free(torch.tensor([place]))
    finding, _ = it.found("decode", None, it.full_layers())
    assert finding.kind == "use-after-free"
    assert f"to full page {place // PAGE}, which is free" in finding.headline


def test_a_row_that_names_another_requests_page(it):
    scheduled(it)
    page = it.rig.page("c", 3)
    it.row("a")[48:64].copy_(torch.arange(page * PAGE, (page + 1) * PAGE))
    finding, _ = it.found("decode", None, it.full_layers())
    assert finding.kind == "foreign-page"
    assert f"token 49 (request a, row 0) to full page {page} of request c" in finding.headline


def test_a_place_in_the_prefix_cache(arm):
    """The prefill begins before the end of the cached tokens."""
    arm(**ARMED)
    it = Writing(cached=48)
    scheduled(it, cached=it.row("a")[:48].tolist())
    finding, _ = it.found("extend", None, it.full_layers())  # tokens 40.. of a
    assert finding.kind == "cached-page"
    assert "which the prefix cache holds" in finding.headline


def test_it_is_no_finding_where_the_prefix_cache_does_not_hold_it(arm, caplog):
    arm(**ARMED)
    it = Writing(cached=48)
    scheduled(it)
    it.forward("extend", None, it.full_layers())
    assert any("SGLang's own tables do not confirm it" in m for m in caplog.messages)


@pytest.mark.parametrize(("value", "why"), [(lambda it: 10**6, "far"), (lambda it: -5, "before")])
def test_raise_mode_never_writes_outside_of_the_pool(it, value, why):
    """No other location of SGLang's is changed."""
    seen = []
    pool = it.rig.pool.full_kv_pool
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    put(1, value(it))(batch)
    tracer = tracer_of()
    tracer.poll = lambda: None
    around_pool(it, seen)
    it.write(batch, it.full_layers())
    right = [it.right(rid, n - 1) for rid, n in TOKENS.items()]
    assert seen == [right] * 2  # both full layers; the right place is known
    assert pool.size + PAGE > max(right)


def tracer_of() -> KvWritesTracer:
    hooks = plugin.in_force.hooks
    return next(e.around.__self__ for e in hooks._entries["attn.forward"] if e.owner == "kv-writes")


def around_pool(it, seen):
    """Note where the full pool is really written, and write there."""
    pool = it.rig.pool.full_kv_pool
    inner = pool._store_kv_layer if hasattr(pool, "_store_kv_layer") else None
    if inner is not None:

        def store(index, loc, k, v):
            seen.append(loc.tolist())
            return inner(index, loc, k, v)

        pool._store_kv_layer = store
        return
    from sglang.srt.mem_cache import memory_pool

    def impl(k, v, k_cache, v_cache, indices, **kwargs):
        seen.append(indices.tolist())

    pool.g4debug_saved = memory_pool._set_kv_buffer_impl
    memory_pool._set_kv_buffer_impl = impl


@pytest.fixture(autouse=True)
def _restored(_sglang_imported):
    from sglang.srt.mem_cache import memory_pool

    saved = memory_pool._set_kv_buffer_impl
    yield
    memory_pool._set_kv_buffer_impl = saved


def test_contain_mode_writes_to_the_right_place(contained):
    it, seen = contained, []
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    put(0, it.right("c", 30))(batch)
    around_pool(it, seen)
    it.write(batch, it.full_layers())
    assert seen == [[it.right(rid, n - 1) for rid, n in TOKENS.items()]] * 2


def test_contain_mode_gives_up_the_kv_whose_place_is_gone(contained):
    it, seen = contained, []
    place = it.right("a", TOKENS["a"] - 1)
    it.rig.allocator.free(torch.tensor([place]))
    around_pool(it, seen)
    it.forward("decode", None, it.full_layers())
    assert [x[0] for x in seen] == [0, 0]


def test_log_mode_changes_nothing(arm):
    arm(**ARMED, G4DEBUG_MODE="log")
    it, seen = Writing(), []
    wrong = it.right("c", 30)
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    put(0, wrong)(batch)
    around_pool(it, seen)
    it.write(batch, it.full_layers())
    assert [x[0] for x in seen] == [wrong, wrong]


def test_one_check_for_each_forward_and_pool(it, monkeypatch):
    calls = []
    real = check.reference
    monkeypatch.setattr(check, "reference", lambda *a, **k: calls.append(a) or real(*a, **k))
    it.forward("decode")
    assert len(calls) == 2
    it.forward("decode")
    assert len(calls) == 4


def test_locations_of_the_fused_fp8_kernel(it):
    """It is past the pool: trtllm_mha asks _get_layer_cache_loc."""
    batch = it.made("decode")
    it.backend.init_forward_metadata(batch)
    put(1, -1)(batch)
    with pytest.raises(TrapError) as error:
        it.backend._get_layer_cache_loc(it.full_layers()[0], batch)
    assert error.value.finding.kind == "negative"


def test_a_prefill_that_does_not_say_which_token_is_which_is_checked_for_ranges(it):
    def spoil(batch):
        batch.extend_prefix_lens = None
        batch.out_cache_loc = batch.out_cache_loc.flip(0)

    it.forward("extend", spoil, it.full_layers())
    finding, _ = it.found("extend", lambda b: (spoil(b), put(2, -9)(b)), it.full_layers())
    assert finding.kind == "negative"
    assert "writes the KV of a token to slot -9" in finding.headline


def test_a_draft_is_not_judged(it):
    draft = it.rig.backend(draft=True)
    known = tracer_of().backends.known
    assert id(draft) not in known
    assert id(it.backend) in known


def test_it_is_told_that_a_draft_with_kv_of_its_own_is_not_judged(it):
    runner = it.rig.runner(draft=True)
    runner.spec_algorithm = SimpleNamespace(is_frozen_kv_mtp=lambda: False)
    for draft in (it.rig.runner(draft=True), runner):
        tracer_of().after_backend_init(None, object(), draft)
        assert tracer_of().draft_writes == (draft is runner)
    tracer_of().after_scheduler_init(None)
    (status,) = [t for t in plugin.in_force.recorder.status.records() if t.name == "kv-writes"]
    assert [x.what for x in status.limits] == ["writes of the draft are not judged"]


def test_a_forward_that_does_not_say_which_token_is_which_is_told_of(it):
    """As with --enable-mixed-chunk."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for _ in range(2):
        it.forward(
            "extend", lambda b: setattr(b, "forward_mode", ForwardMode.MIXED), it.full_layers()
        )
    (status,) = [t for t in plugin.in_force.recorder.status.records() if t.name == "kv-writes"]
    assert [x.what for x in status.limits] == [
        "ranges, and tokens that are written to one place, in mixed forwards"
    ]


def test_a_pool_that_writes_by_a_function_of_its_own_is_told_of_when_it_is_built(it):
    """Then our hook is never called."""
    kind = type("MHATokenToKVPoolMXFP8", (type(it.rig.pool.full_kv_pool),), {})
    it.rig.pool.full_kv_pool.__class__ = kind
    it.rig.backend()
    (status,) = [t for t in plugin.in_force.recorder.status.records() if t.name == "kv-writes"]
    assert "writes into a MHATokenToKVPoolMXFP8 are not judged" in str(status)


def test_another_kind_of_pool_is_told_of(it):
    kind = type("MHATokenToKVPoolFP4", (type(it.rig.pool.full_kv_pool),), {})
    it.rig.pool.full_kv_pool.__class__ = kind
    it.forward("decode", None, it.full_layers())
    (status,) = [t for t in plugin.in_force.recorder.status.records() if t.name == "kv-writes"]
    assert "MHATokenToKVPoolFP4" in str(status)


def test_the_canary_bites(tmp_path):
    seen = canary.fire(tmp_path, torch.device("cpu"))
    assert re.search(r"out-of-range at slot \d+, written-twice at .*, mismatch at", seen)


def test_the_canary_tells_of_a_tracer_that_sees_nothing(tmp_path, monkeypatch):
    def blind(loc, out, *args):
        out.copy_(loc.clamp(0, 1))

    monkeypatch.setattr(check, "reference", blind)
    with pytest.raises(canary.CanaryError, match="was not found"):
        canary.fire(tmp_path, torch.device("cpu"))
