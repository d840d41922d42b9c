"""What torch_native reads: SGLang's own rows, of which pages that are nobody's are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.backends import adapter
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.page_table.tracer import PageTableTracer
from g4debug.trapping.trap import TrapError

PAGE, PAGES = 4, 9
NATIVE = adapter("torch_native")


class It:
    def __init__(self, folder, swa=False):
        self.rows = torch.zeros(3, 4 * PAGE, dtype=torch.int32)
        self.rows[1:] = torch.arange(PAGE, PAGES * PAGE).view(2, -1)
        pool = SimpleNamespace(k_buffer=[torch.zeros(PAGES * PAGE, 1)])
        if swa:
            pool = SimpleNamespace(
                full_kv_pool=pool, swa_kv_pool=pool, layers_mapping={0: (0, False), 1: (0, True)}
            )
        self.backend = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.rows), token_to_kv_pool=pool
        )
        settings = Settings(debug=True, debug_dir=folder, not_run_on_this_release=True)
        self.tracer = PageTableTracer(Context.alone("page-table", settings))
        self.tracer.before_run_batch()
        runner = SimpleNamespace(
            server_args=SimpleNamespace(disable_overlap_schedule=True), page_size=PAGE
        )
        self.hooks = {}
        NATIVE.install(
            SimpleNamespace(before=self.hooks.__setitem__, after=self.hooks.__setitem__),
            self.tracer,
        )
        self.tracer.after_backend_init(NATIVE, self.backend, runner)
        self.layers = [SimpleNamespace(layer_id=n, sliding_window_size=-1) for n in range(2)]

    def forward(self, mode="DECODE", encoder_lens=None):
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode, is_decode=lambda: mode == "DECODE"),
            seq_lens=torch.tensor([6, 13]),
            req_pool_indices=torch.tensor([1, 2]),
            encoder_lens=encoder_lens,
        )
        for layer in self.layers:
            hook = self.hooks[NATIVE.handed_at(batch)]
            hook(self.backend, None, None, None, layer, batch)

    def counted(self):
        tally = self.tracer.context.status.tallies.get("tables")
        return 0 if tally is None else tally.count

    def limits(self):
        (found,) = self.tracer.context.recorder.status.records()
        return [limit.why for limit in found.limits]


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_the_rows_are_judged_once_for_each_forward(mode, tmp_path):
    it = It(tmp_path)
    it.forward(mode)
    it.forward(mode)
    assert (it.counted(), it.limits()) == (2, [])


def test_a_page_that_the_pool_does_not_have_is_told_before_it_is_read(tmp_path):
    it = It(tmp_path)
    it.rows[2, 8:12] += 100 * PAGE
    with pytest.raises(TrapError, match="page 107"):
        it.forward()


def test_what_lies_behind_the_end_of_a_row_is_nothing(tmp_path):
    it = It(tmp_path)
    it.rows[1, 8:] = -7
    it.forward()
    assert it.counted() == 1


@pytest.mark.parametrize(
    ("swa", "how", "why", "judged"),
    [
        (True, {}, "SGLang's mistake", 1),  # the full layer
        (False, {"encoder_lens": torch.tensor([1, 1])}, "encoder", 0),
        (False, {"mode": "TARGET_VERIFY"}, "never run", 0),
    ],
)
def test_what_is_not_judged_is_told(swa, how, why, judged, tmp_path):
    it = It(tmp_path, swa)
    it.forward(**how)
    assert it.counted() == judged
    (said,) = it.limits()
    assert why in said
