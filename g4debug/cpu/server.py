"""SGLang's arguments for the toy models on the CPU, and a server on them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from g4debug.cpu import CpuEngineError, environment
from g4debug.cpu.models import tiny_models

# What makes 0.5.12's trtllm_mha + FROZEN_KV_MTP path run at all, and small.
BASE: Final[Mapping[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "context_length": 2048,
    "mem_fraction_static": 0.3,
    "skip_server_warmup": True,
    "random_seed": 0,
}
_kept: deque[socket.socket] = deque(maxlen=64)
# Below what Linux chooses from; and with the 10000 that SGLang adds for its gRPC port, a port.
PORTS: Final = range(20_000, 32_000)
# SGLang turns NEXTN into FROZEN_KV_MTP when the draft is a Gemma-4 assistant.
MTP: Final[Mapping[str, Any]] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def server_arguments(
    model_dirs: tuple[Path, Path], mtp: bool = True, **overrides: Any
) -> dict[str, Any]:
    """SGLang ServerArgs for `(target, assistant)`; an override of None removes the argument."""
    target, assistant = model_dirs
    arguments = {"model_path": str(target), **_base()}
    if mtp:
        arguments |= {**MTP, "speculative_draft_model_path": str(assistant)}
    arguments |= overrides
    return {name: value for name, value in arguments.items() if value is not None}


def _base() -> dict[str, Any]:
    return {**BASE, "nccl_port": _free_port()}


def engine_arguments(mtp: bool = True, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of `sgl.Engine` on the toy models: deterministic and quiet."""
    return server_arguments(tiny_models(), mtp, **{"log_level": "warning", **overrides})


def command(user_flags: Sequence[str] = (), mtp: bool = True) -> list[str]:
    """`python -m sglang.launch_server ...`: the defaults, less whatever the user's flags name."""
    given = {flag.split("=")[0].lstrip("-").replace("-", "_") for flag in user_flags}
    if "model_path" in given or "model" in given:
        # The toy assistant fits no other target.
        arguments = _base()
    else:
        arguments = server_arguments(tiny_models(), mtp, served_model_name="g4debug-tiny")
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


@contextmanager
def serving(
    user_flags: Sequence[str] = (),
    *,
    log: Path,
    timeout: float = 90.0,
    extra_environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run a server in a process group of its own; yields its URL once it answers /health."""
    port = _free_port()
    line = command([*user_flags, "--host", "127.0.0.1", "--port", str(port)])
    base = {**os.environ, **(extra_environment or {})}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            line,
            env=environment(base),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log, timeout)
        yield url
    finally:
        _stop(process)


def _free_port() -> int:
    """Not the kernel's choice, which SGLang would take: it listens seconds later, and by then a
    connection of another process may have the port. Linux gives those 32768 and up.

    Until then the port is kept from other processes of ours by an address that lives as long as
    this one, or as its next 63 ports.
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
    raise CpuEngineError(f"CPU server: got 100 taken ports of {PORTS}, expected a free one.")


def _wait_until_healthy(
    url: str, process: subprocess.Popen[bytes], log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CpuEngineError(
                f"CPU server: got exit status {process.returncode} while starting, expected it to "
                f"serve. Its log is {log}; the end of it:\n{_tail(log)}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # URLError, refused, reset: not up yet
            time.sleep(0.3)
    raise CpuEngineError(
        f"CPU server: got no answer from {url}/health within {timeout:.0f} s, expected one. "
        f"Its log is {log}; the end of it:\n{_tail(log)}"
    )


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """SIGTERM to our own process group, then SIGKILL to what is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
