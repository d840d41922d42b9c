"""Packs SGLang 0.5.23 for a GPU host that has no network, in parts of a size that it takes.

    python benchmarks/offline_host/pack.py FOLDER [--part-bytes 46000000] [--jobs 2]
    python benchmarks/offline_host/pack.py FOLDER --only sglang-kernel==0.4.4

The host needs Python 3.12, NVIDIA's libraries of CUDA 13 as pip installs them, gcc, and numpy,
pytest and their like. Copy the parts to one folder there, then ``begin.sh`` runs a list of jobs, or
by hand:

    bash FOLDER/unpack.sh FOLDER TARGET
    . TARGET/env.sh                       # sets PYTHONPATH and LD_PRELOAD for the server

What makes it small: of each fat binary only the code for compute capability 9.0 stays (H100, H200),
other code is overwritten with zeros, which compress to nothing; symbols, headers, profilers and
kernels of other chips go. FlashAttention 3 is in it. Two stand-ins make it start.
``sitecustomize.py`` answers ``import cutlass``: kernels for later chips, which sm90 never calls.
``stub.so`` has the functions of newer NVIDIA libraries that torch links and this server does not
call; calling one aborts the process with its name. Seen on four H100: see benchmarks/README.md.

``--only`` packs some wheels for a host that has the rest of another release: unpacked by ``cat
FOLDER/part* | xz -dc | tar -C TARGET -x``, TARGET comes first in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
PINNED = (
    "torch==2.14.1", "triton==3.8.0", "torchvision==0.29.1", "sglang==0.5.23",
    "sglang-kernel==0.4.10", "sgl-flash-mla==1.0.0", "flashinfer-python==0.7.2",
    "transformers==5.19.0", "tokenizers==0.23.2", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7",
    "openai==2.8.0", "quack-kernels==0.6.5", "sentencepiece==0.2.1", "llguidance==1.9.1",
    "kernels==0.14.1",
)  # fmt: skip
# What they import beside torch; of these a host may lack any.
BESIDE = (
    "annotated-types==0.8.0", "asttokens==3.0.2", "cffi==2.1.1", "click==8.5.1",
    "compressed-tensors==0.18.0", "cuda-python==13.4.4", "cuda-tile==1.7.0", "decorator==5.3.1",
    "dill==0.4.1", "distro==1.9.0", "easydict==1.14", "executing==2.3.0", "fastapi==0.165.0",
    "gguf==0.19.0", "interegular==0.3.3", "ipython==9.18.1", "ipython-pygments-lexers==1.1.1",
    "jedi==0.20.1", "jiter==0.19.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1",
    "loguru==0.7.3", "matplotlib-inline==0.2.2", "msgspec==0.23.0", "openai-harmony==0.0.4",
    "opentelemetry-api==1.45.2", "orjson==3.13.0", "parso==0.8.7",
    "partial-json-parser==0.2.1.1.post7", "pexpect==4.9.0", "prompt-toolkit==3.0.53",
    "psutil==7.2.2", "ptyprocess==0.7.0", "pure-eval==0.2.4", "pybase64==1.5.1", "pycparser==3.12",
    "pydantic==2.14.3", "pydantic-core==2.50.4", "pyelftools==0.33", "python-multipart==0.0.34",
    "pyzmq==27.3.0", "referencing==0.37.0", "rpds-py==2026.9.1", "setproctitle==1.3.8",
    "sniffio==1.3.1", "soundfile==0.14.0", "stack-data==0.6.3", "starlette==1.10.0",
    "tabulate==0.10.0", "torch-memory-saver==0.0.10", "traitlets==5.16.1",
    "typing-inspection==0.4.5", "uvicorn==0.54.0", "watchfiles==1.3.0", "wcwidth==0.9.4",
)  # fmt: skip
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12)  # pip matches each number exactly
KEEP = 90  # compute capability 9.0
# What no server on sm90 needs, as patterns below the packages' folder.
DROP = (
    "torch/include", "torch/bin/protoc*", "torch/test",
    "sgl_kernel/infllm_ops*", "sgl_kernel/sm100",
    "triton/backends/nvidia/lib/cupti*", "triton/_C/libproton.so", "triton/instrumentation/*.so",
    "triton/backends/nvidia/bin/ptxas-blackwell", "triton/backends/nvidia/bin/nvdisasm",
    "triton/backends/nvidia/bin/cuobjdump", "triton/plugins/*.so",
    "flashinfer/data/cutlass/examples", "flashinfer/data/cutlass/test",
    "flashinfer/data/cutlass/docs", "flashinfer/data/cutlass/media",
    "flashinfer/data/cutlass/tools/profiler", "flashinfer/data/csrc/cake_*",
    "flashinfer/data/csrc/kda", "flashinfer/data/csrc/gdn", "flashinfer/data/csrc/experimental",
    "flashinfer/data/csrc/blackwell_*", "flashinfer/data/csrc/fused_moe",
    "flashinfer/data/csrc/alphamoe*",
)  # fmt: skip
MAGIC = struct.pack("<IH", 0xBA55ED50, 1)  # a fat binary's header, version 1
PTX, ELF = 1, 2


def thin(path: Path, keep: int = KEEP) -> Counter[int]:
    """Overwrite the GPU code of other chips in a library with zeros, in place.

    Returns compute capability -> bytes of code that were there. The layout is that of CUDA's fat
    binaries as ``cuobjdump`` lists them: a header of 16 bytes with the size of what follows, then
    entries of a header (kind, its own size, the size of the code, the capability at byte 28) and
    code. The driver takes the entry of its own chip and reads no other.
    """
    found: Counter[int] = Counter()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at = data.find(MAGIC)
        while at >= 0:
            _, _, header, size = struct.unpack_from("<IHHQ", data, at)
            end = at + header + size
            if header == 16 and end <= len(data):
                _thin_one(data, at + header, end, keep, found)
                at = data.find(MAGIC, end)
            else:  # these bytes only look like a header
                at = data.find(MAGIC, at + 1)
    return found


def _thin_one(data: mmap.mmap, entry: int, end: int, keep: int, found: Counter[int]) -> None:
    while entry + 32 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
        (capability,) = struct.unpack_from("<I", data, entry + 28)
        code = entry + header
        if kind not in (PTX, ELF) or header < 32 or code + size > end:
            return
        found[capability] += size
        if capability != keep:
            data[code : code + size] = bytes(size)
        entry = code + size


def download(folder: Path, wanted: Sequence[str]) -> None:
    """These wheels for Python 3.12 on x86-64. Raises SystemExit if one is not there.

    wanted: as pip takes them, ``torch==2.14.1``.
    """
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
    command = [
        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
        *("--python-version", "3.12", "--implementation", "cp"),
        *(part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)),
        *(part for name in platforms for part in ("--platform", name)),
        *("-d", str(folder), *wanted),
    ]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("pip could not get all wheels; its last line says which one")


def unpack(wheels: Path, site: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
        wheel.unlink()
    for pattern in DROP:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (*site.glob("triton/backends/nvidia/bin/*"), *site.glob("torch/bin/*")):
        path.chmod(0o755)


def shrink(site: Path) -> None:
    for path in site.rglob("*.so*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 1_000_000:
            found = thin(path)
            if found:
                print(path.name, {c: f"{n / 1e6:.0f} MB" for c, n in sorted(found.items())})
            # strip refuses a library that another tool has changed; then it stays as it is.
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the parts go; it must not exist")
    parser.add_argument("--part-bytes", type=int, default=46_000_000, metavar="N")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME==VERSION", help="these wheels, and no others"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="threads of xz")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        site = Path(work) / "site"
        site.mkdir()
        download(Path(work) / "wheels", args.only or (*PINNED, *BESIDE))
        unpack(Path(work) / "wheels", site)
        shrink(site)
        for name in () if args.only else ("sitecustomize.py", "stub_symbols.py"):
            shutil.copy(HERE / name, site / name)
        with (
            subprocess.Popen(
                ["tar", "-C", str(site), "-cf", "-", "."], stdout=subprocess.PIPE
            ) as tar,
            subprocess.Popen(
                ["xz", f"-T{args.jobs}", "-0", "-c"], stdin=tar.stdout, stdout=subprocess.PIPE
            ) as xz,
        ):
            split = ["split", "-b", str(args.part_bytes), "-d", "-", str(args.folder / "part")]
            subprocess.run(split, stdin=xz.stdout, check=True)
        if tar.returncode or xz.returncode:
            raise SystemExit("tar or xz failed; its last line says why")
    shutil.copy(HERE / "unpack.sh", args.folder / "unpack.sh")
    for part in sorted(args.folder.iterdir()):
        print(f"{part.stat().st_size:>12,} {part.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
