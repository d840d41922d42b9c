"""spec-lifecycle compares the device's seq_lens with the host's without waiting for the device."""

from __future__ import annotations

import pytest
import torch

from g4debug.tracers.spec_lifecycle.before_0_5_14.counters import DeviceLengths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HOST = [130, 1, 512]


def start(lengths, on_device, host):
    """What the tracer does from the beginning of the draft until the target's forward runs."""
    assert lengths.begin(on_device, host) is None
    lengths.start()


def test_a_length_that_differs_is_seen_after_the_step():
    lengths = DeviceLengths()
    on_device = torch.tensor(HOST, device="cuda")
    for row, off in ((0, 0), (1, 1), (2, -1)):
        on_device = torch.tensor(HOST, device="cuda")
        on_device[row] += off
        start(lengths, on_device, HOST)
        on_device.fill_(0)  # what comes behind in the stream does not matter
        torch.cuda.synchronize()
        problem = lengths.look()
        assert (problem.row if problem else 0) == row
        assert lengths.look() is None  # once


def test_it_never_waits():
    lengths = DeviceLengths()
    busy = torch.rand(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            busy = busy @ busy
        start(lengths, torch.tensor(HOST, device="cuda"), HOST)
        torch.cuda.set_sync_debug_mode("error")
        try:
            lengths.look()  # not there yet, or there: either way at once
            start(lengths, busy[0, :3].long(), [7, 7, 7])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_int32_lengths_and_a_growing_batch():
    lengths = DeviceLengths()
    for size in (1, 64, 3000):
        host = list(range(size))
        start(lengths, torch.tensor(host, dtype=torch.int32, device="cuda"), host)
        torch.cuda.synchronize()
        assert lengths.look() is None
        assert lengths._expected is None
