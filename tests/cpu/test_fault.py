"""The CPU faults as the GPU does: silent where it happens, sticky and far away afterwards."""

from __future__ import annotations

import io
import types

import pytest
import torch

from g4debug.cpu import fault, paged_attention

PAGE, PAGES = 4, 6


@pytest.fixture(autouse=True)
def _mended():
    fault.clear()
    yield
    fault.clear()


def attend(table, lengths, window=-1):
    cache = torch.ones(PAGES, 1, PAGE, 2)
    return paged_attention.trtllm_batch_decode_with_kv_cache(
        torch.ones(len(lengths), 1, 2), (cache, cache), torch.empty(0),
        torch.tensor(table, dtype=torch.int32), torch.tensor(lengths), 64, window_left=window,
    )  # fmt: skip


@pytest.mark.parametrize("page", [PAGES, -1, 2**31 - 1])
def test_bad_page_is_silent_then_sticky(page):
    out = attend([[1, page], [2, 3]], [6, 8])
    assert fault.pending() == fault.DeviceFault(
        "trtllm_batch_decode_with_kv_cache", 0, 1, page, PAGES, -1
    )
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access") as error:
            out.sum().item()
        assert str(error.value).startswith("CUDA error: an illegal memory access was encountered\n")
        assert "g4debug" in str(error.value).splitlines()[-1]
    fault.clear()
    assert out[0].tolist() == [[0.0, 0.0]]  # no garbage
    assert out[1].tolist() == [[1.0, 1.0]]  # other rows are right


def test_first_fault_wins():
    attend([[PAGES]], [1])
    attend([[PAGES + 5]], [1])
    assert fault.pending().page == PAGES


@pytest.mark.parametrize(
    ("table", "length", "window"),
    [
        ([[1, PAGES]], 4, -1),  # past the row's length
        ([[PAGES, 1, 2]], 9, 3),  # before the window's first page
        ([[-7, 1, -7]], 8, 3),
    ],
)
def test_cells_that_are_not_live_do_not_fault(table, length, window):
    attend(table, [length], window)
    assert fault.pending() is None


def test_window_boundary_page_is_live():
    attend([[PAGES, 1, 2]], [9], window=5)  # query at 8 sees keys 3..8: page 0 is live
    assert fault.pending().column == 0


def test_a_row_that_is_too_short_faults():
    attend([[1]], [9])
    assert (fault.pending().column, fault.pending().page) == (1, -1)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: bool(t),
        lambda t: int(t),
        lambda t: float(t),
        lambda t: [0, 1][t],
        lambda t: t.nonzero(),
    ],
)
def test_every_synchronising_call_raises_and_clear_restores_it(call):
    before = {name: getattr(torch.Tensor, name) for name in fault.SYNCHRONISING}
    call(torch.tensor(1))
    attend([[PAGES]], [1])
    with pytest.raises(torch.AcceleratorError):
        call(torch.tensor(1))
    fault.clear()
    call(torch.tensor(1))
    assert {name: getattr(torch.Tensor, name) for name in fault.SYNCHRONISING} == before


def test_nothing_is_patched_while_no_fault_pends():
    assert "item" not in torch.Tensor.__dict__
    attend([[1]], [1])
    assert "item" not in torch.Tensor.__dict__


def test_the_model_forward_does_not_synchronise():
    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    exec("def forward(t):\n    return t.item()\ndef other(t):\n    return t.item()", vars(module))
    attend([[PAGES]], [1])
    assert module.forward(torch.tensor(3)) == 3
    with pytest.raises(torch.AcceleratorError):
        module.other(torch.tensor(3))


def test_host_memory_can_still_be_saved():
    attend([[PAGES]], [1])
    torch.save({"t": torch.arange(3)}, io.BytesIO())


def test_a_host_copy_can_be_read():
    attend([[PAGES]], [1])
    seq_lens_cpu = torch.tensor([3])
    assert seq_lens_cpu.max().item() == 3
    seq_lens = seq_lens_cpu
    with pytest.raises(torch.AcceleratorError):
        seq_lens.max().item()
