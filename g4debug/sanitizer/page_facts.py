"""What is known of the pages and the request of something that a kernel saw, for its report.

It is read from the page ledger and the recorder of the steps, which are host memory. Where these do
not know, less is said.
"""

from __future__ import annotations

from g4debug.findings.steps import Recorder


def rid_of(recorder: Recorder, step: int, row: int) -> str:
    """The request that had a row of ``req_to_token`` in a step, -1 for now. '' if not known."""
    if step < 0:
        return recorder.requests_by_pool_index().get(row, "")
    for known in reversed(recorder.steps):
        if known.step == step and row in known.rows:
            return known.rids[known.rows.index(row)]
    return ""
