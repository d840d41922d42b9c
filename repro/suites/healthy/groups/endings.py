"""The ways in which requests end, and other options of a single request."""

from __future__ import annotations

import asyncio
from typing import Any

from suites.healthy.workload import Client, cached, finish, require, with_mtp, without_mtp, workload


@workload("end of sequence", "requests that end by EOS and by stop token ids")
async def eos(client: Client) -> None:
    # Whatever the model would say next becomes its end-of-sequence token for a second request.
    prompts = [client.prompt(client.between(20, 200)) for _ in range(6)]
    first = await client.together(*(client.generate(p, 20) for p in prompts))
    again = [
        client.generate(
            p, 40, sampling={"stop_token_ids": [o["output_ids"][7]], "ignore_eos": False}
        )
        for p, o in zip(prompts, first, strict=True)
    ]
    found = await client.together(*again)
    client.note("ended by a stop token", sum(finish(o) == "stop" for o in found), 6)
    # The model's own end of sequence: a bias makes it the likeliest token.
    biased = {"ignore_eos": False, "logit_bias": {"1": 100.0}}
    own = await client.together(
        *(client.generate(p, 30, sampling=biased) for p in prompts),
        *(client.generate(p, 30) for p in prompts),
    )
    client.note("ended by EOS", sum(finish(o) == "stop" for o in own), 6)


@workload("stop strings", "six requests, each ended by a word of its own answer")
async def stop_strings(client: Client) -> None:
    prompts = [client.prompt(client.between(20, 200)) for _ in range(6)]
    first = await client.together(*(client.generate(p, 20) for p in prompts))
    words = [o["text"].split()[9] for o in first]
    found = await client.together(
        *(
            client.generate(p, 60, sampling={"stop": [w]})
            for p, w in zip(prompts, words, strict=True)
        )
    )
    client.note("ended by a stop string", sum(finish(o) == "stop" for o in found), 6)


# Not compared: which random numbers an answer gets depends on which others run beside it.
@workload("n > 1", "four sampled answers each to two prompts", compare=False)
async def several_answers(client: Client) -> None:
    """SGLang first computes the prompt once, so that the answers share it in the prefix cache."""
    prompt = client.prompt(200)
    sampling = {"n": 4, "temperature": 0.8}
    found = await client.together(
        client.generate(prompt, 24, sampling=sampling),
        client.generate(client.prompt(90), 24, sampling=sampling),
    )
    client.note("answers", sum(len(f) for f in found), 8)


@workload("logprobs", "of prompts, of answers, of the best 3 and of given tokens")
async def logprobs(client: Client) -> None:
    found = await client.together(
        *(
            client.generate(
                client.prompt(client.between(20, 200)),
                16,
                return_logprob=True,
                logprob_start_len=start,
                top_logprobs_num=3,
                token_ids_logprob=[4, 5],
            )
            for start in (0, 10, -1, 0)
        )
    )
    inputs = sum(len(o["meta_info"].get("input_token_logprobs") or ()) for o in found)
    client.note("prompt tokens with logprobs", inputs, 40)
    answers = sum(len(o["meta_info"]["output_token_logprobs"]) for o in found)
    client.note("answer tokens with logprobs", answers, 64)


@workload("sampling", "top-k, top-p, min-p, three penalties, a least length", compare=False)
async def sampled(client: Client) -> None:
    params: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.4},
        {"temperature": 0, "min_new_tokens": 12, "ignore_eos": False},
    )
    found = await client.together(
        *(client.generate(client.prompt(client.between(20, 200)), 24, sampling=p) for p in params)
    )
    client.note("answers", len(found), 6)


@workload("very short requests", "prompts of 1 to 128 tokens, answers of 0 and 1")
async def one_token(client: Client) -> None:
    """Requests that end with their prefill, alone and beside others."""
    found = await client.together(
        *(client.generate(client.prompt(n), 1) for n in (1, 2, 63, 64, 65, 128)),
        *(client.generate(client.prompt(n), 20) for n in (1, 64, 127)),
        *(client.generate(client.prompt(n), 0) for n in (30, 64)),
    )
    client.note("answers of at most one token", sum(len(o["output_ids"]) <= 1 for o in found), 6)


