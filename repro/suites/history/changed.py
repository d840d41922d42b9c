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
        "ad42f76",
        "an alarm that stops SGLang just before the bug is counted counts. That is so in "
        "draft-embedding-shard, zero-accept, group-remap and stale-out-cache-loc for g4debug, and "
        "in bigram-frontier for SGLang's busy checks. First runs call it in its step, which "
        "nobody had measured; now it is called before it",
    ),
    (
        "18bf3a0",
        "stale-out-cache-loc and lost-key: other workloads, because runs without a tool did not "
        "trigger the bug with each seed",
    ),
    (
        "7f9b5b7",
        "g4debug with every tracer gets the server argument that its own line at start asks for: "
        "no overlap scheduling without FROZEN_KV_MTP before 0.5.14",
    ),
    (
        "02c936f",
        "unfenced-results: the ground truth counts no request that the last result has ended",
    ),
    (
        "74ccbbd",
        "compute-sanitizer: an assertion of a kernel's own counts as its alarm, which made a case "
        "of one that was none; kv-canary beside FROZEN_KV_MTP is n/a, because it ends each "
        "healthy server there; on a GPU no alarm is called late",
    ),
    (
        "b3a1f7e, 1e83899",
        "a run that the machine ended (a GPU in use, no memory, a workload that came to nothing) "
        "is thrown away if its bug was not triggered and nothing accused",
    ),
    (
        "941188d",
        "on a GPU an answer counts as wrong only if more differ than without the bug. It changed "
        "what is said of group-remap and partial-page-free without a tool",
    ),
    (
        "66fc7c6",
        "strict invariants: the check had not been on. SGLang takes a number, had been given a "
        "word, and ran as by default. Those runs are thrown away, and the first run is a new one. "
        "It and the tree check are known by their own words; before, what SGLang's default check "
        "said beside them was counted for them, too. Who refused, or did not come to where the "
        "bug would be, no longer counts as silent without the bug",
    ),
    (
        "1da972f",
        "an object is named by the finding's own request and a cause in one line; no grade changed",
    ),
    (
        "c82f8c4",
        "an alarm just before the bug is counted counts only if the tool is silent without the "
        "bug, and late ones among other alarms are said; lost-key: the ground truth takes the "
        "window from the model and not from the layer, which changed what is noted on "
        "0.5.12.post1 and 0.5.13.post1. No count changed",
    ),
)
