"""SGLang's arguments for the toy models on the CPU, and the command line of a server with them."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from g4debug.cpu import CpuEngineError, drafts, toys
from g4debug.hooking import targets

# With these SGLang runs trtllm_mha and FROZEN_KV_MTP on a CPU, with little memory.
BASE: Final[Mapping[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "disable_cuda_graph": True,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "context_length": 2048,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
    "random_seed": 0,
}
ITS_PAGES: Final = (16, 32, 64)  # tokens of a page that its attention backend takes
# From 0.5.14 on disable_cuda_graph is for both kinds, and SGLang does not know this argument.
PIECEWISE: Final[Mapping[str, Any]] = {"disable_piecewise_cuda_graph": True}
_kept: deque[socket.socket] = deque(maxlen=64)
# Below the ports that Linux chooses from, and low enough that SGLang's gRPC port, 10000 above it,
# is a port.
PORTS: Final = range(20_000, 32_000)
DEFAULT: Final = "gemma-4"
MTP: Final[Mapping[str, Any]] = toys.load(DEFAULT).draft


def backend_for(page: int) -> str:
    """The attention backend with which SGLang runs here with pages of so many tokens."""
    return str(BASE["attention_backend"]) if page in ITS_PAGES else "triton"


def server_arguments(
    model_dirs: tuple[Path, ...],
    mtp: bool = True,
    model: str = DEFAULT,
    draft: str | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """ServerArgs of SGLang for `(target, draft)` of a toy, or for a target alone.

    mtp: with its own draft, if it has one. draft: the name of another one (:mod:`drafts`), which
    takes its place. An override of None removes the argument.
    """
    toy = toys.load(model)
    target, *folders = model_dirs
    arguments = {"model_path": str(target), **_base(), **toy.arguments}
    asked: Mapping[str, Any] = toy.draft if mtp and folders else {}
    if draft is not None:
        chosen = drafts.load(draft, model)
        algorithm = (chosen.runs_as or draft).upper()
        asked = {"speculative_algorithm": algorithm, **chosen.arguments}
        folders = [*chosen.models()]
    arguments |= asked
    if asked and folders:
        arguments["speculative_draft_model_path"] = str(folders[0])
    arguments |= overrides
    return {name: value for name, value in arguments.items() if value is not None}


def _base() -> dict[str, Any]:
    piecewise = PIECEWISE if targets.captures_piecewise() else {}
    return {**BASE, **piecewise, "nccl_port": free_port()}


def engine_arguments(mtp: bool = True, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of `sgl.Engine` on a toy: deterministic and quiet.

    ``model`` among the overrides is the toy's name, ``draft`` its draft's.
    """
    model = overrides.pop("model", DEFAULT)
    overrides = {"log_level": "warning", **overrides}
    return server_arguments(toys.load(model).models(), mtp, model, **overrides)


def command(
    user_flags: Sequence[str] = (),
    mtp: bool = True,
    model: str = DEFAULT,
    draft: str | None = None,
) -> list[str]:
    """`python -m sglang.launch_server ...` with the user's flags, and defaults for all others."""
    given = {flag.split("=")[0].lstrip("-").replace("-", "_") for flag in user_flags}
    if "model_path" in given:
        # A toy's draft fits only its own target.
        if draft is not None:
            raise CpuEngineError(
                f"CPU server: got the draft {draft!r} and --model-path, expected a toy; the draft "
                "of another model is given by --speculative-draft-model-path."
            )
        arguments = _base()
    else:
        toy = toys.load(model)
        arguments = server_arguments(toy.models(), mtp, model, draft, served_model_name=toy.served)
    flags = [
        part
        for name, value in arguments.items()
        if name not in given and value is not False
        for part in _flag(name, value)
    ]
    return [sys.executable, "-m", "sglang.launch_server", *flags, *user_flags]


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]


def free_port() -> int:
    """A port that is free now and that Linux will not give away: it gives 32768 and up.

    SGLang would let the kernel choose one, but listens only seconds later. By then a connection of
    another process may have got that port. Until SGLang listens, an address that this process holds
    keeps the port from other processes of ours. The process holds such addresses for its last 64
    ports.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        mine = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                if sys.platform == "linux":  # an abstract address: no file
                    mine.bind(f"\0g4debug-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                mine.close()
                continue  # taken
            _kept.append(mine)
            return port
    raise CpuEngineError(f"CPU server: 100 ports of {PORTS} were tried, and all are taken.")


def wait_until_healthy(
    url: str, process: subprocess.Popen[bytes], log: Path, timeout: float
) -> None:
    """Raises CpuEngineError if the server ends, or does not answer in ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CpuEngineError(
                f"CPU server: it ended with exit status {process.returncode} while it started. "
                f"Its log is {log}, which ends in:\n{_tail(log)}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # URLError, refused, reset: not up yet
            time.sleep(0.3)
    raise CpuEngineError(
        f"CPU server: {url}/health did not answer within {timeout:.0f} s. "
        f"Its log is {log}, which ends in:\n{_tail(log)}"
    )


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
