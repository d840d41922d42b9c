"""What a report of a bug needs, in one tar file: facts, and nothing that a client wrote.

Of the log only lines are taken that SGLang, g4debug, CUDA or Python have formed; those that quote a
request are left out, and values that look like secrets are masked. That is a sieve and no proof: a
message of an exception may quote a client, too, so whoever sends the file looks at it first.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import re
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from g4debug.dumps.incidents import Dump
from g4debug.triage import lines
from g4debug.triage.lines import Line

AROUND = 200  # lines of the log before the first cause, and as many behind it
MOST_DUMPS = 5
LEFT_OUT = "[a line that is not the server's own, or that quotes a request, was left out]"
MASKED = "[left out]"
_SECRET = re.compile(
    r"((?:[\w-]*(?:api|access|secret|private)[_-]?key|[\w-]*(?:passw(?:or)?d|password|secret)"
    r"|(?:hf|auth|admin|bearer|access)[\w-]*token|authorization|bearer)"
    r"['\"]?(?:\s*[:=]\s*|\s+)(?:bearer\s+)?)(?!None\b)(['\"]?)[^'\",\s)]+",
    re.I,
)
_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|eyJ)[\w.-]{16,}")
_OWN = re.compile(
    r"Traceback \(most recent|\s+File \"|[A-Za-z_][\w.]*(?:Error|Exception)\b|g4debug|Fatal Python"
    r"|.{0,300}block: \[\d|.{0,80}NVRM: Xid|.{0,200}ProcessGroupNCCL"
    r"|  (?:expected|got|likely|dump|next):"
)


@dataclass(frozen=True)
class Piece:
    """A file of the bundle. about: what it is, for whoever is asked."""

    name: str
    about: str
    data: bytes


def masked(text: str) -> str:
    """A text without what looks like a secret."""
    return _TOKEN.sub(MASKED, _SECRET.sub(lambda m: f"{m[1]}{m[2]}{MASKED}", text))


def around(log: Iterable[bytes], middle: int) -> bytes:
    """The server's own lines around a line, counted from 1."""
    kept: list[str] = []
    for number, data in enumerate(log, 1):
        if number > middle + AROUND:
            break
        if number >= middle - AROUND:
            line = lines.read(number, data)
            own = not line.quotes and (line.prefixed or _OWN.match(line.text))
            said = masked(_whole(line)) if own else LEFT_OUT
            if said != LEFT_OUT or kept[-1:] != [LEFT_OUT]:
                kept.append(said)
    return ("\n".join(kept) + "\n").encode("utf-8", "replace")


def _whole(line: Line) -> str:
    when = f"[{line.at}{f' {line.rank}' if line.rank else ''}] " if line.at else ""
    return f"{line.number}: {when}{line.text}"


def versions() -> bytes:
    """What is installed here, and the GPU's driver. Nothing is imported or run."""
    from importlib import metadata

    from g4debug import __version__

    said = [f"g4debug {__version__}", f"Python {platform.python_version()}", platform.platform()]
    for name in ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "sgl-kernel"):
        try:
            said.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            said.append(f"{name} is not installed")
    try:
        said.append(Path("/proc/driver/nvidia/version").read_text().strip())
    except OSError as e:
        said.append(f"NVIDIA's driver: {e.strerror}")
    return ("\n".join(said) + "\n").encode()


def pieces(verdict: str, log: Path, middle: int, dumps: Sequence[Dump], tape: bool) -> list[Piece]:
    """The files of a bundle. verdict: as JSON. tape: whole dumps, too, which have the tape.

    Raises OSError if the log or a dump cannot be read.
    """
    from g4debug.dumps.errors import DumpError
    from g4debug.dumps.reading import read

    with log.open("rb") as file:
        said = around(lines.raw(file), middle)
    found = [
        Piece("triage.json", "the verdict", masked(verdict).encode()),
        Piece("versions.txt", "versions of what is installed here", versions()),
        Piece("log.txt", f"the server's own lines around line {middle}, secrets masked", said),
    ]
    heads = [{"file": d.path.name, **dataclasses.asdict(d.head)} for d in dumps[:MOST_DUMPS]]
    if heads:
        data = json.dumps(heads, indent=2).encode()
        found.append(Piece("heads.json", "the heads of the dumps of that time", data))
    for dump in dumps[:MOST_DUMPS]:
        try:
            autopsy = None if dump.broken else read(dump.path).autopsy
        except DumpError as e:
            found.append(Piece(f"{dump.path.name}.txt", "why it cannot be read", str(e).encode()))
            continue
        if autopsy is not None:
            data = json.dumps(dataclasses.asdict(autopsy), indent=2, default=str).encode()
            found.append(Piece(f"{dump.path.stem}-autopsy.json", "the autopsy in it", data))
        if tape:
            about = "the whole dump, with its tape: lengths and hashes of requests, no text"
            found.append(Piece(dump.path.name, about, dump.path.read_bytes()))
    return found


def write(found: Sequence[Piece], out: Path) -> None:
    """Write the tar file; only its owner may read it. Raises FileExistsError if it is there."""
    if os.path.lexists(out):
        raise FileExistsError(17, "it exists, and is not overwritten", str(out))
    with tempfile.NamedTemporaryFile(dir=out.absolute().parent, prefix=".g4debug-") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for piece in found:
                info = tarfile.TarInfo(f"g4debug-bundle/{piece.name}")
                info.size, info.mode = len(piece.data), 0o600
                tar.addfile(info, io.BytesIO(piece.data))
        file.flush()
        os.link(file.name, out)
