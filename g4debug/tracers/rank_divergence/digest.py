"""The work of a rank in one step, as bytes that the others can compare with their own.

Only what the host has anyway is read, so nothing waits for the device.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from g4debug.findings.record import Step

MAX_FIELD = 2048  # bytes of one field; of a longer one, the end is a hash of all of it
_HASH = 16
_LENGTH = struct.Struct("<H")
_MARK = b"\0cut\0"

TEXTS = frozenset({"forward mode", "requests", "ending requests", "spec_info"})


def _ending(step: Step, batch: Any) -> bytes:
    rids = (str(r.rid) for r in batch.reqs if getattr(r, "to_finish", None) is not None)
    return "\n".join(rids).encode()


def _extends(batch: Any, name: str) -> bytes:
    return _numbers(getattr(batch, name) if batch.forward_mode.is_extend() else ())


# Most telling first: of several fields that differ, the first one names the finding.
_READ: dict[str, Callable[[Step, Any], bytes]] = {
    "forward mode": lambda step, batch: step.forward_mode.encode(),
    "requests": lambda step, batch: "\n".join(step.rids).encode(),
    "ending requests": _ending,
    "output tokens": lambda step, batch: _output(batch.reqs),
    "prefix lengths": lambda step, batch: _extends(batch, "prefix_lens"),
    "extend lengths": lambda step, batch: _extends(batch, "extend_lens"),
    "sequence lengths": lambda step, batch: _numbers(step.seq_lens),
    "committed tokens": lambda step, batch: _numbers(step.committed),
    "allocated tokens": lambda step, batch: _numbers(step.allocated),
    "evicted tokens": lambda step, batch: _numbers(step.evicted),
    "spec_info": lambda step, batch: f"{step.spec_info} {_lengths(batch.spec_info)}".encode(),
    "rows of req_to_token": lambda step, batch: _numbers(step.rows),
    "tokens in use": lambda step, batch: _numbers((step.full_used, step.swa_used)),
    "out_cache_loc": lambda step, batch: _tensor(batch.out_cache_loc),
}
FIELDS = (*_READ, "KV locations")


def of(step: Step, batch: Any, req_to_token: torch.Tensor | None) -> bytes:
    """The digest of a step that is about to begin.

    step: as the step recorder has noted it. req_to_token: SGLang's table, [rows, tokens], if it
    lies in host memory, and None if it does not.
    """
    locations = b"" if req_to_token is None else _locations(req_to_token, step)
    values = (*(read(step, batch) for read in _READ.values()), locations)
    return b"".join(_LENGTH.pack(len(cut)) + cut for cut in map(_cut, values))


def split(digest: bytes) -> list[bytes]:
    """The fields of a digest. Raises ValueError if it is none."""
    fields, at = [], 0
    try:
        for _ in FIELDS:
            (length,) = _LENGTH.unpack_from(digest, at)
            at += _LENGTH.size + length
            fields.append(digest[at - length : at])
    except struct.error as e:
        raise ValueError(str(e)) from e
    if at != len(digest):
        raise ValueError(f"{len(digest) - at} bytes too many")
    return fields


def words(name: str, value: bytes) -> str:
    """A field's value, for a person."""
    cut = len(value) == MAX_FIELD and value[-_HASH - len(_MARK) : -_HASH] == _MARK
    kept = value[: -_HASH - len(_MARK)] if cut else value
    if name in TEXTS:
        shown = kept.decode("utf-8", "replace").replace("\n", ", ").strip()
    else:
        numbers = array("q", kept[: len(kept) // 8 * 8]).tolist()
        shown = ", ".join(map(str, numbers))
        if name == "KV locations":
            shown = ", ".join(f"{n & 0xFFFFFFFF:08x}" for n in numbers)
        if name == "output tokens":
            shown = ", ".join(f"{n} (checksum {c:08x})" for n, c in _pairs(numbers))
    return (shown or "none") + (f", … (hash {value[-4:].hex()})" if cut else "")


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=False))


def _numbers(values: Sequence[int] | None) -> bytes:
    return array("q", values or ()).tobytes()


def _output(reqs: Sequence[Any]) -> bytes:
    """For each request the number of its tokens so far, and a checksum of the last ones.

    No token can be told from it for certain, so that a dump holds none.
    """
    found = array("q")
    for req in reqs:
        ids = req.output_ids
        found.append(len(ids))
        found.append(hash(tuple(ids[-4:])) & 0xFFFFFFFF)
    return found.tobytes()


def _lengths(spec_info: Any) -> str:
    """How long each tensor of a spec_info is: ``verified_id 4, hidden_states 4``."""
    if spec_info is None:
        return ""
    return ", ".join(
        f"{name} {len(value)}"
        for name, value in sorted(getattr(spec_info, "__dict__", {}).items())
        if isinstance(value, torch.Tensor) and value.dim()
    )


def _tensor(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return b""
    return value.to(torch.int64).contiguous().numpy().tobytes()


def _locations(req_to_token: torch.Tensor, step: Step) -> bytes:
    """The first committed locations of each row that is in use, as one hash of each."""
    found = array("q")
    for row, length in zip(step.rows, step.committed, strict=False):
        if row >= 0:
            data = req_to_token[row, :length].contiguous().numpy().tobytes()
            digest = hashlib.blake2b(data, digest_size=8).digest()
            found.append(int.from_bytes(digest, "little", signed=True))
    return found.tobytes()


def _cut(value: bytes) -> bytes:
    if len(value) <= MAX_FIELD:
        return value
    end = _MARK + hashlib.blake2b(value, digest_size=_HASH).digest()
    return value[: MAX_FIELD - len(end)] + end
