"""Builds the source archive and the wheel of a release into ``dist/``, and checks them.

    dist.py [--tag vX.Y.Z]

What is built is the last commit, not the working tree. The wheel is made from the unpacked source
archive, so that whoever has the archive can make the same wheel. Both are built twice, in two
folders, and have to be equal to the last byte: times are the commit's (``SOURCE_DATE_EPOCH``),
names are sorted, and nothing of this machine is in them. Then ``twine check`` and
``check-wheel-contents`` look at them. The tools are those of requirements/release.txt, in an
environment of their own.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-release"
PINS = ROOT / "requirements" / "release.txt"
BACKEND = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


class Refused(Exception):
    """There is nothing to release. The text says why, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description="build and check a release")
    parser.add_argument("--tag", help="refuse to build if this is not the version's tag")
    args = parser.parse_args()
    try:
        version = version_of(ROOT)
        refuse_unfinished(version, args.tag)
        python = tools()
        with tempfile.TemporaryDirectory(prefix="g4debug-dist-") as folder:
            files = twice(python, Path(folder))
            check(python, files)
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            shutil.copytree(files[0].parent, ROOT / "dist")
    except Refused as e:
        print(f"g4debug dist: {e}", file=sys.stderr)
        return 2
    for file in sorted((ROOT / "dist").iterdir()):
        print(f"{digest(file)}  dist/{file.name}  {file.stat().st_size:,} bytes")
    return 0


def version_of(root: Path) -> str:
    found = re.search(r'^__version__ = "(.+)"$', (root / "g4debug/__init__.py").read_text(), re.M)
    assert found
    return found[1]


def refuse_unfinished(version: str, tag: str | None) -> None:
    """Raise Refused if the tag is of another version, or CHANGELOG.md says nothing of this one."""
    if tag is not None and tag != f"v{version}":
        raise Refused(f"the tag is {tag}, but the version is {version}: expected v{version}")
    if f"\n## {version} " not in (ROOT / "CHANGELOG.md").read_text():
        raise Refused(f"CHANGELOG.md has no section '## {version} (date)'")


def tools() -> Path:
    """The Python of the environment with the pinned tools. It is made if it is not there."""
    python, stamp = VENV / "bin" / "python", VENV / "stamp"
    if stamp.is_file() and stamp.read_text() == digest(PINS):
        return python
    shutil.rmtree(VENV, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(VENV))
    run(
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-r",
        str(PINS),
    )
    stamp.write_text(digest(PINS))
    return python


def twice(python: Path, folder: Path) -> list[Path]:
    """The source archive and the wheel. Raises Refused if a second build gives other bytes."""
    epoch = int(run("git", "log", "-1", "--format=%ct", stdout=subprocess.PIPE))
    builds = []
    for name in ("first", "second"):
        source = folder / name / "source"
        source.mkdir(parents=True)
        run("git", "archive", "--format=tar", f"--output={folder / name}.tar", "HEAD")
        with tarfile.open(f"{folder / name}.tar") as archive:
            archive.extractall(source, filter="data")
        builds.append(build(python, source, folder / name / "dist", epoch))
    for first, second in zip(*builds, strict=True):
        if digest(first) != digest(second):
            raise Refused(f"two builds of {first.name} differ: {digest(first)}, {digest(second)}")
    return builds[0]


def build(python: Path, source: Path, out: Path, epoch: int) -> list[Path]:
    """The source archive of ``source``, and the wheel that is made from it, in ``out``.

    epoch: Unix seconds, the time of every file in them.
    """
    out.mkdir()
    backend(python, source, "build_sdist", out, epoch)
    (sdist,) = out.iterdir()
    sdist.write_bytes(normalised(sdist.read_bytes(), epoch))
    with tempfile.TemporaryDirectory(prefix="g4debug-sdist-") as folder, tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        backend(python, unpacked, "build_wheel", out, epoch)
    return sorted(out.iterdir())


def backend(python: Path, source: Path, what: str, out: Path, epoch: int) -> None:
    """Call setuptools as pip does, but in the environment of this Python."""
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    run(str(python), "-c", BACKEND, what, str(out), cwd=source, env=environ, stdout=subprocess.PIPE)


def normalised(sdist: bytes, epoch: int) -> bytes:
    """The same archive in the order of names, and without users, times and rights of a machine."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as old,
        gzip.GzipFile("", "wb", 9, out, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda m: m.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = epoch, {}
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return out.getvalue()


def check(python: Path, files: list[Path]) -> None:
    run(str(python), "-m", "twine", "check", "--strict", *map(str, files))
    run(str(python), "-m", "check_wheel_contents", *(str(f) for f in files if f.suffix == ".whl"))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run(
    *command: str,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    stdout: int | None = None,
) -> str:
    """What the command printed to stdout, if that is a pipe. Raises Refused if it fails."""
    try:
        done = subprocess.run(command, cwd=cwd, env=env, stdout=stdout, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        print(getattr(e, "stdout", None) or "", file=sys.stderr)
        raise Refused(f"{' '.join(command[:4])} … failed: {e}"[:300]) from e
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
