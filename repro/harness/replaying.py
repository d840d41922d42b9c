"""A child that replays a dump, as ``g4debug replay DUMP --pages-only --json`` does."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path


def main(device: str, result: Path, dump: str) -> None:
    from g4debug import cli

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["replay", dump, "--pages-only", "--json"])
    result.write_text(out.getvalue())
