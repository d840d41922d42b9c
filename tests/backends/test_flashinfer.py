"""Lists that FlashInfer's wrappers are planned with: what is judged, and what only is told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.backends import adapter, adapter_of
from g4debug.hooking import targets
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.trap import TrapError

PAGE, PAGES, WINDOW = 4, 9, 3
LENGTHS, PREFIXES = (6, 13), (2, 9)
MHA, MLA = adapter("flashinfer"), adapter("flashinfer_mla")


class It:
    """A server with two requests, whose layer 0 slides if there are two wrappers."""

    def __init__(self, folder, of=MHA, sliding=False, mode="raise"):
        self.of, self.mla, self.sliding = of, of is MLA, sliding
        self.rows = torch.zeros(3, 4 * PAGE, dtype=torch.int32)
        self.rows[1:] = torch.arange(PAGE, PAGES * PAGE).view(2, -1)
        self.backend = SimpleNamespace(
            req_to_token=self.rows,
            page_size=PAGE,
            token_to_kv_pool=SimpleNamespace(k_buffer=[torch.zeros(PAGES * PAGE, 1)]),
            forward_metadata=None,
            kv_indptr=torch.zeros(9, dtype=torch.int32),
            decode_cuda_graph_metadata={},
            get_cuda_graph_seq_len_fill_value=lambda: 1,
            _get_wrapper_idx=lambda layer: int(sliding and layer.sliding_window_size == -1),
        )
        settings = Settings(debug=True, debug_dir=folder, mode=mode, not_run_on_this_release=True)
        self.tracer = PageTableTracer(Context.alone("page-table", settings))
        self.tracer.before_run_batch()
        self.hooks = {}
        put = self.hooks.__setitem__
        of.install(SimpleNamespace(before=put, after=put), self.tracer)
        runner = SimpleNamespace(
            server_args=SimpleNamespace(disable_overlap_schedule=True),
            sliding_window_size=WINDOW if sliding else None,
        )
        self.tracer.after_backend_init(of, self.backend, runner)
        sizes = (WINDOW, -1, WINDOW, -1) if sliding else (-1, -1)
        self.layers = [
            SimpleNamespace(layer_id=n, sliding_window_size=w) for n, w in enumerate(sizes)
        ]

    def wrapper(self, ends, most=None):
        """Planned with the last tokens of each row up to its end, ``most`` of them."""
        rows = [
            self.rows[row, max(0, end - most if most is not None else 0) : end]
            for row, end in enumerate(ends, 1)
        ]
        counts = torch.tensor([len(row) for row in rows])
        self.backend.kv_indptr[1:3] = counts.cumsum(0)
        indptr = self.backend.kv_indptr[:3].clone()
        names = ("_kv_indices_buf", "_kv_indptr_buf") if self.mla else (
            "_paged_kv_indices_buf", "_paged_kv_indptr_buf",
        )  # fmt: skip
        entries = torch.cat([*rows, torch.zeros(5)]).int()
        return SimpleNamespace(**dict(zip(names, (entries, indptr), strict=True)))

    def plan(self, mode="DECODE", ragged=False, bare=False, captured=False, **batch):
        """Make the metadata of a forward as SGLang does. bare: no row has a prefix."""
        if captured and targets.captures_apart():
            pytest.skip("on this SGLang nothing is known of a graph's lists, so none is judged")
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.tensor(LENGTHS),
            extend_prefix_lens=torch.tensor(PREFIXES) * (not bare),
            extend_prefix_lens_cpu=[0, 0] if bare else [*PREFIXES],
            **{"spec_info": None, **batch},
        )
        decodes = mode == "DECODE"
        if decodes:
            made = [self.wrapper(LENGTHS, WINDOW + 1)] if self.sliding else []
            made.append(self.wrapper(LENGTHS))
        else:
            ends = PREFIXES if ragged else LENGTHS
            made = [self.wrapper(ends, WINDOW)] if self.sliding else []
            made.append(self.wrapper(ends))
        self.made = made
        phase = "decode" if decodes else "prefill"
        metadata = {f"{phase}_wrapper": made[0]} if self.mla else {f"{phase}_wrappers": made}
        if not decodes:
            metadata |= {"use_ragged": ragged, "extend_no_prefix": bare}
        self.backend.forward_metadata = SimpleNamespace(**metadata)
        if captured:
            self.hooks[self.of.replay](None, self.backend, self.batch, in_capture=True)
        else:
            self.hooks[self.of.metadata](None, self.backend, self.batch)
        return self

    def attend(self):
        site = self.of.handed_at(self.batch)
        for layer in self.layers:
            self.hooks[site](self.backend, None, None, None, layer, self.batch)
        return self

    def counted(self):
        tally = self.tracer.context.status.tallies.get("token lists")
        return 0 if tally is None else tally.count

    def limits(self):
        found = self.tracer.context.recorder.status.records()
        return [limit.why for record in found for limit in record.limits]


@pytest.mark.parametrize(
    ("of", "sliding", "how", "checks"),
    [
        (MHA, False, {}, 1),
        (MHA, True, {}, 2),
        (MHA, False, {"mode": "EXTEND", "ragged": True}, 1),
        (MHA, True, {"mode": "EXTEND", "ragged": True}, 2),
        (MHA, False, {"mode": "MIXED"}, 1),
        (MHA, False, {"captured": True}, 1),
        (MHA, True, {"captured": True}, 2),
        (MLA, False, {}, 1),
        (MLA, False, {"mode": "EXTEND"}, 1),
        (MLA, False, {"captured": True}, 1),
    ],
)
def test_a_list_is_judged_once_for_each_forward(of, sliding, how, checks, tmp_path):
    it = It(tmp_path, of, sliding)
    for _ in range(2):
        it.plan(**how).attend()
    assert (it.counted(), it.limits()) == (2 * checks, [])


@pytest.mark.parametrize(("of", "sliding"), [(MHA, False), (MHA, True), (MLA, False)])
def test_a_wrong_entry_is_found_and_in_contain_mode_mended(of, sliding, tmp_path):
    for mode in ("raise", "contain"):
        it = It(tmp_path / mode, of, sliding, mode).plan()
        entries = it.of.entries(it.made[0])
        right = int(entries[2])
        entries[2] = 777
        if mode == "raise":
            with pytest.raises(TrapError, match="token 777"):
                it.attend()
        else:
            it.attend()
            assert int(entries[2]) == right


@pytest.mark.parametrize("of", [MHA, MLA])
def test_where_a_list_begins_is_judged(of, tmp_path):
    it = It(tmp_path, of).plan()
    begins = it.of.begins(it.backend, it.made[0], 2)
    begins[1] += 1
    with pytest.raises(TrapError, match=r"kv_indptr\[1\] = 7, but it must be 6"):
        it.attend()


@pytest.mark.parametrize(
    ("of", "how"),
    [
        (MHA, {"mode": "EXTEND", "ragged": True, "bare": True}),
        (MLA, {"mode": "EXTEND", "ragged": True, "bare": True}),
    ],
)
def test_a_prefill_without_a_prefix_reads_no_list(of, how, tmp_path):
    it = It(tmp_path, of).plan(**how)
    assert it.of.all_lists(it.backend, None) == {}
    it.of.entries(it.made[0]).fill_(777)
    it.attend()
    assert (it.counted(), it.limits()) == (0, [])


def test_a_prefill_from_pages_is_judged_in_full_layers(tmp_path):
    it = It(tmp_path, sliding=True).plan(mode="EXTEND").attend()
    assert it.counted() == 1
    (why,) = it.limits()
    assert "a window for each row" in why


@pytest.mark.parametrize(
    ("of", "how", "has", "why"),
    [
        (MHA, {"mode": "TARGET_VERIFY"}, {}, "never run"),
        (MLA, {"mode": "DRAFT_EXTEND_V2"}, {}, "never run"),
        (MHA, {"spec_info": object()}, {}, "of a draft"),
        (MHA, {"mode": "EXTEND", "captured": True}, {}, "in a CUDA graph"),
        (MHA, {"mode": "EXTEND"}, {"prefill_uses_dequant_workspace": True}, "a copy of its KV"),
        (MHA, {}, {"decode_uses_dequant_workspace": True}, "a copy of its KV"),
        (MHA, {}, {"enable_mis": True}, "several items"),
        (MHA, {}, {"is_dllm_model": True}, "diffusion"),
        (MHA, {}, {"dispatch_reason": SimpleNamespace(name="CROSS_ATTENTION")}, "encoder"),
        (MLA, {"mode": "EXTEND", "attn_attend_prefix_cache": True}, {}, "hands the kernel K and V"),
    ],
)
def test_what_is_not_judged_is_told(of, how, has, why, tmp_path):
    it = It(tmp_path, of)
    vars(it.backend).update(has)
    it.plan(**how)
    it.of.entries(it.made[0]).fill_(777)
    it.attend()
    assert it.counted() == 0
    (said,) = it.limits()
    assert why in said


def test_of_mla_a_graphs_own_buffer_says_nothing(tmp_path):
    """A replay leaves it as it was captured, with a healthy server's other lengths."""
    it = It(tmp_path, MLA).plan(captured=True)
    it.made[0]._kv_indptr_buf.fill_(3)
    assert it.attend().counted() == 1


