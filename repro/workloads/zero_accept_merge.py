"""The workload of zero_accept_merge: each request fills the pool, and the next one waits for it.

The pool holds one request at a time. So every end of a request is a *hand-over*: the batch, which
holds only this request, runs empty in a verify while the next request waits, and then that request
is prefilled and merged into the batch.
"""

from __future__ import annotations

from harness.workload import Workload, each

from workloads import e4b_trtllm_mtp

REQUESTS = 201  # one more than there are hand-overs


def cpu(requests: int | None) -> Workload:
    """A tiny E4B-shaped model on torch stand-ins; real SGLang otherwise."""
    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.server import engine_arguments

    arguments = engine_arguments(
        log_level="info",
        decode_log_interval=1,
        skip_tokenizer_init=True,
        max_total_tokens=512,  # one request of 300 + 8 tokens, not two
        max_running_requests=8,
        chunked_prefill_size=512,
        disable_radix_cache=True,
    )
    return Workload(requests or REQUESTS, (300, 300), 8, TINY.vocab, arguments, timeout=300)


def cuda(requests: int | None) -> Workload:
    """The demo's geometry, with pools that hold one request at a time."""
    other = e4b_trtllm_mtp.cuda(8).given(
        max_total_tokens=64 * 40, swa_full_tokens_ratio=0.8, chunked_prefill_size=2048
    )
    count = requests or REQUESTS
    return Workload(count, (1500, 1500), 8, other.vocab, other.engine, timeout=400)


DEVICES = {"cpu": cpu, "cuda": cuda}
# If only one request may run, SGLang admits the next one after it has filtered the empty batch.
# (To send each request after the end of the one before is not enough: it may come too early.)
ALONE = each(DEVICES, max_running_requests=1)
