"""Measures what armed tracers cost, as people serve.

    python benchmarks/tracer_overhead.py [--device cuda|cpu] --out FOLDER [--seconds 520]
        [--variants NAMES] [--contexts TOKENS] [--seed 1] [--first-round 0] [--rounds 100] [--quick]
    python benchmarks/tracer_overhead.py --together COPIES --out FOLDER [--seconds 520] ...
    python benchmarks/tracer_overhead.py --switch VARIANT --out FOLDER [--seconds 520] ...
    python benchmarks/tracer_overhead.py --merge FOLDER... --out FOLDER
    python benchmarks/tracer_overhead.py --table FOLDER [--docs docs/costs.md]

One server at a time is on the device. A round is one server of each variant, in an order that
--seed draws anew for each round. All servers of a round get the same requests: prompts that share
beginnings, with the prefix cache on. First come requests that fill the cache, so that it evicts
from then on; then 1, 8 and 64 at a time, where the next is sent when one is done. Answers
are streamed, and each request is compared with the same request at the server with debugging off,
in the same round.

After --seconds no server is started any more, and the last line says which round comes next.
Rows are written as they come: requests.csv has one for each request, servers.csv one for each
server. The first server of a call is there for compiling kernels, and is not written down. --merge
puts the files of several calls, with different rounds or seeds, into one. So several GPUs of one
kind measure at the same time: one call each, with its own CUDA_VISIBLE_DEVICES and --first-round.
--table prints the figures; --docs also writes them into a page, between the lines
<!-- overhead --> and <!-- /overhead -->. FROZEN_KV_MTP is on; overlap scheduling is, where the
release has it with FROZEN_KV_MTP.

--together starts so many servers of each variant at once and keeps them on the device; see
measuring/together.py. Before these a server of the last variant starts, compiles, and goes. A round
is then a short turn of each, in an order of its own. With two copies or more there is a line in the
table that compares two servers with debugging off: it says how far the other figures can be
trusted.

--switch measures in one server: a variant with tracers. Their hooks are in the way in one turn and
not in the next. Two processes that run the same code can differ by a tenth for as long as they
live; here there is only one. Each turn begins with an empty prefix cache. The guards that are part
of a CUDA graph run in every turn, so what they take of the GPU's time is not in these figures. With
overlap scheduling it refuses what has a guard that compares with a copy of a hook. Not so: watch,
whose guards know ranges only; the flight recorder alone (recorder); and its tape alone (tape).

--contexts sends, in place of that load, one request at a time with prompts of so many tokens each
(500,8000,32000), and the table has a line for each: on triton, the lists that page-table checks are
as long as the context.

--variants names others than the four: single tracers (page-table-alone ...), which tells them
apart; SGLANG_TRTLLM_MHA_DEBUG=watch (watch), and a second server like off (off-again); one more
tracer over the five (kv-writes, ranks); the five with all values that spec-lifecycle follows
(spec-values), and prefix-cache over these; SGLang's own checks, from 0.5.23 on (page-invariants,
strict), servers without FROZEN_KV_MTP (no-mtp, armed-no-mtp, watch-no-mtp, kv-canary), because
SGLang's --kv-canary does not run with it, and servers with everything on triton (triton,
armed-triton).

--tp gives each server so many tensor-parallel ranks, each on a GPU of its own. --model E4B-32k is
E4B with a small vocabulary, so that four servers fit on a GPU of 80 GB at once.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import models, options, overhead, results, tracers
from measuring.fleet import Fleet, Gated
from measuring.servers import ServerDied, Variant
from measuring.together import Crowd
from measuring.tracers import ALONE, FOUR, ask, check, fill, loaded, put, under_load
from served import gate

# variant -> what it is compared with, and its name in the table
COMPARED = {
    "recorder": ("off", "flight recorder alone"),
    "watch": ("off", "`watch`"),
    "armed": ("off", "five tracers armed"),
    "off-again": ("off", "debugging off, another server"),
    "kv-integrity": ("armed", "`kv-integrity`, over the five"),
    **{f"{t}-alone": ("off", f"`{t}` alone") for t in ALONE},
    "kv-writes": ("armed", "`kv-writes`, over the five"),
    "ranks": ("armed", "`rank-divergence`, over the five"),
    "spec-values": ("armed", "`spec-lifecycle` with all values, over the five"),
    "prefix-cache": ("spec-values", "`prefix-cache`, over the five with all values"),
    "page-invariants": ("off", "SGLang's `SGLANG_CHECK_KV_PAGE_INVARIANTS=1`"),
    "strict": ("off", "SGLang's `SGLANG_INVARIANT_CHECK` at its strictest"),
    "armed-no-mtp": ("no-mtp", "five tracers armed, without MTP"),
    "watch-no-mtp": ("no-mtp", "`watch`, without MTP"),
    "kv-canary": ("no-mtp", "SGLang's `--kv-canary raise`, without MTP"),
    "tape": ("no-tape", "the tape, over the flight recorder alone"),
    "armed-triton": ("triton", "five tracers armed, on triton"),
}
NO_COPIES = ("recorder", "tape", "watch")  # variants without a guard that needs a hook's copy
BASES = {
    "off": "debugging off",
    "no-tape": "flight recorder alone, without its tape",
    "no-mtp": "debugging off, without MTP",
    "triton": "debugging off, on triton",
}


def plan(
    seed: int, first: int, rounds: int, variants: Sequence[str] = FOUR
) -> Iterator[tuple[str, str]]:
    """(round, variant) of every server: rounds from ``first`` on, each in an order of its own."""
    for number in range(first, rounds):
        name = f"{seed}.{number}"
        order = list(variants)
        random.Random(name).shuffle(order)
        yield from ((name, variant) for variant in order)


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Run the plan as far as the time allows. Returns how many servers died."""
    tracers.installed()
    end, died, longest = time.monotonic() + args.seconds, 0, 0.0
    shared = tracers.engine(args.device, args.contexts, args.tp, args.model)
    first = "kv-integrity"  # it has the kernels of all tracers
    variants = under_load({first, *args.variants}, shared)
    last = args.first_round + args.rounds
    steps = list(plan(args.seed, args.first_round, last, args.variants))
    names = [("first", first), *((f"{r}-{v}", v) for r, v in steps)]
    requests, servers = (results.Growing(args.out / n) for n in ("requests.csv", "servers.csv"))
    done = 0
    with Fleet(names, variants, args.device, folder, args.ahead) as fleet:
        for server, (number, variant) in zip(fleet, [("", first), *steps], strict=False):
            if time.monotonic() + 1.1 * longest > end:
                break
            begin = time.monotonic()
            try:
                device = server.start()["device"]
                up = time.monotonic() - begin
                if number:
                    fleet.quiet()
                mine = loaded(args, args.quick or not number)
                before = server.facts()
                seed = 100 * args.seed + int(number.partition(".")[2] or 99)
                rows = ask(server, mine, seed)
                facts = server.facts()
                if not number:
                    whole = time.monotonic() - begin
                    print(f"first server: up in {up:.0f} s, {whole:.0f} s", flush=True)
                    continue
                check(variant, facts)
                at = {"round": number, "variant": variant}
                requests.add([{**at, **row} for row in rows], device)
                seconds = round(time.monotonic() - begin, 1)
                steps_run = facts["steps"] - before["steps"]
                said = {"nodes": facts["nodes"], "sites": facts["sites"]}
                row = {**at, "steps": steps_run, **said, "start_s": round(up, 1),
                       "whole_s": seconds, "tracers": facts["tracers"]}  # fmt: skip
                servers.add([row], device)
                took = f"up in {up:.0f} s, {seconds:.0f} s, {steps_run} steps"
                print(f"{number} {variant}: {took}", flush=True)
            except ServerDied as e:
                died += 1
                print(e, flush=True)
            finally:
                done += bool(number)
                longest = max(longest, time.monotonic() - begin) if number else longest
    following = args.first_round + -(-done // len(args.variants))
    print(f"{done} servers measured; the next call: --seed {args.seed} --first-round {following}")
    return died


def said_at_end(server: Gated, rounds: int) -> dict[str, Any]:
    facts = server.facts()
    told = ("steps", "tape_steps", "nodes", "sites", "lacks", "findings", "tracers")
    return {"rounds": rounds, **{n: facts[n] for n in told}}


AWAKE_AGAIN = 8  # requests that are not written down, after a server has slept


def measure_together(args: argparse.Namespace, folder: Path) -> int:
    """Rounds of short turns, as many as the time allows. Returns how many servers died."""
    tracers.installed()
    end = time.monotonic() + args.seconds
    shared = tracers.engine(args.device, args.contexts, args.tp, args.model)
    # SGLang takes a share of what is free when it starts. The servers start at the same time, and
    # max_total_tokens says how large the pools are: so the share is only not to be too small.
    variants = under_load(args.variants, {**shared, "mem_fraction_static": 0.9})
    whole = loaded(args, args.quick)
    named = [(v, copy) for copy in range(args.together) for v in args.variants]
    # Another order in each call, because the first of them has the machine for a moment.
    random.Random(f"start {args.seed}.{args.first_round}").shuffle(named)
    compiles = args.variants[-1]  # the one with the most tracers, where the command has them so
    first = Gated("first", variants[compiles], args.device, folder)
    servers = [Gated(f"{v}-{copy}", variants[v], args.device, folder) for v, copy in named]
    number, longest = args.first_round, 0.0
    with Crowd(first, servers) as crowd:
        try:
            variant_of = {id(s): v for (v, _), s in zip(named, servers, strict=True)}
            variant_of[id(first)] = compiles

            def prepare(server: Gated) -> None:
                check(variant_of[id(server)], server.facts())
                fill(server, whole)

            device = crowd.start(prepare)
            print(f"{len(crowd.servers)} servers, {end - time.monotonic():.0f} s left", flush=True)
            written = results.Growing(args.out / "requests.csv")
            both = zip(named, servers, strict=True)
            turns = [(name, server) for name, server in both if server in crowd.servers]
            while time.monotonic() + 1.1 * longest < end and number < args.rounds:
                begin = time.monotonic()
                random.Random(f"{args.seed}.{number}").shuffle(turns)
                seed = 1000 * args.seed + number
                for (variant, copy), server in turns:
                    with crowd.awake(server):
                        again = {"serve": AWAKE_AGAIN, "seed": 0, "count": AWAKE_AGAIN}
                        put(server, whole, {**again, "tokens": 16})
                        rows = ask(server, whole.turn(), seed)
                    at = {"round": f"{args.seed}.{number}.{copy}", "variant": variant}
                    written.add([{**at, "copy": copy, **row} for row in rows], device)
                longest = max(longest, time.monotonic() - begin)
                print(f"round {number}: {time.monotonic() - begin:.0f} s", flush=True)
                number += 1
            told = []
            for (variant, copy), server in turns:
                with crowd.awake(server):
                    put(server, whole, {"serve": 1, "seed": 0, "count": 1, "tokens": 2})
                    of = {"variant": variant, "copy": copy}
                    told.append({**of, **said_at_end(server, number - args.first_round)})
            results.Growing(args.out / "servers.csv").add(told, device)
        except ServerDied as e:
            print(e, flush=True)
            return 1
    print(f"the next call: --seed {args.seed} --first-round {number}")
    return 0


def switchable(args: argparse.Namespace, name: str) -> Variant:
    """A variant whose hooks can be switched off and on; see ``served/gate.py``."""
    shared = tracers.engine(args.device, args.contexts, model=args.model)
    variant = under_load([name], shared)[name]
    what = gate.TAPE if name == gate.TAPE else gate.TRACERS
    return replace(variant, environment={**variant.environment, gate.SWITCH: what})


def started(server: Gated, name: str) -> tuple[str, dict[str, Any]]:
    """Start such a server; its device, and its facts. Raises SystemExit if nothing is switched."""
    device = str(server.start()["device"])
    facts = server.facts()
    check(name, facts)
    if not facts["switched"]:
        raise SystemExit(f"{name}: that server has nothing that can be switched")
    return device, facts


def measure_switched(args: argparse.Namespace, folder: Path) -> int:
    """Turns with the tracers and without, as many as the time allows. Returns 1 if it died."""
    tracers.installed()
    end = time.monotonic() + args.seconds
    base = COMPARED[args.switch][0]
    turn = loaded(args, args.quick).turn()
    number, longest = args.first_round, 0.0
    server = Gated(args.switch, switchable(args, args.switch), args.device, folder)
    try:
        device, facts = started(server, args.switch)
        if facts["overlap"] and args.device == "cuda" and args.switch not in NO_COPIES:
            raise SystemExit("--switch needs a server without overlap scheduling; use --together")
        for _ in range(2):  # one turn each way that is not written down
            ask(server, turn, 0)
            server.put({"flush": True})
            server.switch()
        print(f"up, {end - time.monotonic():.0f} s left", flush=True)
        written = results.Growing(args.out / "requests.csv")
        armed = True
        while time.monotonic() + 1.1 * longest < end and number < args.rounds:
            begin = time.monotonic()
            seed = 1000 * args.seed + number
            # The next round begins in the state in which this one ends: no switch is needed then.
            for now in (armed, not armed):
                if now is not armed:
                    server.switch()
                rows = ask(server, turn, seed)
                at = {"round": f"{args.seed}.{number}", "variant": args.switch if now else base}
                written.add([{**at, **row} for row in rows], device)
                server.put({"flush": True})
                armed = now
            longest = max(longest, time.monotonic() - begin)
            number += 1
        told = {"variant": args.switch, **said_at_end(server, number - args.first_round)}
        results.Growing(args.out / "servers.csv").add([told], device)
    except ServerDied as e:
        print(e, flush=True)
        return 1
    finally:
        server.stop()
    print(f"{number - args.first_round} rounds; the next call: --first-round {number}")
    return 0


def contexts(text: str) -> tuple[int, ...]:
    """The prompts' tokens of a command line, such as "500,8000"."""
    return tuple(int(t) for t in text.split(","))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


AGAIN = "again"  # the variant of a second server of a base


def twins(rows: Sequence[Mapping[str, Any]], base: str) -> list[Mapping[str, Any]]:
    """The rows of a base's first server, and the rows of its second one as a variant."""
    mine = [r for r in rows if r["variant"] == base]
    first = [r for r in mine if str(r.get("copy")) == "0"]
    second = [r for r in mine if str(r.get("copy")) == "1"]
    as_variant = {"variant": AGAIN}
    return first + [
        {**r, **as_variant, "round": f"{str(r['round']).rpartition('.')[0]}.0"} for r in second
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures as lines of Markdown: one for each batch size and comparison."""
    loads = dict.fromkeys((int(r["batch"]), str(r.get("context", ""))) for r in rows)
    lines = [
        f"| batch | what | rounds | {' | '.join(overhead.METRICS)} |",
        "|---|---|---" + "|---" * len(overhead.METRICS) + "|",
    ]
    present = {str(r["variant"]) for r in rows}
    for batch, context in loads:
        mine = [r for r in rows if str(r.get("context", "")) == context]
        load = f"{batch}, {int(context):,} tokens" if context else str(batch)
        for base, what in BASES.items():
            if base not in present:
                continue
            was = overhead.absolute(mine, batch, base)
            lines.append(
                f"| {load} | {what} | | {_ms(was.get('time per step'))} "
                f"| {was['time per token']:.2f} ms "
                f"| {was['first token']:.1f} ms | {was['first token, p99']:.1f} ms "
                f"| {was['throughput']:,.0f} tokens/s |"
            )
            if alike := overhead.compare(twins(mine, base), batch, base, AGAIN):
                cells = " | ".join(str(alike.get(metric, "")) for metric in overhead.METRICS)
                count = alike["throughput"].rounds
                lines.append(f"| {load} | {what}, a second server | {count} | {cells} |")
        for variant, (base, what) in COMPARED.items():
            found = overhead.compare(mine, batch, base, variant)
            if not found:
                continue
            count = found["throughput"].rounds
            cells = " | ".join(str(found.get(metric, "")) for metric in overhead.METRICS)
            lines.append(f"| {load} | {what} | {count} | {cells} |")
    return lines


def filled(page: str, lines: Sequence[str]) -> str:
    """``page`` with these lines between its two marks. ValueError if it does not have both."""
    begin, end = "<!-- overhead -->\n", "<!-- /overhead -->"
    before, mark, rest = page.partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"the page lacks the lines {begin.strip()} and {end}")
    return before + begin + "\n".join(lines) + "\n" + end + after


def main() -> int:
    parser = options.parser(__doc__, "cuda", out="the folder for the CSV files")
    parser.add_argument("--seconds", type=int, default=520, help="start no server after these")
    parser.add_argument("--seed", type=int, default=1, help="of the orders and the requests")
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100, help="at most so many")
    parser.add_argument("--ahead", type=int, help="servers begun in advance (default: 8; cpu: 1)")
    parser.add_argument(
        "--variants", type=tracers.variant_names, default=FOUR, help=f"default: {','.join(FOUR)}"
    )
    parser.add_argument(
        "--contexts", type=contexts, default=(), metavar="TOKENS", help="such as 500,8000,32000"
    )
    parser.add_argument(
        "--together", type=int, metavar="COPIES", help="servers of each variant, all at once"
    )
    can = ("armed", *NO_COPIES)
    armed = [n for n in COMPARED if n.startswith(can) or n.endswith("-alone")]
    parser.add_argument("--switch", choices=armed, metavar="VARIANT", help=", ".join(armed))
    parser.add_argument(
        "--model", choices=models.NAMES, default="E4B", help="on a GPU (default: E4B)"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="default: 1")
    parser.add_argument("--quick", action="store_true", help="few requests, to try the script")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--table", type=Path, metavar="FOLDER")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="with --table: write it there")
    args = parser.parse_args()
    if args.ahead is None:
        args.ahead = 8 if args.device == "cuda" else 1
    if args.table:
        lines = table(results.read(args.table / "requests.csv")[1])
        print("\n".join(lines))
        if args.docs:
            args.docs.write_text(filled(args.docs.read_text(), lines))
        return 0
    if not args.out:
        parser.error("--out is needed: the folder for the CSV files")
    if args.switch and args.tp > 1:
        parser.error("--switch switches the tracers of one rank; use --together with --tp")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.merge:
        for name in ("requests.csv", "servers.csv"):
            results.merge([folder / name for folder in args.merge], args.out / name)
        return 0
    with tempfile.TemporaryDirectory(prefix="g4debug-overhead-") as folder:
        way = measure_switched if args.switch else measure_together if args.together else measure
        died = way(args, Path(folder))
    rows = results.read(args.out / "requests.csv")[1]
    if rows:
        print("\n".join(table(rows)))
    return 1 if died else 0


if __name__ == "__main__":
    raise SystemExit(main())
