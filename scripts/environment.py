"""Makes the virtual environment in which `make test` and `make demo` run.

    environment.py VENV SGLANG_VERSION

If the environment on disk is the one that the pinned packages describe, nothing is done. The stamp
is written last and removed first. So if the set-up is interrupted, the environment has no stamp,
and the next run makes it again. A lock keeps two makes from doing this at once.
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
# An environment takes 2.6 GB of the disk, and pip needs room to unpack and to cache.
NEEDED_GIB = 5
# A folder without this file was made by somebody else and is never emptied.
MARKER = ".made-by-g4debug"
# The new interpreter runs this: beside a CPU build of torch there may be no CUDA packages.
SANITY = """
import importlib.metadata as metadata, torch, triton, transformers
cuda = sorted(d.name for d in metadata.distributions() if d.name.startswith("nvidia-"))
if cuda and not torch.version.cuda:
    raise SystemExit("CUDA packages beside a CPU torch: " + ", ".join(cuda))
print("torch", torch.__version__, "CUDA" if torch.version.cuda else "CPU")
"""
# SGLang imports thousands of modules. Compiling them takes 9 s (measured) at each start if the
# user's environment forbids Python to write bytecode. Files for other versions of Python fail to
# compile, which does not matter.
BYTECODE = """
import compileall, sysconfig
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)
"""


@dataclass(frozen=True)
class Step:
    title: str
    command: list[str]


class Console:
    """Shows the progress: a line that counts on a terminal, or a line every 10 s in a log file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.live = sys.stdout.isatty()
        self.every = 1.0 if self.live else 10.0

    def last_words(self) -> str:
        """The last line of pip's output, to show that it goes on."""
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
    """The version to which the package ``name`` is pinned, for the progress line."""
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
            raise Refused(f"SGLANG={sglang} is not known here; known are: {', '.join(known)}")
        self.sglang = sglang
        self.torch, self.dev = PINS / "torch.txt", PINS / "dev.txt"
        self.log = venv / "install.log"
        self.stamp, self.project_stamp = venv / "stamp", venv / "stamp-project"
        # The path is part of the key, because an environment that was moved has wrong paths in it.
        self.key = digest(
            *(self.torch, self.engine, self.dev, *sorted(Path(__file__).parent.glob("*.py"))),
            f"{sys.version_info[0]}.{sys.version_info[1]} {venv}",
        )
        self.project_key = digest(ROOT / "pyproject.toml", self.key)

    def made(self) -> bool:
        # `exists` follows the link, so it is False if that Python was uninstalled.
        return matches(self.stamp, self.key) and self.python.exists()

    def ready(self) -> bool:
        return self.made() and matches(self.project_stamp, self.project_key)

    def empty(self) -> None:
        """Empty the folder. The marker stays, so that it can be emptied again after a stop."""
        if self.venv.is_symlink():  # to another clone's, which its own makes and tests use
            raise Refused(
                f"{self.venv.name} is a link to {self.venv.readlink()}, an environment that was "
                "not made for this clone, and is left as it is: remove the link, and make one here"
            )
        if self.venv.exists():
            if any(self.venv.iterdir()) and not (self.venv / MARKER).exists():
                raise Refused(
                    f"the folder {self.venv.name} was not made by this Makefile: move it away"
                )
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
                f"the disk of {self.venv.parent} has {free:.1f} GiB free, and about {NEEDED_GIB} "
                "GiB are needed: make room, or clone to a larger disk"
            )
        self.venv.mkdir(exist_ok=True)
        (self.venv / MARKER).touch()

    def pip(self, *args: str) -> list[str]:
        # Only wheels are installed, because a source build would need compilers. Bytecode is
        # compiled in a step of its own, on all cores.
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
        """The step that installs g4debug itself, for its entry points. It asks no index."""
        flags = ("--no-deps", "--no-build-isolation", "--no-index", "-e", str(ROOT))
        return Step("g4debug itself, editable", self.pip(*flags))

    def run(self, step: Step, label: str, console: Console, held: int) -> None:
        scratch = self.venv / "tmp"
        scratch.mkdir(exist_ok=True)
        drop = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV")
        env = {k: v for k, v in os.environ.items() if k not in drop}
        # TMPDIR is set because /tmp may be a small RAM disk. Here the free space was checked.
        env |= {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        env["TMPDIR"] = str(scratch)
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(step.command)}\n".encode())
            log.flush()
            begin = log.tell()
            # The child holds the lock, too. If this process is killed, the next make waits for the
            # child instead of emptying the folder that the child works in.
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
    """Hold the lock beside the environment. Whoever has to wait for it is told so."""
    with path.open("a") as handle:
        waited = 0
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited % 20 == 0:
                    print(
                        f"another make is setting up the environment; waiting for {path.name}",
                        flush=True,
                    )
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
        print("\ng4debug set-up: interrupted; the next make starts it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