def test_the_lists_of_a_graph_are_those_of_its_rows(tmp_path):
    it = It(tmp_path, sliding=True).plan(captured=True)
    it.backend.decode_cuda_graph_metadata = {2: it.made}
    assert {n: int(p[1][-1]) for n, p in MHA.all_lists(it.backend, 2).items()} == {
        "window": 2 * (WINDOW + 1),
        "full": sum(LENGTHS),
    }
    assert MHA.all_lists(it.backend, 4) == {}
    it = It(tmp_path, MLA).plan(captured=True)
    it.backend.decode_cuda_graph_metadata = {2: it.made[0]}
    assert MLA.all_lists(it.backend, 2)["full"][1].tolist() == [0, 6, 19]


@pytest.mark.parametrize("of", [MHA, MLA])
def test_a_fault_finds_the_lists_before_the_tracer_has_looked(of, tmp_path):
    """Its hooks are nearer to SGLang than the tracer's."""
    it = It(tmp_path, of).plan()
    del it.backend.forward_metadata.g4debug_planned
    entries, begins = of.all_lists(it.backend, None)["full"]
    assert entries is of.entries(it.made[0])
    assert begins.tolist() == [0, 6, 19]


def test_a_backend_that_inherits_is_not_judged_by_its_parents_rules(tmp_path):
    """trtllm_mha's class is one of flashinfer's, and runs its constructor and more."""
    parent = type("FlashInferAttnBackend", (), {})
    parent.__module__ = "sglang.srt.layers.attention.flashinfer_backend"
    child = type("SomeBackend", (parent,), {})
    assert adapter_of(parent()) is MHA
    assert not MHA.is_inherited_by(parent())
    assert MHA.is_inherited_by(child())
    it = It(tmp_path)
    it.tracer.after_built(MHA)(None, child(), SimpleNamespace())
    assert len(it.tracer.adapters) == 1
    it.hooks["attn.flashinfer.decode"](child(), None, None, None, it.layers[0], None)
    it.hooks["attn.flashinfer.metadata"](None, child(), None)
    assert (it.counted(), it.limits()) == (0, [])
