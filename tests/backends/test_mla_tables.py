"""Tables of a decode of flashmla and trtllm_mla, and what their prefills read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.backends import adapter, adapter_of
from g4debug.faults import tables
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.trap import TrapError

PAGE, PAGES = 4, 9
LENGTHS, PREFIXES = (6, 13), (2, 9)
FLASH, TRTLLM = adapter("flashmla"), adapter("trtllm_mla")
BOTH = pytest.mark.parametrize("of", [FLASH, TRTLLM], ids=lambda of: of.name)


class It:
    """A server with two requests and three layers."""

    def __init__(self, folder, of=FLASH, mode="raise"):
        self.of = of
        self.rows = torch.zeros(3, 4 * PAGE, dtype=torch.int32)
        self.rows[1:] = torch.arange(PAGE, PAGES * PAGE).view(2, -1)
        self.table = self.rows[1:, ::PAGE] // PAGE
        self.table[0, 2:] = -1  # as trtllm_mla has it behind a row's end
        self.backend = SimpleNamespace(
            req_to_token=self.rows,
            page_size=PAGE,
            token_to_kv_pool=SimpleNamespace(k_buffer=[torch.zeros(PAGES * PAGE, 1)]),
            forward_metadata=SimpleNamespace(),
            forward_decode_metadata=None,
            forward_prefill_metadata=None,
            cuda_graph_kv_indices=None,
            kv_indptr=torch.zeros(9, dtype=torch.int32),
            get_cuda_graph_seq_len_fill_value=lambda: 1,
        )
        settings = Settings(debug=True, debug_dir=folder, mode=mode, not_run_on_this_release=True)
        self.tracer = PageTableTracer(Context.alone("page-table", settings))
        self.tracer.before_run_batch()
        self.hooks = {}
        put = self.hooks.__setitem__
        of.install(
            SimpleNamespace(
                before=put, after=put, replace=lambda site, name, hook: put((site, name), hook)
            ),
            self.tracer,
        )
        runner = SimpleNamespace(server_args=SimpleNamespace(disable_overlap_schedule=True))
        self.tracer.after_backend_init(of, self.backend, runner)
        self.layers = [SimpleNamespace(layer_id=n, sliding_window_size=-1) for n in range(3)]

    def batch(self, mode="DECODE", **more):
        return SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.tensor(LENGTHS),
            extend_prefix_lens=torch.tensor(PREFIXES),
            extend_prefix_lens_cpu=[*PREFIXES],
            **{"spec_info": None, **more},
        )

    def decode(self, table=None, **of):
        """What the kernel gets in each layer."""
        batch = self.batch(**of)
        made = SimpleNamespace(block_kv_indices=self.table if table is None else table)
        self.backend.forward_metadata = self.backend.forward_decode_metadata = made
        self.hooks[self.of.metadata](None, self.backend, batch)
        got = []
        for layer in self.layers:
            self.hooks[self.of.sites[1]](self.backend, None, None, None, layer, batch)
            whole = made.block_kv_indices
            given = whole[:2] if self.of is FLASH else whole  # a tensor of its own in each layer
            out = self.hooks[self.of.sites[0], self.of.argument](given, {})
            got.append((given, out))
        return got

    def prefill(self, ragged=False, fallback=True, **more):
        """The lists of a prefill, which all tokens of the rows are in."""
        batch = self.batch("EXTEND", **more)
        entries = torch.cat([self.rows[row, :n] for row, n in enumerate(LENGTHS, 1)])
        starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
        self.backend.kv_indptr[:3] = starts
        wrapper = SimpleNamespace(_kv_indices_buf=entries, _kv_indptr_buf=starts)
        self.backend.forward_metadata = SimpleNamespace(prefill_wrapper=wrapper, use_ragged=ragged)
        self.backend.forward_prefill_metadata = SimpleNamespace(
            fallback_to_flashinfer_impl=fallback
        )
        self.hooks[self.of.metadata](None, self.backend, batch)
        return batch, wrapper

    def attend(self, batch):
        for layer in self.layers:
            self.hooks[self.of.sites[2]](self.backend, None, None, None, layer, batch)

    def counted(self, what="tables"):
        tally = self.tracer.context.status.tallies.get(what)
        return 0 if tally is None else tally.count

    def limits(self):
        found = self.tracer.context.recorder.status.records()
        return [limit.why for record in found for limit in record.limits]


@BOTH
def test_a_table_is_judged_once_for_each_forward(of, tmp_path):
    it = It(tmp_path, of)
    for _ in range(2):
        for given, got in it.decode(it.table.clone()):
            assert got.shape == given.shape
            assert got[1].tolist() == given[1].tolist()
    assert (it.counted(), it.limits()) == (2, [])


@BOTH
def test_a_page_that_the_pool_does_not_have_is_found(of, tmp_path):
    it = It(tmp_path, of)
    it.table[1, 3] = 77
    with pytest.raises(TrapError, match="page 77"):
        it.decode()


@BOTH
def test_in_contain_mode_the_kernel_gets_the_right_page(of, tmp_path):
    it = It(tmp_path, of, "contain")
    right = int(it.table[1, 3])
    it.table[1, 3] = 77
    assert {int(got[1, 3]) for _, got in it.decode()} == {right}


@BOTH
def test_in_log_mode_the_kernel_gets_sglangs_own_table(of, tmp_path):
    it = It(tmp_path, of, "log")
    it.table[1, 3] = 77
    assert all(got is given for given, got in it.decode())


def test_flashmlas_table_of_a_graph_is_judged_as_wide_as_its_kernel_reads(tmp_path):
    """SGLang hands over a part of it: what the longest row had at the capture."""
    it = It(tmp_path)
    static = torch.zeros(4, 8, dtype=torch.int32)
    static[:2, :4] = it.table
    it.backend.cuda_graph_kv_indices = static
    it.decode(static[:2, :1])
    assert it.counted() == 1
    static[1, 3] = 77
    with pytest.raises(TrapError, match="page 77"):
        it.decode(static[:2, :1])


@BOTH
def test_a_list_of_a_prefill_is_judged(of, tmp_path):
    it = It(tmp_path, of)
    it.attend(it.prefill()[0])
    assert (it.counted("token lists"), it.limits()) == (1, [])
    batch, wrapper = it.prefill()
    wrapper._kv_indices_buf[8] = 777
    with pytest.raises(TrapError, match="token 777"):
        it.attend(batch)


@BOTH
def test_a_prefill_without_a_prefix_reads_no_list(of, tmp_path):
    it = It(tmp_path, of)
    batch, wrapper = it.prefill(ragged=True, fallback=of is FLASH)
    wrapper._kv_indices_buf.fill_(777)
    it.attend(batch)
    assert (it.counted("token lists"), it.limits()) == (0, [])


@BOTH
def test_a_prefix_that_the_model_fetches_is_told(of, tmp_path):
    it = It(tmp_path, of)
    it.attend(it.prefill(fallback=False, attn_attend_prefix_cache=True)[0])
    (why,) = it.limits()
    assert "hands the kernel K and V" in why


@BOTH
@pytest.mark.parametrize(
    ("how", "has", "why"),
    [
        ({"mode": "TARGET_VERIFY"}, {}, "never run"),
        ({"spec_info": object()}, {}, "of a draft"),
        ({}, {"_kv_shard_pool": object()}, "a part of the KV"),
    ],
)
def test_what_is_not_judged_is_passed_on_and_told(of, how, has, why, tmp_path):
    it = It(tmp_path, of)
    vars(it.backend).update(has)
    it.table.fill_(77)
    assert all(got is given for given, got in it.decode(**how))
    assert it.counted() == 0
    (said,) = it.limits()
    assert why in said


@BOTH
def test_a_fault_strikes_the_table_of_a_decode_and_of_nothing_else(of, tmp_path):
    """trtllm_mla keeps the metadata of its last decode during a prefill."""
    it = It(tmp_path, of)
    it.decode()
    made = tables.tables_of(of, it.backend, it.batch(), [0, 1])
    assert made.tables["full"] is it.table
    assert (made.rows, made.columns) == ([0, 1], [2, 4])
    batch, _ = it.prefill()
    assert tables.tables_of(of, it.backend, batch, [0, 1]).tables == {}


def test_a_backend_that_inherits_is_not_judged(tmp_path):
    """cutedsl_mla's class is one of trtllm_mla's, with a kernel of its own."""
    parent = type("TRTLLMMLABackend", (), {})
    parent.__module__ = "sglang.srt.layers.attention.trtllm_mla_backend"
    child = type("CuteDslMLABackend", (parent,), {})
    assert adapter_of(parent()) is TRTLLM
    it = It(tmp_path, TRTLLM)
    it.hooks[TRTLLM.sites[1]](child(), None, None, None, it.layers[0], it.batch())
    it.hooks[TRTLLM.metadata](None, child(), it.batch("EXTEND"))
    given = it.table.fill_(77)
    assert it.hooks[TRTLLM.sites[0], "block_tables"](given, {}) is given


def test_on_a_release_that_is_not_known_there_is_no_backend(monkeypatch):
    monkeypatch.setattr(FLASH, "needs", "json.decoder", raising=False)
    for releases, there in ((">=0.5", True), ("<0.5", False)):
        monkeypatch.setattr(FLASH, "releases", releases, raising=False)
        assert FLASH.is_there() == there
