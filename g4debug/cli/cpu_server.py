"""`g4debug cpu-server`: a real SGLang server on a toy Gemma-4, on a machine without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

NAME = "cpu-server"
HELP = "start a real SGLang server on a toy Gemma-4, without a GPU"
NEEDS_SGLANG = True
PASS_THROUGH = True  # unknown flags are sglang.launch_server's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start sglang.launch_server on the CPU engine.\n"
        "\n"
        "It serves a toy Gemma-4 and its MTP assistant. You may add any flag of\n"
        "sglang.launch_server; it wins over the default. With --model-path your model\n"
        "takes the place of the toy, and MTP is off unless you ask for it."
    )
    parser.add_argument("--no-mtp", action="store_true", help="serve without the MTP assistant")


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
        command = server.command(list(args.rest), mtp=not args.no_mtp)
    except cpu.CpuEngineError as error:
        print(error, file=sys.stderr)
        return 2
    print("g4debug:", " ".join(command), file=sys.stderr, flush=True)
    # The server takes over this process, so signals and the exit status are its own.
    os.execve(command[0], command, cpu.environment(os.environ))
