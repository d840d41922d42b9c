"""Runs many commands on the GPUs of one host within a time limit, and keeps every log.

    python benchmarks/gpu_queue.py JOBS --seconds 540 --out FOLDER [--shares 3]

JOBS has a line for each command: ``name | GPUs | share | command``. GPUs is 1 or 2; a command for
two takes its share of each of two neighbours. A GPU has --shares shares: a server of E4B takes 1,
one of gpt-oss 20B 1.9, and a measurement, which wants its GPU for itself, all of them. Commands
begin in the order of the file as soon as there is room, each with its own CUDA_VISIBLE_DEVICES, its
GPU's part of the processor cores, and a TMPDIR of its own. A command that wants a whole GPU waits
as long as smaller ones that are behind it find room, so write these where they may go first.

A name that was done in an earlier call with the same --out is left out. At the limit what still
runs is ended, with all its processes, and the table says "cut". Exit code 0 if all were run and
ended with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil


@dataclass(frozen=True)
class Job:
    name: str
    gpus: int
    share: float
    command: str


@dataclass
class Running:
    job: Job
    where: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


def read(path: Path) -> list[Job]:
    """The jobs of a file. Raises SystemExit for a line that is none."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 3)]
        try:
            name, gpus, share, command = parts
            found.append(Job(name, int(gpus), float(share), command))
        except ValueError:
            raise SystemExit(
                f"{path}:{number}: got {line!r}, expected name | GPUs | share | command"
            ) from None
    return found


def room(free: Sequence[float], job: Job) -> tuple[int, ...]:
    """The GPUs that a job gets now: the emptiest one, or two neighbours with room. () if none.

    free: the shares that are left of each GPU.
    """
    free = [round(shares, 6) for shares in free]  # 5 - 1.9 - 1 + 1.9 + 1 is not quite 5
    if job.gpus == 2:
        pairs = ((a, a + 1) for a in range(0, len(free) - 1, 2))
        return next((pair for pair in pairs if all(free[gpu] >= job.share for gpu in pair)), ())
    best = max(range(len(free)), key=lambda gpu: free[gpu])
    return (best,) if free[best] >= job.share else ()


def fit(jobs: Sequence[Job], shares: float) -> None:
    """Raises SystemExit for a job that no GPU has room for, so that it would wait for ever."""
    for job in jobs:
        if job.share > shares:
            raise SystemExit(
                f"{job.name} takes {job.share:g} shares, and a GPU has {shares:g}: give --shares "
                f"{job.share:g}"
            )


def start(job: Job, where: tuple[int, ...], out: Path, gpus: int) -> Running:
    cores = (os.cpu_count() or 1) // gpus
    mine = {core for gpu in where for core in range(gpu * cores, (gpu + 1) * cores)}
    temporary = out / "tmp" / job.name
    temporary.mkdir(parents=True, exist_ok=True)
    given = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, where)), "TMPDIR": str(temporary)}
    log = (out / f"{job.name}.log").open("wb")
    process = subprocess.Popen(
        ["bash", "-c", job.command],
        env={**os.environ, **given}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    if mine:
        psutil.Process(process.pid).cpu_affinity(sorted(mine))
    return Running(job, where, process, log)


def end(running: Running, known: dict[int, psutil.Process]) -> None:
    """End a job with all processes that it began, those in sessions of their own included."""
    for process in known.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()
    running.log.close()


def children(running: Running, known: dict[int, psutil.Process]) -> None:
    try:
        for child in psutil.Process(running.process.pid).children(recursive=True):
            known[child.pid] = child
    except psutil.NoSuchProcess:
        pass


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][-100:] if lines else ""


def devices() -> int:
    run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return run.stdout.count("GPU ")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--shares", type=float, default=3.0, help="of each GPU (default: 3)")
    parser.add_argument("--gpus", type=int, help="how many (default: all that nvidia-smi names)")
    args = parser.parse_args()
    gpus = args.gpus or devices()
    if gpus < 1:
        raise SystemExit("nvidia-smi names no GPU here; --gpus N says how many there are")
    args.out.mkdir(parents=True, exist_ok=True)
    done = args.out / "done"
    before = set(done.read_text().splitlines()) if done.is_file() else set()
    waiting = [job for job in read(args.jobs) if job.name not in before]
    fit(waiting, args.shares)
    free, running, table = [args.shares] * gpus, list[Running](), list[tuple[str, str, float]]()
    begun: dict[str, dict[int, psutil.Process]] = {}
    limit = time.monotonic() + args.seconds
    try:
        while (waiting or running) and time.monotonic() < limit:
            for job in list(waiting):
                where = room(free, job)
                if where:
                    waiting.remove(job)
                    running.append(start(job, where, args.out, gpus))
                    begun[job.name] = {}
                    for gpu in where:
                        free[gpu] -= job.share
            for one in list(running):
                children(one, begun[one.job.name])
                if one.process.poll() is not None:
                    running.remove(one)
                    end(one, begun[one.job.name])
                    for gpu in one.where:
                        free[gpu] += one.job.share
                    table.append((one.job.name, str(one.process.returncode), one.seconds))
                    with done.open("a") as file:
                        file.write(f"{one.job.name}\n")
            time.sleep(0.2)
    finally:
        for one in running:
            end(one, begun[one.job.name])
            table.append((one.job.name, "cut", one.seconds))
    for name, status, seconds in table:
        print(f"{name:24} {status:>4} {seconds:5.0f} s  {last_line(args.out / f'{name}.log')}")
    if waiting:
        print("not begun:", ", ".join(job.name for job in waiting))
    return int(bool(waiting) or any(status != "0" for _, status, _ in table))


if __name__ == "__main__":
    sys.exit(main())
