"""The benchmarks' command lines."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(
    doc: str | None,
    device: str = "",
    rounds: int = 0,
    out: str = "the CSV (default: one in results/)",
) -> argparse.ArgumentParser:
    """A parser with --device and --rounds, if there is a default, and --out, if there is a help."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if device:
        made.add_argument("--device", choices=("cpu", "cuda"), default=device)
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds)
    if out:
        made.add_argument("--out", type=Path, help=out)
    return made
