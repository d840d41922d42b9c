"""`g4debug cpu-server`: a real SGLang server on a toy model, on a machine without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from g4debug import discovery

NAME = "cpu-server"
HELP = "start a real SGLang server on a toy model, without a GPU"
NEEDS_SGLANG = True
PASS_THROUGH = True  # unknown flags are sglang.launch_server's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start sglang.launch_server on the CPU engine.\n"
        "\n"
        "It serves a toy model, by default Gemma-4 with its MTP assistant. You may add any\n"
        "flag of sglang.launch_server; it wins over the default. With --model-path your\n"
        "model takes the place of the toy, and MTP is off unless you ask for it.\n"
        "\n"
        "  g4debug cpu-server --port 30000\n"
        "  g4debug cpu-server --model llama --draft eagle --port 30000\n"
        "  SGLANG_TRTLLM_MHA_DEBUG=1 g4debug cpu-server --port 30000 --enable-metrics\n"
        "\n"
        "Then, in another shell, when the log says that the server is fired up:\n"
        "\n"
        "  curl localhost:30000/generate -H 'Content-Type: application/json' \\\n"
        '    -d \'{"text": "hello", "sampling_params": {"max_new_tokens": 16}}\'\n'
        "\n"
        "The toys:\n" + "\n".join(_about("toy")) + "\n\n"
        "The drafts:\n" + "\n".join(_about("draft"))
    )
    parser.add_argument(
        "--model", metavar="TOY", help="a toy from the list above, or as --model-path"
    )
    parser.add_argument(
        "--draft", metavar="DRAFT", help="a draft from the list above, for a toy that it names"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="the server's port, SGLang's flag (default: 30000)"
    )
    parser.add_argument("--no-mtp", action="store_true", help="serve without the MTP assistant")


def _about(noun: discovery.Noun) -> Iterator[str]:
    names = discovery.names(noun)
    width = max(map(len, names)) + 2
    for name in names:
        found = discovery.load(noun, name)
        targets = getattr(found, "targets", ())
        of = f" (for {', '.join(targets)})" if targets else ""
        yield f"  {name:<{width}}{found.about}{of}"


def run(args: argparse.Namespace) -> int:
    from g4debug import cpu
    from g4debug.cpu import server

    if importlib.util.find_spec("sglang") is None:
        print(
            "g4debug cpu-server: this Python has no SGLang; in a clone, run: make env",
            file=sys.stderr,
        )
        return 2
    try:
        cpu.refuse_cuda("g4debug cpu-server")
        model, flags = _model(args.model), list(args.rest)
        if args.port is not None:
            flags.append(f"--port={args.port}")
        if model is None:
            flags = [f"--model-path={args.model}", *flags]
        command = server.command(flags, not args.no_mtp, model or server.DEFAULT, args.draft)
    except cpu.CpuEngineError as error:
        print(error, file=sys.stderr)
        return 2
    print("g4debug:", " ".join(command), file=sys.stderr, flush=True)
    # The server takes over this process, so signals and the exit status are its own.
    os.execve(command[0], command, cpu.environment(os.environ))


def _model(given: str | None) -> str | None:
    """The toy; None for a model of the user's, which SGLang calls --model, too."""
    from g4debug.cpu import server

    own = given is not None and given not in discovery.names("toy")
    if given is not None and own and ("/" in given or Path(given).exists()):
        return None
    return given or server.DEFAULT
