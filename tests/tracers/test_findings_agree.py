"""Two tracers that see the same mistake in one step say the same of it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from real_backend import PAGE
from served_rows import TOKENS
from writing import Writing, scheduled

from g4debug.dumps import reading

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
LAST = TOKENS["a"] - 1


def test_a_row_that_names_another_requests_page_is_told_alike_of_its_write_and_of_its_read(arm):
    folder = arm(G4DEBUG_TRACE="page-table,kv-writes,kv-allocator", G4DEBUG_MODE="log")
    it = Writing()
    scheduled(it)
    theirs, column = it.rig.page("c", 1), LAST // PAGE
    it.row("a")[column * PAGE :][:PAGE] = torch.arange(theirs * PAGE, (theirs + 1) * PAGE)

    def to_the_row(batch):
        batch.out_cache_loc = batch.out_cache_loc.clone()
        batch.out_cache_loc[0] = it.right("a", LAST)

    it.forward("decode", to_the_row, it.full_layers())
    found = {f.check: f for f in (reading.read(p).finding for p in sorted(folder.glob("*.pt")))}
    read, written = found["page-table"], found["kv-writes"]
    assert read.kind == written.kind == "foreign-page"
    assert read.location.step == written.location.step
    assert (read.location.request, read.location.row) == ("a", 0)
    assert (written.location.request, written.location.row) == ("a", 0)
    row = it.row_of("a")
    for finding in (read, written):
        assert f"page {theirs} of request c" in finding.headline, finding.headline
        assert "req_to_token is wrong" in finding.cause, finding.cause
        assert f"row {row} " in finding.cause
        assert "is not known" in finding.cause
