"""Compute how many requests the full pool and the SWA pool hold.

It reads the config.json of a model with an SWA pool (Gemma-4, gpt-oss, Llama-4,
MiMo-V2, Granite-SWA, Laguna, Mellum, Step-3.5), computes the pools as SGLang does for several
values of swa_full_tokens_ratio, and tells which value holds the most requests.
It needs neither SGLang nor a GPU.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from g4debug.cli import CliError, add_console_arguments, at_least, present

if TYPE_CHECKING:
    from g4debug.pools.config import KVGeometry
    from g4debug.pools.plan import Plan
    from g4debug.pools.solve import Memory

NAME = "pools"
HELP = "compute how many requests the KV pools hold"

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgt", 1)}
# flag, least value, default, what it is
NUMBERS = (
    ("--input", 1, 1000, "prompt tokens (default: 1000)"),
    ("--output", 1, 1000, "output tokens (default: 1000)"),
    ("--concurrency", 1, 32, "requests at a time (default: 32)"),
    ("--window", 1, None, "window in tokens (default: the config's)"),
    ("--tp", 1, 1, "the server's --tp-size (default: 1)"),
    ("--page", 1, 64, "the server's --page-size (default: 64)"),
    ("--chunk", -1, 8192, "the server's --chunked-prefill-size, -1 for none (default: 8192)"),
    (
        "--draft-tokens", 0, 0,
        "the server's --speculative-num-draft-tokens (default: 0, which means no MTP)",
    ),
)  # fmt: skip
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a config.json, or the folder that has it"
    )
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument(
        "--memory",
        type=size,
        help="memory for KV on one GPU, without the weights: 40GiB, 43e9, ...",
    )
    memory.add_argument(
        "--from-log",
        type=logged,
        metavar="FULL@RATIO",
        help="in place of --memory: the full_layer_tokens that SGLang logged, and the ratio that "
        "it had, such as 593956@0.8",
    )
    for flag, least, default, what in NUMBERS:
        parser.add_argument(flag, type=at_least(least), default=default, help=what)
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="the server's --kv-cache-dtype (default: auto)",
    )
    parser.add_argument(
        "--no-radix", action="store_true", help="the server has --disable-radix-cache"
    )
    parser.add_argument(
        "--split-leaf",
        action="store_true",
        help="the server has SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT=1",
    )
    parser.add_argument(
        "--ratio",
        type=ratio,
        nargs="+",
        default=(),
        help="the ratios to show in the table (default: nine of them)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--svg", type=Path, metavar="OUT.svg", help="also write the result as a picture"
    )
    add_console_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from g4debug.reporters import pools as reporter

    result = _plan(args)
    present(reporter, result, args)
    if args.svg is not None:
        from g4debug.reporters import pools_svg

        try:
            args.svg.write_text(pools_svg.draw(result), "utf-8")
        except OSError as e:
            raise CliError(f"cannot write {args.svg}: {e.strerror or e}") from e
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    from g4debug.pools import config, plan

    try:
        geometry = config.read(args.model)
    except config.ConfigError as e:
        raise CliError(str(e)) from e
    if args.window is not None:
        geometry = replace(geometry, window=args.window)
    workload = plan.Workload(
        args.input,
        args.output,
        args.concurrency,
        max(0, args.chunk),
        args.draft_tokens,
        not args.no_radix,
        args.split_leaf,
    )
    return plan.plan(geometry, _memory(args, geometry), workload, args.ratio)


def _memory(args: argparse.Namespace, geometry: KVGeometry) -> Memory:
    from g4debug.pools.config import DTYPE_BYTES
    from g4debug.pools.solve import Memory, cell_bytes

    dtype = geometry.dtype if args.kv_dtype == "auto" else args.kv_dtype
    if dtype not in DTYPE_BYTES:
        raise CliError(
            f"{args.model}: got dtype {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}; "
            "give the right one by --kv-dtype"
        )
    memory = Memory(args.memory or 0, args.page, args.tp, DTYPE_BYTES[dtype])
    if args.from_log is None:
        return memory
    full, at = args.from_log
    # The least memory that gives this many tokens. SGLang may have had up to one page more.
    return replace(memory, kv_bytes=-int(-full * cell_bytes(geometry, memory, at) // 1))


def size(text: str) -> int:
    """Bytes: a number, alone or with k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024)."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        value = int(float(match[1]) * UNITS[match[2]]) if match else 0
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, such as 40GiB or 43e9")
    return value


def logged(text: str) -> tuple[int, float]:
    full, _, at = text.partition("@")
    try:
        return at_least(1)(full.replace(",", "").replace("_", "")), ratio(at)
    except argparse.ArgumentTypeError as e:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected tokens@ratio, such as 593956@0.8"
        ) from e


def ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a ratio, more than 0, at most 1")
    return value
