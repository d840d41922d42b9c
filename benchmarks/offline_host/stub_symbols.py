"""Makes a library of the functions that a newer torch links and this host's libraries lack.

    python3 stub_symbols.py SITE NVIDIA OUT.so

SITE has ``torch/lib``, NVIDIA is the folder of pip's ``nvidia`` packages. Each function aborts the
process with its name, so that a program which does need one says so. For ``LD_PRELOAD``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

OF_NVIDIA = (
    "nccl", "cudnn", "cublas", "cusparse", "cusolver", "cufft", "curand", "nvshmem", "cuFile",
    "nvrtc", "nvJitLink", "cupti", "nvtx",
)  # fmt: skip


def symbols(libraries: Iterable[Path], flag: str) -> set[str]:
    """The dynamic symbols of NVIDIA's that the libraries define or lack, as ``nm`` lists them."""
    found: set[str] = set()
    for library in libraries:
        if library.is_file():
            command = ["nm", "-D", flag, str(library)]
            text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            names = (line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip())
            found |= {name for name in names if name.startswith(OF_NVIDIA)}
    return found


def source(names: Iterable[str]) -> str:
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    for name in names:
        said = f"stub_symbols: {name} is not in this host's libraries\\n"
        lines.append(f'int {name}(void) {{ fprintf(stderr, "{said}"); abort(); }}')
    return "\n".join(lines) + "\n"


def main(site: Path, nvidia: Path, out: Path) -> None:
    torch = [*(site / "torch" / "lib").glob("*.so*")]
    there = symbols([*torch, *nvidia.rglob("*.so*")], "--defined-only")
    missing = sorted(symbols(torch, "--undefined-only") - there)
    code = out.with_suffix(".c")
    code.write_text(source(missing))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(out), str(code)], check=True)
    print(f"{len(missing)} stand-ins: {' '.join(missing)}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