@workload("streaming", "answers that are sent token by token", compare=False)
async def streamed(client: Client) -> None:
    async def one(length: int) -> int:
        pieces = 0
        async for _ in await client.stream(client.prompt(length), 30):
            pieces += 1
        return pieces

    found = await client.together(*(one(n) for n in (20, 90, 150, 200)))
    client.note("pieces", sum(found), 12)


@workload("shared prefixes", "six prompts that begin like an earlier one")
async def shared_prefix(client: Client) -> None:
    prefix = client.prompt(260)
    await client.generate(prefix, 8)
    found = await client.together(
        *(client.generate(prefix[: 130 + 20 * i] + client.tokens(40), 30) for i in range(6))
    )
    client.note("prompt tokens from the prefix cache", sum(map(cached, found)), 400)


@workload("the same prompt twice", "five prompts, nothing is kept")
async def recomputed(client: Client) -> None:
    prompts = [client.prompt(client.between(20, 300)) for _ in range(5)]
    first = await client.together(*(client.generate(p, 30) for p in prompts))
    again = await client.together(*(client.generate(p, 30) for p in prompts))
    require(
        [o["output_ids"] for o in first] == [o["output_ids"] for o in again],
        "the same prompts got other tokens the second time",
    )
    client.note("prompts computed twice", len(again), 5)
    require(sum(map(cached, again)) == 0, "the prefix cache is off, but was used")


@workload(
    "aborts", "four of eight requests are aborted, in chunked prefill and in decode", compare=False
)
async def aborted(client: Client) -> None:
    async def run(number: int, length: int, tokens: int) -> Any:
        return await client.generate(client.prompt(length), tokens, name=f"abort-{number}")

    tasks = [
        asyncio.ensure_future(run(i, client.between(20, 900), client.between(100, 300)))
        for i in range(8)
    ]
    await client.until("Prefill batch", 3)
    for number in (0, 2, 5, 7):
        await asyncio.sleep(0.2)
        client.manager.abort_request(rid=f"abort-{number}")
    found = await asyncio.gather(*tasks)
    client.note("aborted", sum(finish(o) == "abort" for o in found), 3)
    client.note("completed beside them", sum(finish(o) == "length" for o in found), 3)


@workload("aborts while waiting", "six requests of 16 are aborted before their turn", compare=False)
async def aborted_while_waiting(client: Client) -> None:
    tasks = [client.start(client.prompt(100), 60, name=f"wait-{i}") for i in range(16)]
    await client.decoding(8)
    for number in range(10, 16):
        client.manager.abort_request(rid=f"wait-{number}")
    found = await asyncio.gather(*tasks)
    never_ran = [o for o in found if finish(o) == "abort" and not o["output_ids"]]
    client.note("aborted before they ran", len(never_ran), 3)
    client.note("completed", sum(finish(o) == "length" for o in found), 8)


@workload("abort of everything", "in the middle of a batch", compare=False)
async def all_aborted(client: Client) -> None:
    tasks = [client.start(client.prompt(client.between(20, 300)), 300) for _ in range(6)]
    await client.decoding(6)
    client.manager.abort_request(abort_all=True)
    found = await asyncio.gather(*tasks)
    client.note("aborted", sum(finish(o) == "abort" for o in found), 4)
    await client.batch(4)


EACH = (
    eos, stop_strings, several_answers, logprobs, sampled, one_token, streamed, aborted,
    aborted_while_waiting, all_aborted,
)  # fmt: skip
NO_RADIX = {"disable_radix_cache": True}

GROUPS = (
    with_mtp("mtp", "MTP, prefix cache, prefill in chunks", (*EACH, shared_prefix)),
    with_mtp(
        "mtp-no-radix", "MTP, no prefix cache, prefill in chunks", (*EACH, recomputed), NO_RADIX
    ),
    without_mtp("plain", "no MTP, prefix cache", (*EACH, shared_prefix)),
    without_mtp("plain-no-radix", "no MTP, no prefix cache", (*EACH, recomputed), NO_RADIX),
)
