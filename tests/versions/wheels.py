"""SGLang's released wheels, unpacked: downloaded once, kept outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = (
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15.post1",
    "0.5.18",
    "0.5.21",
    "0.5.23",
)
ROOT = Path(__file__).resolve().parents[2]


class NoWheel(Exception):
    """A wheel could not be had; the text says why, and that nothing was checked."""


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "g4debug" / "sglang-wheels-whole"


def unpacked(release: str) -> Path:
    """The folder with ``sglang/`` and its metadata, for reading and importing. Raises NoWheel."""
    target = cache() / release
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: an interruption leaves nothing that looks like a release.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as folder:
        wheel = _download(release, Path(folder))
        tree = Path(folder) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree)
        try:
            tree.rename(target)
        except OSError:
            if not target.is_dir():  # else another run was faster
                raise
    return target


def _download(release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"sglang=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        sys.path.insert(0, str(ROOT / "scripts"))
        from pip_errors import explain

        raise NoWheel(
            f"SGLang {release} was not checked: its wheel could not be downloaded: "
            f"{explain(done.stdout + done.stderr)}"
        )
    return wheels[0]
