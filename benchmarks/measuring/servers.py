"""The servers that a benchmark asks in turns: one process for each variant, all on one device."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Variant:
    """One variant of a server.

    environment: variables in addition to ours. engine: arguments of sgl.Engine in addition to the
    benchmark's. wrapper: a command that runs the server. plugin: a module of ``served/``; SGLang
    calls its ``register``. answers: the module of ``served/`` that answers. python: the Python of
    another environment, '' for this one.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    plugin: str = ""
    answers: str = "decode"
    python: str = ""


class ServerDied(Exception):
    pass


class Server:
    """The process of a variant, in a process group of its own. ``ask`` waits for the answer."""

    def __init__(self, name: str, variant: Variant, device: str, folder: Path) -> None:
        # A benchmark that gets SIGTERM, from timeout for example, must not leave servers behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
        self.name, self.up = name, False
        environment = {**os.environ, **variant.environment}
        if device == "cpu":
            from g4debug import cpu

            environment = cpu.environment(environment)
        if variant.plugin:
            place = [str(distribution(variant.plugin, folder)), str(BENCHMARKS)]
            environment["PYTHONPATH"] = os.pathsep.join([*place, environment.get("PYTHONPATH", "")])
        self.log = (folder / f"{name}.log").open("wb")
        program = str(BENCHMARKS / "served" / "start.py")
        arguments = (variant.answers, device, json.dumps(dict(variant.engine)))
        command = [variant.python or sys.executable, program, *arguments]
        self.process = subprocess.Popen(
            [*variant.wrapper, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):  # a wrapper printed this line
            line = self.process.stdout.readline()
        if not line:
            raise ServerDied(f"the {self.name} server died:\n{self.tail()}")
        self.up = True
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tail(self) -> str:
        """The end of the server's log."""
        return Path(self.log.name).read_text(errors="replace")[-3000:]

    def put(self, question: Any) -> dict[str, Any]:
        """The script's answer to one line of JSON."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.read()

    def ask(self, batch: int, tokens: int) -> dict[str, Any]:
        return self.put([batch, tokens])

    def trace(self, question: Sequence[Any], to: Path) -> None:
        """Let SGLang's profiler look on at the answer, and put its one trace into the file ``to``.

        Raises SystemExit if it is not one.
        """
        with tempfile.TemporaryDirectory(prefix="g4debug-trace-") as place:
            self.put([*question, place])
            made = sorted(Path(place).iterdir())
            if len(made) != 1:
                raise SystemExit(f"{self.name}: expected one trace, got {[p.name for p in made]}")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made[0], to)

    def ms_per_token(self, batch: int, tokens: int) -> tuple[float, float]:
        """The decode time per output token, without the prefill, and the accept length."""
        first = self.ask(batch, 1)["seconds"]
        whole = self.ask(batch, tokens)
        return (whole["seconds"] - first) / (tokens - 1) * 1000, whole["accept_length"]

    def stop(self) -> None:
        if not self.up and self.process.poll() is None:
            print(f"the {self.name} server is not up yet:\n{self.tail()}", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


@contextlib.contextmanager
def all_up(
    variants: Mapping[str, Variant], device: str, folder: Path
) -> Iterator[tuple[dict[str, Server], dict[str, dict[str, Any]]]]:
    """Servers that are on the device together, and each one's first message.

    They start one after the other, because each first measures the free memory. Raises SystemExit
    if one dies.
    """
    servers: dict[str, Server] = {}
    hello = {}
    try:
        for name, variant in variants.items():
            begin = time.perf_counter()
            servers[name] = Server(name, variant, device, folder)
            hello[name] = servers[name].read()
            print(f"{name}: up in {time.perf_counter() - begin:.0f} s", flush=True)
        yield servers, hello
    except ServerDied as e:
        raise SystemExit(str(e)) from e
    finally:
        for server in servers.values():
            server.stop()


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, list[str]]]:
    """(round, the names in its order), so that a drift of the device is the same for all."""
    order = list(names)
    for number in range(rounds):
        yield number, order[::-1] if number % 2 else order


def distribution(plugin: str, folder: Path) -> Path:
    """A folder for PYTHONPATH in which SGLang's plugin loader finds the entry of ``plugin``."""
    place = folder / f"site-{plugin}"
    info = place / f"benchmark_{plugin}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    name = f"benchmark-{plugin}"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    entry = f"[sglang.srt.plugins]\n{name} = served.{plugin}:register\n"
    (info / "entry_points.txt").write_text(entry)
    return place
