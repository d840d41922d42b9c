"""What was changed in the suite after somebody had seen a run of it, for the page to say."""

from __future__ import annotations

from typing import Final

# (commit, what was changed and why), oldest first.
CHANGED: Final = (
    (
        "127dd9a",
        "unowned-chunks: runs without a tool showed that this release hangs where the thread's "
        "server dies. The predictions of four tools went from crash only to silent",
    ),
    (
        "1c35060",
        "group-remap: another workload, because runs without a tool did not trigger the bug",
    ),
    (
        "18bf3a0",
        "stale-out-cache-loc and lost-key: other workloads, because runs without a tool did not "
        "trigger the bug with each seed",
    ),
    (
        "02c936f",
        "unfenced-results: the ground truth counts no request that the last result has ended",
    ),
    (
        "74ccbbd",
        "compute-sanitizer: an assertion of a kernel's own counts as its alarm, which made a case "
        "of one that was none; kv-canary beside FROZEN_KV_MTP is n/a, because it ends each server "
        "there",
    ),
    (
        "66fc7c6",
        "strict invariants: the check had not been on. SGLang takes a number, had been given a "
        "word, and ran as by default. Those runs are thrown away, and the first run is a new one. "
        "It and the tree check are known by their own words; before, what SGLang's default check "
        "said beside them was counted for them, too",
    ),
)
