"""Make the virtual environment that `make test` and `make demo` run in, once.

    environment.py VENV SGLANG_VERSION

Nothing happens when the environment on disk is the one that the pins describe. The stamp is
written last and removed first, so an interruption anywhere leaves an environment without a
stamp, and the next run makes it again. A lock keeps two makes from building at once.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bootstrap import Refused
from pip_errors import explain

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements"
# An environment is 2.6 GB on disk; pip unpacks and caches beside it.
NEEDED_GIB = 5
# Ours, so that a folder somebody else made is never emptied.
MARKER = ".made-by-g4debug"
# Asks what an interpreter needs to say about torch: nothing else may have brought CUDA along.
SANITY = """
import importlib.metadata as metadata, torch, triton, transformers
cuda = sorted(d.name for d in metadata.distributions() if d.name.startswith("nvidia-"))
if cuda and not torch.version.cuda:
    raise SystemExit("CUDA packages beside a CPU torch: " + ", ".join(cuda))
print("torch", torch.__version__, "CUDA" if torch.version.cuda else "CPU")
"""
# Each start of SGLang imports thousands of modules: 9 s of compiling (measured) where the user's
# environment forbids Python to write bytecode. Files for other Pythons fail, and need not matter.
BYTECODE = """
import compileall, sysconfig
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)
"""


@dataclass(frozen=True)
class Step:
    title: str
    command: list[str]


class Console:
    """Progress: a line that counts on a terminal, a line every few seconds in a log file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.live = sys.stdout.isatty()
        self.every = 1.0 if self.live else 10.0

    def last_words(self) -> str:
        """What pip did last, to show that it lives."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 2000))
            lines = [x for x in log.read().decode("utf-8", "replace").splitlines() if x.strip()]
            if lines:
                return lines[-1].strip()[:60]
        return ""

    def say(self, text: str, end: str = "\n") -> None:
        before = "\r\x1b[K" if self.live else ""
        print(before + text, end=end, flush=True)

    def wait(self, label: str, process: "subprocess.Popen[bytes]") -> int:
        start = time.monotonic()
        if self.live:
            self.say(f"{label} ...", end="")
        while True:
            try:
                code = process.wait(timeout=self.every)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - start
                text = f"{label} ... {seconds:.0f} s  ({self.last_words()})"
                self.say(text, end="" if self.live else "\n")
                continue
            outcome = "" if code == 0 else "  failed"
            self.say(f"{label}  {time.monotonic() - start:.0f} s{outcome}")
            return code


def pinned(name: str) -> str:
    """The version of the package that names a file of pins, for the progress line."""
    for path in PINS.glob("*.txt"):
        for line in path.read_text().splitlines():
            if line.startswith(name + "=="):
                return line.split("==")[1].split()[0]
    return "?"


def count(path: Path) -> int:
    return sum("==" in line and line[0] != "#" for line in path.read_text().splitlines())


def digest(*parts: str | Path) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        sha.update(b"\0")
    return sha.hexdigest()


def matches(stamp: Path, key: str) -> bool:
    try:
        return stamp.read_text() == key
    except OSError:
        return False


def write(stamp: Path, key: str) -> None:
    part = stamp.with_suffix(".part")
    part.write_text(key)
    part.replace(stamp)


class Environment:
    def __init__(self, venv: Path, sglang: str) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.engine = PINS / f"sglang-{sglang}.txt"
        if not self.engine.is_file():
            known = sorted(p.stem.removeprefix("sglang-") for p in PINS.glob("sglang-*.txt"))
            raise Refused(f"SGLANG={sglang} has no pins here; known: {', '.join(known)}")
        self.sglang = sglang
        self.torch, self.dev = PINS / "torch.txt", PINS / "dev.txt"
        self.log = venv / "install.log"
        self.stamp, self.project_stamp = venv / "stamp", venv / "stamp-project"
        # The path is part of the key: a moved environment has wrong paths inside it.
        self.key = digest(
            *(self.torch, self.engine, self.dev, *sorted(Path(__file__).parent.glob("*.py"))),
            f"{sys.version_info[0]}.{sys.version_info[1]} {venv}",
        )
        self.project_key = digest(ROOT / "pyproject.toml", self.key)

    def made(self) -> bool:
        # `exists` follows the link, so a Python that was uninstalled since counts as missing.
        return matches(self.stamp, self.key) and self.python.exists()

    def ready(self) -> bool:
        return self.made() and matches(self.project_stamp, self.project_key)

    def empty(self) -> None:
        """Clear the folder, its marker last, so that an interrupted clearing can be resumed."""
        if self.venv.exists():
            if any(self.venv.iterdir()) and not (self.venv / MARKER).exists():
                raise Refused(f"{self.venv.name} was not made by this Makefile: move it away")
            self.stamp.unlink(missing_ok=True)
            for child in self.venv.iterdir():
                if child.name == MARKER:
                    continue
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
                else:
                    child.unlink()
        free = shutil.disk_usage(self.venv.parent).free / 2**30
        if free < NEEDED_GIB:
            raise Refused(
                f"{free:.1f} GiB free on the disk of {self.venv.parent}, about {NEEDED_GIB} GiB "
                "are needed: make room, or clone to a larger disk"
            )
        self.venv.mkdir(exist_ok=True)
        (self.venv / MARKER).touch()

    def pip(self, *args: str) -> list[str]:
        # Wheels only: a source build would need compilers. No bytecode yet: one step compiles
        # it all at once, on all cores.
        common = ["--no-input", "--no-compile", "--progress-bar", "off", "--only-binary", ":all:"]
        return [str(self.python), "-m", "pip", "install", *common, *args]

    def steps(self) -> list[Step]:
        return [
            Step(
                f"virtual environment, Python {sys.version_info[0]}.{sys.version_info[1]}",
                [os.path.realpath(sys.executable), "-m", "venv", str(self.venv)],
            ),
            Step(f"torch {pinned('torch')}", self.pip("-r", str(self.torch))),
            Step(
                f"sglang {self.sglang} and its {count(self.engine) - 1} packages",
                self.pip("--no-deps", "-r", str(self.engine)),
            ),
            Step(
                f"tools: pytest, ruff, mypy ({count(self.dev)} packages)",
                self.pip("--no-deps", "-r", str(self.dev)),
            ),
            Step("bytecode", [str(self.python), "-c", BYTECODE]),
            Step("check: torch, triton, transformers", [str(self.python), "-c", SANITY]),
        ]

    def project(self) -> Step:
        """Editable, for the entry points. From here, so the index has no part in it."""
        flags = ("--no-deps", "--no-build-isolation", "--no-index", "-e", str(ROOT))
        return Step("g4debug itself, editable", self.pip(*flags))

    def run(self, step: Step, label: str, console: Console, held: int) -> None:
        scratch = self.venv / "tmp"
        scratch.mkdir(exist_ok=True)
        drop = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV")
        env = {k: v for k, v in os.environ.items() if k not in drop}
        # TMPDIR: /tmp may be a small RAM disk; the disk that was measured is this one.
        env |= {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        env["TMPDIR"] = str(scratch)
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(step.command)}\n".encode())
            log.flush()
            begin = log.tell()
            # The child holds the lock too: if this process is killed outright, the next make
            # waits for the orphan instead of clearing the folder under it.
            process = subprocess.Popen(
                step.command, stdout=log, stderr=log, env=env, cwd=ROOT, pass_fds=(held,)
            )
            try:
                code = console.wait(label, process)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code:
            with self.log.open("rb") as log:
                log.seek(begin)
                said = log.read().decode("utf-8", "replace")
            raise Refused(f"{step.title}: {explain(said)} (log: {self.log})")
        shutil.rmtree(scratch, ignore_errors=True)

    def make(self, held: int) -> None:
        console = Console(self.log)
        todo: list[tuple[Step, Callable[[], None]]] = []
        if not self.made():
            self.empty()
            steps = self.steps()
            done = [lambda: None] * (len(steps) - 1) + [lambda: write(self.stamp, self.key)]
            todo += zip(steps, done, strict=True)
        todo.append((self.project(), lambda: write(self.project_stamp, self.project_key)))
        for number, (step, after) in enumerate(todo, 1):
            self.run(step, f"[{number}/{len(todo)}] {step.title}", console, held)
            after()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock beside the environment; say what one waits for."""
    with path.open("a") as handle:
        waited = 0
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited % 20 == 0:
                    print(f"another make is setting up; waiting for {path.name}", flush=True)
                waited += 1
                time.sleep(0.5)
        yield handle.fileno()


def main(venv: str, sglang: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        environment = Environment(ROOT / venv, sglang)
        if not environment.ready():
            with locked(environment.venv.with_name(environment.venv.name + ".lock")) as held:
                if not environment.ready():
                    environment.make(held)
    except Refused as reason:
        print(f"g4debug set-up: {reason}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"g4debug set-up: {explain(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ng4debug set-up: interrupted; the next run starts it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
