"""Looks for false findings: 2,000 requests in which nothing is wrong.

The requests differ in length, share prefixes, and do not fit into the KV pools at the same time.
Faults that break nothing abort and retract requests and evict prefixes on the way, drawn from one
seed. The same schedule runs twice: without tracers, and with every tracer in ``raise`` mode, which
stops at the first finding. On a GPU the tokens of a request depend on the others in its batch,
so there it is only said how many requests got the same ones.

From the tape of the armed run the scheduler then decides again, by ``g4debug replay``: all steps
must be equal. A replay needs the CPU engine; after a run on a GPU the tape is kept, so that it can
be replayed elsewhere.

On a GPU prefill runs on ``triton`` and decode on ``trtllm_mha``, on the CPU engine both run on
``trtllm_mha``; --backend triton puts everything on ``triton``.

--tokens, --together and --longest make the pools, the batches and the prompts those of production:
small ones, in which SGLang itself retracts and evicts, are the default.

--model names another model: a toy on the CPU engine, and on a GPU the real shape of Llama 3 8B,
Qwen3 8B or gpt-oss 20B with weights that SGLang draws (``repro/workloads/shapes.py``), on SGLang's
own choice of attention backends if --backend names none. --draft is a draft for it.

With --clients nothing is injected: requests end because their clients go away, and are retracted
because there is no room. A client does not go in the same step of both runs, so of such a request
the tokens must be the same as far as both came.

With --v2, on SGLang 0.5.12.post1, the armed run has ``SGLANG_FROZEN_KV_MTP_V2=1`` and SGLang's
strict leak check, so that it is FROZEN_KV_MTP on v2 that is held against v1's tokens. Its steps are
others than v1's, and so are the requests that are aborted; such a one must have the same tokens as
far as it came. A server that stays on v1 fails the run.

With --watch the second run has ``SGLANG_TRTLLM_MHA_DEBUG=watch``, as people leave it on, in place
of every tracer: nothing stops it, and it must tell nothing.

The exit code is 0 if both runs complete without a finding and, on the CPU engine, with the same
tokens and an equal replay. It is 1 if not, and 2 for wrong arguments.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import mixed, render, tracers
from harness.arguments import mtp_has_overlap
from harness.options import Parser, logs
from harness.processes import Outcome, script
from harness.replays import NAME, replayed
from harness.verdicts import not_completed
from rich.console import Console
from workloads.shapes import DRAFTS, SHAPES

from g4debug import discovery
from g4debug.cpu.server import DEFAULT
from g4debug.dumps import reading
from g4debug.settings import WATCH, fix_switch

STRESS = "seed=11;abort-request=4%on;forced-retract=4%on;radix-evict=5%on(512)"
# Short requests, many of them, in pools for a third of those that run.
ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_running_requests": 12, "max_total_tokens": 1024},
    "cuda": {"max_running_requests": 12, "max_total_tokens": 4096},
}
SIZES = ("max_total_tokens", "max_running_requests")
V2 = {"SGLANG_FROZEN_KV_MTP_V2": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
IN_FORCE = re.compile(r"; fixes: \d+ in force \(([^)]*)\)")
ON_V2 = "FROZEN_KV_MTP runs on speculative decoding v2."  # logged by the fix, once it is in force
STAYS = re.compile(r"frozen-kv-mtp-v2: not used, so the server stays on v1: (.*)")
BACKENDS = ("prefill_attention_backend", "decode_attention_backend")
# A retracted request waits behind all others: in a long queue it is rightly told that it starves.
STARVED = "starved"
# In the line at start of a scheduler that has something armed: by watch, or by anything else.
ARMED = re.compile(r"^g4debug \S+ \[scheduler\] armed: (?!none )[^()]+\((watch, )?", re.M)
WAITED = "The flight recorder told that a request starved: a retracted one waits behind all others."
TIMEOUT = 3600.0  # seconds of one run
CONSERVATIVE = 0.1  # with --clients SGLang lets in more requests than there is room for
WAVES = 2  # with --clients: all requests, and a few behind a flush


def run(armed: bool, args: Namespace, folder: Path, console: Console) -> Outcome:
    name, v2 = "armed" if armed else "plain", armed and args.v2
    env = {**({} if args.clients else {"G4DEBUG_FAULTS": STRESS}), **(V2 if v2 else {})}
    env |= {fix_switch(fix): "1" for fix in args.fix}
    waves = WAVES if args.clients else 1
    if armed:
        every = {"G4DEBUG_TRACE": ",".join(tracers.on_one_rank()), "G4DEBUG_LEAK_STEPS": "16"}
        env |= {"SGLANG_TRTLLM_MHA_DEBUG": WATCH} if args.watch else every
        env["SGLANG_TRTLLM_MHA_DEBUG_DIR"] = str(folder / "dumps")
    # The GPU's arguments switch overlap scheduling off on 0.5.12.post1, and v2 is made of it.
    engine: dict[str, Any] = {
        **ENGINE[args.device],
        **({"disable_overlap_schedule": False} if v2 else {}),
        **{name: n for name, n in zip(SIZES, (args.tokens, args.together), strict=True) if n},
    }
    if args.device == "cpu" or args.model != DEFAULT:
        engine["model"] = args.model
    if args.draft:
        engine["draft"] = args.draft
    if args.tp > 1:
        engine["tp_size"] = args.tp
    if armed and args.device == "cuda":
        env["G4DEBUG_NOT_RUN_ON_THIS_RELEASE"] = "1"  # this is the script that runs it there
    if args.clients:
        engine["schedule_conservativeness"] = CONSERVATIVE
    if args.backend:
        engine |= dict.fromkeys(BACKENDS, args.backend)
    with console.status(name):
        return mixed.run(
            name, env, folder, TIMEOUT, args.requests, engine, waves=waves, short=True,
            device=args.device, tape=armed, longest=args.longest, sampling=args.sampled,
            grammar=args.grammar, clients=args.clients,
        )  # fmt: skip


# Begins the line of a tensor-parallel rank but the first, which decides as the first one does.
OTHER_RANK = re.compile(r"^\[[^\]]* TP[1-9]\d*\b.*$", re.M)


def counts(text: str) -> str:
    """How often a run aborted, retracted, evicted and reused tokens, from its first rank's log."""
    text = OTHER_RANK.sub("", text)
    aborted = text.count("abort-request #")
    retracted = sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", text))
    evicted = text.count("radix-evict #")
    cached = sum(int(n) for n in re.findall(r"#cached-token: (\d+)", text))
    return (
        f"Aborts: {aborted}. Retractions: {retracted}. Forced evictions: {evicted}. "
        f"Prompt tokens that came from the prefix cache: {cached}."
    )


