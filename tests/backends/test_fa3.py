"""Tables for the kernel of FlashAttention: a forward's own are judged, others are told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug import backends
from g4debug.backends import adapter
from g4debug.faults._in_graph import Overwritten
from g4debug.faults.tables import tables_of
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.trap import TrapError

PAGE, PAGES = 4, 9
FA3 = adapter("fa3")


class It:
    """A decode of two requests."""

    def __init__(self, folder, mode="raise"):
        rows = torch.zeros(3, 4 * PAGE, dtype=torch.int32)
        rows[1:] = torch.arange(PAGE, PAGES * PAGE).view(2, -1)
        self.lengths = torch.tensor([6, 13], dtype=torch.int32)
        self.table = rows[1:, ::PAGE] // PAGE
        self.backend = SimpleNamespace(
            req_to_token=rows,
            page_size=PAGE,
            token_to_kv_pool=SimpleNamespace(k_buffer=[torch.zeros(PAGES * PAGE, 1)]),
            forward_metadata=SimpleNamespace(
                page_table=self.table,
                swa_page_table=None,
                cache_seqlens_int32=self.lengths,
                cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
            ),
        )
        settings = Settings(debug=True, debug_dir=folder, mode=mode, not_run_on_this_release=True)
        self.tracer = PageTableTracer(Context.alone("page-table", settings))
        self.tracer.before_run_batch()
        self.hooks = {}
        put = self.hooks.__setitem__
        FA3.install(
            SimpleNamespace(
                before=put, replace=lambda site, name, hook: put(f"{site} {name}", hook)
            ),
            self.tracer,
        )
        runner = SimpleNamespace(server_args=SimpleNamespace(disable_overlap_schedule=True))
        self.tracer.after_backend_init(FA3, self.backend, runner)
        self.layers = [SimpleNamespace(layer_id=n, sliding_window_size=None) for n in range(3)]

    def forward(self, mode="DECODE", table=None, lengths=None, spec_info=None, **more):
        """What the kernel gets in each layer."""
        table = self.table if table is None else table
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode, is_decode=lambda: mode == "DECODE"),
            req_pool_indices=torch.tensor([1, 2]),
            spec_info=spec_info,
            **more,
        )
        site = "attn.fa3.decode" if mode == "DECODE" else "attn.fa3.extend"
        got = []
        for layer in self.layers:
            self.hooks[site](self.backend, None, None, None, layer, batch)
            given = {"cache_seqlens": self.lengths if lengths is None else lengths}
            got.append(self.hooks["attn.fa3.kernel page_table"](table, given))
        return got

    def counted(self):
        tally = self.tracer.context.status.tallies.get("tables")
        return 0 if tally is None else tally.count

    def limits(self):
        (found,) = self.tracer.context.recorder.status.records()
        return [limit.why for limit in found.limits]


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_a_table_is_judged_once_for_each_forward(mode, tmp_path):
    it = It(tmp_path)
    for _ in range(2):
        for got in it.forward(mode):
            assert got is not it.table
            assert got[0, :2].tolist() == it.table[0, :2].tolist()
    assert (it.counted(), it.limits()) == (2, [])


def test_a_page_that_the_pool_does_not_have_is_found(tmp_path):
    it = It(tmp_path)
    it.table[1, 3] = 77
    with pytest.raises(TrapError, match="page 77"):
        it.forward()


def test_in_contain_mode_the_kernel_gets_the_right_page(tmp_path):
    it = It(tmp_path, "contain")
    right = int(it.table[1, 3])
    it.table[1, 3] = 77
    assert {int(got[1, 3]) for got in it.forward()} == {right}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"mode": "MIXED"}, "never run"),
        ({"spec_info": object(), "topk": 4}, "several paths"),
        ({"table": torch.ones(2, 4, dtype=torch.int32)}, "special kind"),
        ({"lengths": torch.tensor([1, 2])}, "not those of the rows"),
    ],
)
def test_what_is_not_judged_is_passed_on_and_told(how, why, tmp_path):
    it = It(tmp_path)
    table, it.backend.topk = how.get("table", it.table), how.pop("topk", 1)
    assert all(got is table for got in it.forward(**how))
    assert it.counted() == 0
    (said,) = it.limits()
    assert why in said


@pytest.mark.parametrize(("prefixes", "limits"), [([0, 0], 0), ([0, 64], 1)])
def test_a_prefill_of_mla_without_a_prefix_leaves_nothing_out(prefixes, limits, tmp_path):
    it = It(tmp_path)
    how = {"attn_attend_prefix_cache": False, "extend_prefix_lens_cpu": prefixes}
    it.forward("EXTEND", **how)
    assert len(it.limits()) == limits


def test_without_its_kernels_a_backend_is_not_hooked(monkeypatch):
    """On a machine whose SGLang cannot import it, a site of it would stop the start."""
    for module, there in (("no_such_package.flash_attn", False), ("json.decoder", True)):
        monkeypatch.setattr(FA3, "needs", module, raising=False)
        assert (FA3 in backends.installed()) == there
        assert (FA3 in backends.carrying(type(FA3).__mro__[1])) == there


@pytest.mark.parametrize(
    ("mode", "drafts", "frozen", "length"),
    [
        ("DECODE", False, False, 1),
        ("DECODE", True, False, 1 + 3),
        ("DECODE", True, True, 1),
        ("TARGET_VERIFY", True, False, 1 + 4),
    ],
)
def test_the_padding_of_a_graph_is_as_long_as_what_sglang_adds(mode, drafts, frozen, length):
    backend = SimpleNamespace(
        get_cuda_graph_seq_len_fill_value=lambda: 1,
        speculative_step_id=2,
        speculative_num_draft_tokens=4,
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), spec_info=object() if drafts else None
    )
    assert FA3.padding(backend, batch, frozen) == length


@pytest.mark.once("later releases fill in tables in a graph")
def test_a_page_fault_lasts_where_a_captured_graph_fills_in_the_table(sglang):
    """FlashAttentionBackend.init_forward_metadata_in_graph writes the table of a draft extend."""
    assert FA3.in_graph == "attn.fa3.metadata_in_graph"
    right = torch.arange(1, 7, dtype=torch.int32).view(2, 3)
    metadata = SimpleNamespace(
        page_table=right.clone(), swa_page_table=None, cache_seqlens_int32=torch.tensor([9, 12])
    )
    backend = SimpleNamespace(
        forward_metadata=metadata,
        page_size=PAGE,
        init_forward_metadata_in_graph=lambda batch: metadata.page_table.copy_(right),
    )
    ours = Overwritten(FA3)
    ours.forget(backend)  # the capture
    ours.before_replay(backend, None)
    tables_of(FA3, backend, None, None, ours).write("full", 1, 2, 77)
    backend.init_forward_metadata_in_graph(None)  # the replay: SGLang's kernel, and then ours
    ours.fill_in(None, backend)
    assert metadata.page_table.tolist() == [[1, 2, 3], [4, 5, 77]]
    ours.before_replay(backend, None)
    ours.fill_in(None, backend)
    assert metadata.page_table.tolist() == right.tolist()
