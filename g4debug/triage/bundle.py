"""What a report of a bug needs, in one tar file: facts, and little of what clients wrote.

Of the log only lines are taken that SGLang, g4debug, CUDA or Python have formed; those that quote a
request are left out; long texts in quotes and values that look like secrets are masked. That is a
sieve and no proof: a line of SGLang's own may quote a client without any quotes, so whoever sends
the file looks at it first.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from g4debug.dumps.incidents import Dump
from g4debug.triage import carriers, lines
from g4debug.triage.lines import Line
from g4debug.triage.patterns import ANY_CASE
from g4debug.triage.verdict import Verdict

AROUND = 200  # lines of the log before the first cause, and as many behind it
MOST_DUMPS = 5
LEFT_OUT = "[a line that is not the server's own, or that quotes a request, was left out]"
MASKED = "[left out]"
_SECRET = re.compile(
    r"((?:[\w-]*(?:api|access|secret|private)[_-]?key(?:[_-]?id)?|[\w-]*(?:passw(?:or)?d|password|secret)"
    r"|(?:hf|auth|admin|bearer|access)[\w-]*token|authorization|bearer)"
    r"['\"]?(?:\s*[:=]\s*|\s+(?:(?:is|was)\s+)?)(?:bearer\s+)?)(?!None\b)(['\"]?)[^'\",\s)]+",
    re.I,
)
_TOKEN = re.compile(
    r"\b(?:hf_|sk-|ghp_|eyJ|AKIA|ASIA)[\w.-]{16,}|(?<=://)[^/\s:@]{1,200}:[^/\s@]{1,200}(?=@)"
)
_OWN = re.compile(
    r"Traceback \(most recent|g4debug|Fatal Python|.{0,300}block: \[\d|.{0,80}NVRM: Xid"
    r"|.{0,20}(?:CUDA|Cuda|HIP) [Ee]rror|.{0,80}NCCL WARN|.{0,200}ProcessGroupNCCL"
    r"|  (?:expected|got|likely|dump|next):"
)
_LAUNCH = re.compile(
    r"^server_args=|g4debug \S{1,40} \[\w{1,20}\] armed: |^g4debug: this server runs "
    r"|max_total_num_tokens=|\bsglang[ =:@v-]{1,4}\d+\.\d+\.\d+"
)
_FRAME = re.compile(r"\s+File \"")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)(?::|$)")
_QUOTED = re.compile(r"(['\"])((?:(?!\1).){21,}?)\1")
_WORD = re.compile(r"[\w.:/@+-]+")  # a name, a path or a model, and no sentence


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
    """The server's own lines around a line, counted from 1, and what it said of its launch."""
    kept: list[str] = []
    inside = False  # a traceback whose exception has not come
    wrapping = carriers.Unwrapper()
    launches = 0  # lines of launches that were told above
    for number, whole in enumerate(log, 1):
        if number > middle + AROUND:
            break
        near = number >= middle - AROUND
        for data in wrapping.lines(whole):
            line = lines.read(number, data)
            if not near:
                if launches >= AROUND or not _LAUNCH.search(line.text):
                    continue
                launches += 1
            inside = "Traceback (most recent" in line.text or (inside and not line.prefixed)
            raised = inside and _EXCEPTION.match(line.text) is not None
            frame = inside and _FRAME.match(line.text) is not None
            own = line.prefixed or raised or frame or _OWN.match(line.text) is not None
            said = _unquoted(masked(_whole(line))) if own and not line.quotes else LEFT_OUT
            inside = inside and not raised
            if said != LEFT_OUT or (near and kept[-1:] != [LEFT_OUT]):
                kept.append(said)
    return ("\n".join(kept) + "\n").encode("utf-8", "replace")


def sieved(found: Verdict) -> Verdict:
    """A verdict with what it quotes of the log as ``around`` has it."""

    def said(text: str) -> str:
        return _unquoted(masked(text))

    return replace(
        found,
        first=found.first and replace(found.first, text=said(found.first.text)),
        error=(found.error[0], said(found.error[1])),
        earlier=tuple((line, said(what)) for line, what in found.earlier),
        survived=tuple(replace(mark, text=LEFT_OUT) for mark in found.survived),
        neighbours=tuple(replace(mark, text=said(mark.text)) for mark in found.neighbours),
    )


def _unquoted(text: str) -> str:
    """A line without what it quotes at length: a client's words, often. Not of the launch."""
    if "server_args=" in text or _FRAME.search(text):
        return text
    return _QUOTED.sub(lambda m: m[0] if _known(m[2]) else f"{m[1]}{MASKED}{m[1]}", text)


def _known(quoted: str) -> bool:
    return _WORD.fullmatch(quoted) is not None or any(x in quoted for x in ANY_CASE)


def status(tracers: Mapping[str, object]) -> bytes:
    """What the tracers could judge: of the servers that run here, and of each dump."""
    from g4debug.findings.status_file import StatusFileError, read

    running = {}
    for path in sorted(Path("/proc").glob("[0-9]*")):
        try:
            found = read(int(path.name))
        except (StatusFileError, ValueError):
            continue  # somebody else's, or of another g4debug
        if found is not None:
            running[path.name] = found
    said = {"running": running, "dumps": tracers}
    return masked(json.dumps(said, indent=2, default=str)).encode()


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
        said = around(lines.raw(lines.opened(file)), middle)
    found = [
        Piece("triage.json", "the verdict", masked(verdict).encode()),
        Piece("versions.txt", "versions of what is installed here", versions()),
        Piece("log.txt", f"the server's own lines around line {middle}, through a sieve", said),
    ]
    tracers: dict[str, object] = {}
    heads = [{"file": d.path.name, **dataclasses.asdict(d.head)} for d in dumps[:MOST_DUMPS]]
    if heads:
        data = json.dumps(heads, indent=2).encode()
        found.append(Piece("heads.json", "the heads of the dumps of that time", data))
    for dump in dumps[:MOST_DUMPS]:
        autopsy = None
        try:
            if not dump.broken:
                record = read(dump.path)
                autopsy = record.autopsy
                tracers[dump.path.name] = [dataclasses.asdict(one) for one in record.tracers]
        except DumpError as e:
            found.append(Piece(f"{dump.path.name}.txt", "why it cannot be read", str(e).encode()))
            continue
        if autopsy is not None:
            data = json.dumps(dataclasses.asdict(autopsy), indent=2, default=str).encode()
            found.append(Piece(f"{dump.path.stem}-autopsy.json", "the autopsy in it", data))
        if tape:
            about = "the whole dump, with its tape: lengths and hashes of requests, no text"
            found.append(Piece(dump.path.name, about, dump.path.read_bytes()))
    about = "what the tracers could judge: in servers that run here, and in the dumps"
    found.append(Piece("status.json", about, status(tracers)))
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
