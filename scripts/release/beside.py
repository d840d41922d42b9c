"""Installs the wheel in ``dist/`` beside an SGLang, and serves with it there, without the checkout.

    beside.py

It is run by the Python of an environment of this Makefile, and makes another one with the same
SGLang and all that this one imports. g4debug and the tools of requirements/dev.txt are left out of
it. Files are hard links, so it takes little room. Then, in an empty folder: the wheel is installed
without an index, and may change no version; ``doctor`` must be ready; an armed ``cpu-server`` must
answer a request over HTTP, and stop with a dump when a fault strikes the next one; ``show`` and
``report`` must open that dump.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The first request takes fewer steps of the worker than this, and the second one more.
FAULT = "page-oob=1*on@step=40"
FEW, MANY = 8, 400  # tokens
START, ANSWER = 300.0, 300.0  # seconds
CHECKOUT = """
import sys, g4debug
from importlib.metadata import entry_points
names = [e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "g4debug"]
print(g4debug.__file__)
raise SystemExit(
    not g4debug.__file__.startswith(sys.prefix) and "imported from elsewhere"
    or names != ["g4debug.plugin:register"] and f"expected one entry point, got {names}"
    or 0
)
"""


class Bad(Exception):
    """Something did not go as it must. The text says what was got and expected."""


def main() -> int:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        print(f"expected one wheel in dist/, got {len(wheels)}; run: make dist", file=sys.stderr)
        return 2
    room = ROOT / ".g4debug"  # on the disk of the environments, for hard links
    room.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="beside-", dir=room) as made,
        tempfile.TemporaryDirectory(prefix="g4debug-beside-") as empty,
    ):
        try:
            serve(twin(Path(made), wheels[0]), Path(empty))
        except Bad as e:
            print(f"BAD  {e}")
            return 1
    return 0


def twin(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with this one's SGLang, in which the wheel is installed."""
    venv, ours = folder / "venv", Path(sysconfig.get_path("purelib"))
    base = str(getattr(sys, "_base_executable", sys.executable))
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    theirs = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    without = shutil.ignore_patterns("*g4debug*")
    shutil.copytree(
        ours, theirs, symlinks=True, ignore=without, copy_function=link, dirs_exist_ok=True
    )
    run(python, "-m", "pip", "uninstall", "-q", "-y", *dev_only())
    before = versions(python)
    if any(name.lower().startswith("g4debug") for name in before):
        raise Bad(f"the new environment has a g4debug before the wheel is installed: {before}")
    run(python, "-m", "pip", "install", "-q", "--no-index", str(wheel))
    after = versions(python)
    added = after - before
    if before - after or len(added) != 1:
        raise Bad(f"pip changed {sorted(before - after)} to {sorted(added)}: expected one more")
    sglang = next(v for v in before if v.startswith("sglang=="))
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    print(f"ok   pip install {wheel.name} beside {sglang}, Python {version}: {added.pop()}")
    return python


def link(source: str, target: str) -> str:
    """Like shutil.copy2, without a second copy on the disk where that is possible."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)
    return target


def dev_only() -> list[str]:
    """The packages that only the tools of this repository need, and not this SGLang."""
    dev = pins(ROOT / "requirements" / "dev.txt")
    torch = pins(ROOT / "requirements" / "torch.txt")
    return sorted(dev - torch - {"setuptools"})


def pins(path: Path) -> set[str]:
    lines = path.read_text().splitlines()
    return {line.split("==")[0].lower() for line in lines if "==" in line and line[0] != "#"}


def versions(python: Path) -> set[str]:
    """``name==version`` of all that is installed. A local file is given by its name and version."""
    found = json.loads(run(python, "-m", "pip", "list", "--format=json"))
    return {f"{package['name']}=={package['version']}" for package in found}


def serve(python: Path, empty: Path) -> None:
    """All that a user does beside SGLang, in the empty folder. Raises Bad."""
    g4debug, dumps, log = python.with_name("g4debug"), empty / "dumps", empty / "server.log"
    print("ok   imported from the wheel:", run(python, "-c", CHECKOUT, cwd=empty).strip())
    found = json.loads(run(g4debug, "doctor", "--json", cwd=empty))
    canaries = {c["state"] for c in found["canary"]}
    if not found["ready"] or canaries != {"caught"}:
        raise Bad(f"doctor: ready {found['ready']}, canaries {canaries}; expected caught")
    print(f"ok   g4debug doctor: ready, {len(found['canary'])} canaries caught")
    armed = {
        "SGLANG_TRTLLM_MHA_DEBUG": "1",
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps),
        "G4DEBUG_FAULTS": FAULT,
    }
    port = free_port()
    with server([g4debug, "cpu-server", "--port", str(port)], armed, empty, log) as process:
        wait_until_up(process, port, log)
        text = answer(port, FEW)
        said = log.read_text(errors="replace")
        told = sorted(dumps.glob("*.pt"))
        if "Traceback" in said or "Judged: " not in said or told:
            raise Bad(f"a healthy start: expected a line 'Judged: …', no traceback, got:\n{said}")
        print(f"ok   SGLANG_TRTLLM_MHA_DEBUG=1 g4debug cpu-server: answered {text[:30]!r}")
        with contextlib.suppress(OSError):  # the server dies meanwhile
            raise Bad(f"the fault {FAULT} told nobody: {answer(port, MANY)[:60]!r}")
        process.wait(ANSWER)
    told = sorted(dumps.glob("g4debug-page-table-*.pt"))
    if not told:
        raise Bad(f"the fault {FAULT} made no dump of page-table; the log:\n{log.read_text()}")
    shown = run(g4debug, "show", str(told[0]), cwd=empty)
    headline = next((x for x in shown.splitlines() if "page-table" in x), "")
    if "page-table in" not in headline:
        raise Bad(f"show of {told[0].name} names no page-table:\n{shown}")
    print(f"ok   G4DEBUG_FAULTS='{FAULT}': {len(told)} dump; g4debug show: {headline[:90]}")
    run(g4debug, "report", str(told[0]), "-o", "report.html", cwd=empty)
    run(g4debug, "triage", str(log), cwd=empty)
    print("ok   g4debug report, g4debug triage server.log")


@contextlib.contextmanager
def server(
    command: list[str | Path], variables: dict[str, str], folder: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a session of its own. All of it has ended behind the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment() | variables, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)


def wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        if "The server is fired up" in log.read_text(errors="replace"):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                return
        time.sleep(0.5)
    raise Bad(
        f"the server did not come up (exit code {process.poll()}); its log:\n{log.read_text()}"
    )


def answer(port: int, tokens: int) -> str:
    """What the server generates. Raises OSError if it does not answer."""
    body = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    url, kind = f"http://127.0.0.1:{port}/generate", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=ANSWER) as reply:
        return str(json.load(reply)["text"])


def free_port() -> int:
    """A port that is free now. SGLang also takes the one that is 10,000 higher, if it is free."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise Bad("100 ports from 20000 to 31999 were tried, and all are taken")


def environment() -> dict[str, str]:
    """This process's, without what would lead to a checkout or change what a server does."""
    without = ("PYTHON", "G4DEBUG_", "SGLANG_", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if not k.startswith(without)}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What the command printed to stdout. Raises Bad if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        name = " ".join([Path(command[0]).name, *map(str, command[1:4])])
        raise Bad(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
