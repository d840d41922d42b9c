"""Sessions: requests that continue an earlier one."""

from __future__ import annotations

import asyncio
from typing import Any

from suites.healthy.groups.endings import NO_RADIX
from suites.healthy.workload import Client, cached, finish, require, with_mtp, without_mtp, workload

TURNS = 5


async def _open(client: Client, streaming: bool = False) -> str:
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    asked = OpenSessionReqInput(capacity_of_str_len=100_000, streaming=streaming)
    return str(await client.manager.open_session(asked, None))


async def _close(client: Client, session: str) -> None:
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    await client.manager.close_session(CloseSessionReqInput(session_id=session), None)


async def _turns(client: Client, number: int, streaming: bool) -> int:
    """A session of some turns. Returns the prompt tokens that need not be computed again."""
    # Drawn before anything runs: which session is first differs from run to run.
    asked = [client.prompt(150), *(client.tokens(client.between(5, 90)) for _ in range(TURNS - 1))]
    session = await _open(client, streaming)
    last, reused, length = None, 0, 0
    for turn, prompt in enumerate(asked):
        params = {"id": session, "rid": None if streaming else last}
        name = f"session-{number}-turn-{turn}"
        output = await client.generate(prompt, 24, name=name, session_params=params)
        require(finish(output) == "length", f"turn {turn} ended by {finish(output)}")
        meta = output["meta_info"]
        require(meta["prompt_tokens"] > length, "a turn did not go on where the last one ended")
        last, length = meta["id"], meta["prompt_tokens"]
        reused += cached(output)
    await _close(client, session)
    return reused


async def _beside_others(client: Client, streaming: bool) -> None:
    """Three sessions at the same time, beside requests without one."""
    found = await client.together(
        *(_turns(client, number, streaming) for number in range(3)),
        *(
            client.generate(client.prompt(client.between(2, 200)), 40, name=f"other-{i}")
            for i in range(6)
        ),
    )
    client.note("turns", 3 * TURNS)
    client.note("prompt tokens reused", sum(found[:3]), 300 if streaming else 0)


@workload(
    "sessions",
    "`open_session` and `session_params`: three at a time, five turns each, beside others",
)
async def sessions(client: Client) -> None:
    await _beside_others(client, False)


@workload("sessions that go back", "`drop_previous_output`, `offset`, a second branch, `replace`")
async def session_branches(client: Client) -> None:
    session = await _open(client)
    first = await client.generate(
        client.prompt(200), 30, session_params={"id": session, "rid": None}
    )
    rid = first["meta_info"]["id"]
    ways: tuple[dict[str, Any], ...] = (
        {"drop_previous_output": True},
        {"offset": 100},
        {},
        {"replace": True},
    )
    for number, way in enumerate(ways):
        params = {"id": session, "rid": rid, **way}
        output = await client.generate(client.tokens(40 + number), 30, session_params=params)
        require(finish(output) == "length", f"{way} ended by {finish(output)}")
        client.note("branches", 1)
    await _close(client, session)


@workload(
    "sessions, aborted and closed",
    "three turns are aborted, and the session is closed while a turn runs",
    compare=False,
)
async def session_aborts(client: Client) -> None:
    """A turn is aborted, the session goes on from an earlier turn, and is closed while one runs."""
    session = await _open(client)
    first = await client.generate(
        client.prompt(300), 20, session_params={"id": session, "rid": None}
    )
    here = {"id": session, "rid": first["meta_info"]["id"]}
    for number in range(3):
        name = f"turn-{number}"
        task = client.start(client.tokens(70), 400, name=name, session_params=here)
        await client.decoding(1, 4)
        client.manager.abort_request(rid=name)
        client.note("turns aborted", finish(await task) == "abort", 0)
        again = await client.generate(client.tokens(30), 20, session_params=here)
        require(finish(again) == "length", f"the turn after an abort ended by {finish(again)}")
    task = client.start(client.tokens(20), 60, session_params=here)
    await asyncio.sleep(0.2)
    await _close(client, session)
    await task
    client.note("turns aborted", 0, 2)


@workload("streaming sessions", "three at a time, five turns each, beside others")
async def streaming_sessions(client: Client) -> None:
    await _beside_others(client, True)


@workload(
    "streaming sessions, aborted", "a turn is aborted, and another one follows", compare=False
)
async def streaming_session_aborts(client: Client) -> None:
    session = await _open(client, True)
    await client.generate(client.prompt(200), 20, session_params={"id": session})
    task = client.start(client.tokens(60), 400, name="stream-turn", session_params={"id": session})
    await client.decoding(1, 4)
    client.manager.abort_request(rid="stream-turn")
    client.note("turns aborted", finish(await task) == "abort")
    again = await client.generate(client.tokens(30), 20, session_params={"id": session})
    client.note("turns after the abort", finish(again) == "length")
    await client.batch(3)
    await _close(client, session)


SESSIONS = (sessions, session_branches, session_aborts)
STREAMING = (streaming_sessions, streaming_session_aborts)

IN_STREAMS = {"enable_streaming_session": True}

GROUPS = (
    with_mtp("sessions", "sessions, MTP, prefix cache", SESSIONS),
    with_mtp("sessions-no-radix", "sessions, MTP, no prefix cache", SESSIONS, NO_RADIX),
    without_mtp(
        "streaming-sessions", "streaming sessions, prefix cache, no MTP", STREAMING, IN_STREAMS
    ),
    with_mtp(
        "streaming-sessions-mtp", "streaming sessions, prefix cache, MTP", STREAMING, IN_STREAMS
    ),
)