def not_on(text: str, fixes: Sequence[str]) -> str:
    """What is wrong if the scheduler's log does not say that these fixes are in force; else ''."""
    found = IN_FORCE.search(text)
    here = set() if found is None else set(found[1].split(", "))
    missing = [fix for fix in fixes if fix not in here]
    return f"Its log does not say that {', '.join(missing)} is in force." if missing else ""


def unarmed(text: str, watch: bool) -> str:
    """What is wrong if the scheduler did not have armed what was asked for; '' if it had."""
    found = ARMED.search(text)
    if found is None:
        return "The log has no line that says what is armed, so the silence says nothing."
    if watch != bool(found[1]):
        return f"Expected {'watch' if watch else 'every tracer'}, got: {found[0].strip(' (')}"
    return ""


def unstressed(text: str, clients: bool = False) -> str:
    """Which kind of stress never came into play in a run; empty if each did.

    clients: nothing is injected, and how many clients went away is told elsewhere. Where the pools
    are so small that SGLang itself retracts, the fault finds no step for it.
    """
    signs = {
        "aborted a request": r"abort-request #",
        "retracted one": r"forced-retract #|#retracted_reqs: [1-9]",
        "evicted a prefix": r"radix-evict #",
    }
    if clients:
        signs = {"retracted one": r"#retracted_reqs: [1-9]"}
    missing = [what for what, sign in signs.items() if not re.search(sign, text)]
    return f"Nothing {', '.join(missing)} in it, so it says nothing of that." if missing else ""


def stayed_on_v1(text: str) -> str:
    """The sentence on an armed run with ``--v2`` if its server did not run on v2; else empty."""
    if ON_V2 in text:
        return ""
    why = STAYS.search(text)
    return f"The server stayed on v1: {why[1] if why else 'its log does not say why'}."


