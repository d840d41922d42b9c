"""The servers that a benchmark asks in turns: one process for each variant, all on one device."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "repro"))
PROMPT = {"cuda": 500, "cpu": 100}  # tokens


@dataclass(frozen=True)
class Variant:
    """One variant of a server.

    environment: variables in addition to ours. engine: arguments of sgl.Engine in addition to the
    benchmark's. wrapper: a command that runs the server. plugin: a module of this folder whose
    ``register`` SGLang calls. script: what to run in place of ``_serve.py``. python: the Python of
    another environment, '' for this one.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    plugin: str = ""
    script: str = "_serve.py"
    python: str = ""


def engine_arguments(device: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    from _workload import DEVICES, cuda

    if device == "cuda" and "model_path" in overrides:  # writes no model
        arguments = dict(cuda(None, (overrides["model_path"], None)).engine)
    else:
        arguments = dict(DEVICES[device](None).engine)
    arguments |= {"log_level": "error", "disable_radix_cache": True}
    arguments.pop("swa_full_tokens_ratio", None)
    if device == "cuda":
        arguments |= {
            "max_running_requests": 64,
            "cuda_graph_max_bs": 64,
            "max_total_tokens": 64 * 1600,
            "chunked_prefill_size": 8192,
        }
    return {**arguments, **overrides}


def start(arguments: Mapping[str, Any]) -> Any:
    """``sgl.Engine``; the arguments may have the names of another release."""
    import sglang
    from _arguments import as_named_here

    return sglang.Engine(**as_named_here(arguments))


def serve(device: str, overrides: Mapping[str, Any]) -> None:
    """Read lines of [batch, tokens] from stdin, and answer each with a line with the seconds.

    With a third part, a folder, it is done under SGLang's profiler, whose trace is put there.
    """
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the server prints must not get between the answers
    engine = start(engine_arguments(device, overrides))
    overlap = not engine.server_args.disable_overlap_schedule  # as SGLang has decided it
    hello = {
        "hooks": tracer_sites(),
        "device": device_name(),
        "overlap": overlap,
        "sglang": version("sglang"),
    }
    print(json.dumps(hello), file=answers, flush=True)
    rng = random.Random(0)
    length = PROMPT[device]
    prompts = [[2, *(rng.randrange(4, 500) for _ in range(length - 1))] for _ in range(64)]
    for line in sys.stdin:
        batch, tokens, *profile = json.loads(line)
        if profile:
            activities = ["GPU"] if device == "cuda" else ["CPU"]
            engine.start_profile(output_dir=profile[0], activities=activities, with_stack=False)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        outputs = engine.generate(input_ids=prompts[:batch], sampling_params=sampling)
        seconds = time.perf_counter() - begin
        if profile:
            engine.stop_profile()
        accepted = [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]
        answer = {"seconds": seconds, "accept_length": sum(accepted) / len(accepted)}
        print(json.dumps(answer), file=answers, flush=True)
    engine.shutdown()


def tracer_sites() -> int:
    """How many hook sites a tracer uses, or what tracers need. Sites of fixes do not count."""
    from g4debug import discovery, plugin

    if plugin.in_force is None:
        return 0
    hooks, fixes = plugin.in_force.hooks, set(discovery.names("fix"))
    return sum(not set(hooks.owners(site)) <= fixes for site in hooks.sites)


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


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
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(_distribution(variant.plugin, folder)), environment.get("PYTHONPATH", "")]
            )
        self.log = (folder / f"{name}.log").open("wb")
        command = [
            variant.python or sys.executable,
            str(HERE / variant.script),
            device,
            json.dumps(dict(variant.engine)),
        ]
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

    def profile(self, batch: int, tokens: int, folder: Path) -> list[Path]:
        """Answer requests under SGLang's profiler; what it left in ``folder``, an empty one."""
        self.put([batch, tokens, str(folder)])
        return sorted(folder.iterdir())

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


def _distribution(plugin: str, folder: Path) -> Path:
    """A folder for PYTHONPATH in which SGLang's plugin loader finds ``plugin``."""
    place = folder / f"site-{plugin}"
    info = place / f"{plugin}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    entry = f"[sglang.srt.plugins]\n{plugin} = {plugin}:register\n"
    (info / "entry_points.txt").write_text(entry)
    (place / f"{plugin}.py").write_bytes((HERE / f"{plugin}.py").read_bytes())
    return place
