"""SGLang plugins that are installed for one test, as pip would install them."""

from __future__ import annotations

import os
from pathlib import Path


def install(folder: Path, name: str, value: str, version: str = "0") -> None:
    """Declare the plugin ``name`` in ``folder``. ``value``: its entry point, "module:register".

    SGLang loads plugins in the order of the folders on its path.
    """
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {value}\n")


def path(*folders: Path) -> str:
    """PYTHONPATH with these folders first."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(p for p in (*map(str, folders), inherited) if p)