def ended_by(run: Outcome, how: str) -> int:
    """How many answers ended so: by "length", by "abort", or, if a grammar was complete, "stop"."""
    return sum(out["finish"] == how for out in run.result["outputs"].values())


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.number("--requests", "how many requests each run serves", 2000)
    parser.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help="the attention backend of prefill and decode, such as triton, trtllm_mha or fa3",
    )
    parser.model()
    parser.add_argument(
        "--draft", default="", choices=("", *discovery.names("draft")), metavar="NAME"
    )
    parser.number("--tp", "tensor-parallel ranks, each on a GPU of its own", 1, "RANKS")
    for size, what in (
        ("--tokens", "the KV pool's size (default: 1,024, on a GPU 4,096)"),
        ("--together", "requests that run at once (default: 12)"),
        ("--longest", "tokens of a prompt, at most (default: 160, on a GPU 900)"),
    ):
        parser.add_argument(size, type=int, default=0, metavar="N", help=what)
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="every second request samples its tokens, with a temperature of 0.8; then no tokens "
        "are compared",
    )
    parser.add_argument(
        "--grammar",
        action="store_true",
        help="the answer of every third request must match a grammar, which no tape carries",
    )
    parser.add_argument(
        "--clients",
        action="store_true",
        help="no fault: each request is sent on its own, some clients go away, and a few more "
        "come behind a flush. What is retracted and evicted is for want of room",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="the armed run has SGLANG_TRTLLM_MHA_DEBUG=watch in place of every tracer",
    )
    parser.keep("logs and dumps")
    parser.add_argument(
        "--v2", action="store_true", help="the armed run has FROZEN_KV_MTP on v2 (0.5.12.post1)"
    )
    parser.add_argument(
        "--fix",
        nargs="+",
        default=[],
        choices=discovery.names("fix"),
        metavar="ID",
        help="both runs have these fixes or performance paths on",
    )
    args = parser.parse_args()
    if args.v2 and mtp_has_overlap():
        parser.error(
            "--v2 is for SGLang 0.5.12.post1. With this release FROZEN_KV_MTP runs on speculative "
            "decoding v2 by itself: leave --v2 out."
        )
    if args.device == "cuda" and args.model not in (DEFAULT, *SHAPES):
        parser.error(f"--model {args.model}: on a GPU expected one of {', '.join(SHAPES)}")
    on_gpus = (*DRAFTS, "ngram")
    if args.device == "cuda" and args.draft not in ("", *on_gpus):
        parser.error(f"--draft {args.draft}: on a GPU expected one of {', '.join(on_gpus)}")
    if args.draft and args.device == "cuda" and args.model != "llama":
        parser.error(
            f"--draft {args.draft}: on a GPU expected --model llama, which it was made for"
        )
    console = Console(highlight=False)
    with logs("soak", console, "The logs and dumps are kept in:", args.keep) as kept:
        plain = run(False, args, kept.folder, console)
        told(console, "Without tracers", plain)
        armed = run(True, args, kept.folder, console)
        told(console, "With watch" if args.watch else "With every tracer", armed)
        wrong = unarmed(armed.text, args.watch) if armed.completed else ""
        wrong = wrong or (stayed_on_v1(armed.text) if args.v2 else "")
        wrong = wrong or (not_on(armed.text, args.fix) if armed.completed else "")
        if args.grammar and armed.completed:
            ended = ended_by(armed, "stop")  # answers without a grammar ignore the end
            wrong = wrong or ("" if ended else "No answer was ended by its grammar.")
            render.say(console, f"{ended} answers were ended by their grammar.", hang=4)
        if args.clients and armed.completed:
            left = ended_by(armed, "abort")
            wrong = wrong or ("" if left else "No client went away.")
            said = f"{left} clients went away. Then the caches were flushed, and some more came."
            render.say(console, said, hang=4)
        for said in filter(None, (wrong, unstressed(armed.text, args.clients))):
            render.say(console, said, hang=4, style="red" if said == wrong else "yellow")
        dumps = [reading.read(path).finding for path in (kept.folder / "dumps").glob("*.pt")]
        findings = [found for found in dumps if found.kind != STARVED]
        if len(findings) < len(dumps):
            render.say(console, WAITED, hang=4, style="yellow")
        both = plain.completed and armed.completed
        alike, of = _alike(plain, armed, args.v2 or args.clients) if both else (0, 0)
        differ = args.device == "cuda" or args.sampled  # on a GPU they may
        kept.good = both and not wrong and not findings and (alike == of or differ)
        again = decided_again(args, kept.folder, console) if both else (True, "")
        kept.good &= again[0]
        tokens = f"{alike} of {of} requests got the same tokens in both runs."
        render.say(
            console,
            f"There were {len(findings)} findings. {tokens}",
            style="green" if kept.good else "red",
        )
        if again[1]:
            render.say(console, f"Replayed: {again[1]}.", hang=4, style="" if again[0] else "red")
    return kept.status


def decided_again(args: Namespace, folder: Path, console: Console) -> tuple[bool, str]:
    """Replay the armed run's tape, on the CPU engine: whether it passes, and the result."""
    if args.device == "cuda":
        return True, f"not here, since a replay needs the CPU engine. The tape: {folder / NAME}"
    with console.status("replay"):
        return replayed(folder)


def _alike(plain: Outcome, armed: Outcome, abort_differs: bool = False) -> tuple[int, int]:
    """(how many requests got the same tokens in both runs, how many there are)."""
    first, second = plain.result["outputs"], armed.result["outputs"]
    alike = sum(_same(out, second.get(rid), abort_differs) for rid, out in first.items())
    return alike, len(first.keys() | second.keys())


def _same(one: dict[str, Any], other: dict[str, Any] | None, abort_differs: bool) -> bool:
    """abort_differs: one may strike others than in the other run, or them earlier or later."""
    if one == other or other is None or not abort_differs:
        return one == other
    if "abort" not in (one["finish"], other["finish"]):
        return False
    shorter, longer = sorted((one["tokens"], other["tokens"]), key=len)
    return bool(longer[: len(shorter)] == shorter)


def told(console: Console, name: str, run: Outcome) -> None:
    """Print the line of a run; if it died, the last lines of the scheduler's traceback, too."""
    render.say(console, f"{name}: {_line(run)}", hang=4)
    if not run.completed:
        console.print("\n".join(run.traceback()), markup=False, soft_wrap=True)


def _line(run: Outcome) -> str:
    if not run.completed:
        return not_completed(run)
    outputs = run.result["outputs"]
    tokens = sum(len(o["tokens"]) for o in outputs.values())
    seconds = run.result["s"]
    return f"{len(outputs)} requests got {tokens} tokens in {seconds:.0f} s. {counts(run.text)}"


if __name__ == "__main__":
    raise SystemExit(script(main))
