"""frozen-kv-mtp-v2: the lists of a sliding layer before a replay are SGLang's, and nobody waits."""

from __future__ import annotations

import pytest
import torch
from real_backend import WINDOW, replay_graph
from real_triton import TritonRig
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.written_for("frozen-kv-mtp-v2")
ON = {"SGLANG_FROZEN_KV_MTP_V2": "1"}
ROWS = 3


class Asked(TorchDispatchMode):
    """Counts how often Python asks for a number that is in a tensor: on a GPU the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def replays(lengths: list[list[int]]) -> tuple[list[list[int]], int]:
    """For each replay its list up to its end, and how often all of them asked for a number."""
    rig = TritonRig()
    backend = rig.backend()
    rig.capture(backend, ROWS)
    requests = {n: rig.admit(f"r{n}", n) for n in sorted({n for each in lengths for n in each})}
    found, asked = [], 0
    for each in lengths:
        batch = rig.batch("decode", [requests[n] for n in each], backend)
        with Asked() as mode:
            replay_graph(backend, batch)
        asked += mode.count - 1  # the helper's own int(seq_lens.sum())
        end = int(backend.window_kv_indptr[len(each)])
        found.append(backend.cuda_graph_window_kv_indices[:end].tolist())
    return found, asked


# Longer than the window and shorter, and shorter lists after longer ones.
LENGTHS = [[60, WINDOW, 5], [5], [WINDOW - 1, WINDOW, WINDOW + 1], [60], [5, 60]]


def test_the_lists_are_sglangs_and_nobody_asks_how_long_they_are(arm):
    arm()
    wanted, asked = replays(LENGTHS)
    assert asked == 2 * len(LENGTHS)  # SGLang's own: the slice that is read, and the one written
    arm(**ON)
    assert replays(LENGTHS) == (wanted, 0)


def test_what_a_fault_left_behind_the_end_is_not_looked_up(arm):
    """A token that is far out of range, in a place that the next list does not reach."""
    arm(**ON)
    rig = TritonRig()
    backend = rig.backend()
    rig.capture(backend, ROWS)
    backend.cuda_graph_window_kv_indices[-1] = 10**9
    replay_graph(backend, rig.batch("decode", [rig.admit("r", 9)], backend))
    end = int(backend.window_kv_indptr[1])
    assert end == 9
    assert not backend.cuda_graph_window_kv_indices[end : WINDOW - 1].any()
