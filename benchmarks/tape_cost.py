"""What the tape costs the host: the hooks of flight-recorder's tape, with stand-ins for SGLang.

    python benchmarks/tape_cost.py

It needs no SGLang and no GPU. A step is a round of the event loop, the step's beginning and the
result of its verify. On a GPU each 64th step also launches some ten small kernels for the digest.
What is made behind the launch of a step is told apart: the device works then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.taping import Taping


class Mode(SimpleNamespace):
    def __hash__(self) -> int:
        return hash(self.name)

    def is_extend(self) -> bool:
        return False


class TokenizedGenerateReqInput(SimpleNamespace):
    pass


def scheduler(page: int = 64) -> SimpleNamespace:
    allocator = SimpleNamespace(
        size_full=64 * 4096,
        size_swa=64 * 2048,
        full_available_size=lambda: 64 * 4000,
        swa_available_size=lambda: 64 * 2000,
        free_pages=torch.arange(4000),
        full_to_swa_index_mapping=torch.arange(64 * 4096),
        get_kvcache=lambda: None,
    )
    return SimpleNamespace(
        page_size=page, forward_ct=0, new_token_ratio=0.7, schedule_policy="fcfs", waiting_queue=[],
        token_to_kv_pool_allocator=allocator, tree_cache=None, is_fully_idle=lambda: False,
        running_batch=None, server_args=SimpleNamespace(speculative_algorithm="NEXTN"),
    )  # fmt: skip


def asked(rid: str, tokens: list[int]) -> TokenizedGenerateReqInput:
    params = SimpleNamespace(max_new_tokens=99, ignore_eos=False)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=tokens, sampling_params=params, return_logprob=False,
        logprob_start_len=-1,
    )  # fmt: skip


def microseconds(work: Callable[[], object], times: int) -> float:
    """The time of one call: the median of 7 runs."""
    runs = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(times):
            work()
        runs.append((time.perf_counter() - begin) / times * 1e6)
    return statistics.median(runs)


def main() -> None:
    torch.set_num_threads(1)  # as on a busy host
    it = scheduler()
    for rows in (1, 8, 64):
        taping = Taping(Context.alone("flight-recorder", Settings(debug=True)))
        taping.begin(it)
        taping._every = lambda: None  # type: ignore[method-assign]  # its work is the device's
        requests = [asked(f"r{n}", [n] * 100) for n in range(rows)]
        taping.round(it, requests)
        batch = SimpleNamespace(
            reqs=[SimpleNamespace(rid=r.rid) for r in requests],
            forward_mode=Mode(name="DECODE"),
            extend_num_tokens=0,
        )
        result = SimpleNamespace(accept_lens=torch.ones(rows, dtype=torch.int32))

        def step(taping: Taping = taping, batch: object = batch, result: object = result) -> None:
            taping.round(it, [])
            taping.step(it, batch)
            taping.launched(None)
            taping.result(None, it, batch, result)

        print(f"a step of {rows} requests: {microseconds(step, 2000):.1f} us")
    for page in (64, 16, 8, 1):
        server = scheduler(page)
        for tokens in (100, 1000, 8000, 100_000):
            taping = Taping(Context.alone("flight-recorder", Settings(debug=True)))
            taping.begin(server)
            request, before = asked("r", [*range(tokens)]), len(taping.ring.now)

            def comes(t: Taping = taping, r: object = request, s: object = server) -> None:
                t.round(s, [r])

            def behind(t: Taping = taping, come: Callable[[], None] = comes) -> None:
                come()
                t.launched(None)

            behind()
            size = len(taping.ring.now) - before
            both = microseconds(behind, 20)
            first = microseconds(comes, 20)
            taping.launched(None)
            print(
                f"a prompt of {tokens} tokens, pages of {page}: {first:.0f} us when it comes, "
                f"{both - first:.0f} us behind the launch, {size} bytes"
            )
    answer = SimpleNamespace(
        rid="r", output_ids=[*range(300)], finished_reason=None, finished=lambda: True
    )
    taping = Taping(Context.alone("flight-recorder", Settings(debug=True)))
    taping.begin(it)

    def one() -> None:
        taping.round(it, [asked("r", [*range(100)])])
        taping.released(answer)

    def whole() -> None:
        one()
        taping.launched(None)

    us = microseconds(whole, 200)
    print(
        f"a request of 100 + 300 tokens, begin and end, with what is behind launches: {us:.0f} us"
    )
    allocator = it.token_to_kv_pool_allocator
    digest = microseconds(lambda: taping.digests.look(allocator, 1), 20)
    print(f"a digest of 4,000 pages and 262,144 slots on this CPU: {digest:.0f} us, each 64th step")


if __name__ == "__main__":
    main()
