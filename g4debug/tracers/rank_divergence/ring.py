"""The last steps of each rank in the memory that the ranks of a launch share.

Each rank writes its own ring and reads the other rings. Nobody waits: a step that was not
written yet is compared later, and one that was overwritten meanwhile is not compared.
"""

from __future__ import annotations

import struct
import zlib

from g4debug.findings.launch_memory import RING_BYTES

STEPS = 64
STEP_BYTES = RING_BYTES // STEPS
# The head of each step: its number, the length of the digest behind it, its checksum. The place of
# a step follows from its number, so the number also tells a reader whether it is the right step.
_HEAD = struct.Struct("<qII")


def write(ring: memoryview, step: int, digest: bytes) -> bool:
    """Put a step into this process's own ring. False if it is too long for it."""
    if _HEAD.size + len(digest) > STEP_BYTES:
        return False
    at = step % STEPS * STEP_BYTES
    head = _HEAD.pack(step, len(digest), zlib.crc32(digest, step))
    ring[at : at + _HEAD.size + len(digest)] = head + digest
    return True


def read(ring: memoryview, step: int) -> tuple[int, bytes]:
    """The step that is where ``step`` would be, and its digest.

    (-1, b'') if it is half written. A step of 0 or less: nothing was written there yet.
    """
    at = step % STEPS * STEP_BYTES
    found, length, checksum = _HEAD.unpack_from(ring, at)
    if found <= 0:
        return 0, b""
    if length > STEP_BYTES - _HEAD.size:
        return -1, b""
    digest = bytes(ring[at + _HEAD.size : at + _HEAD.size + length])
    if zlib.crc32(digest, found) != checksum:
        return -1, b""
    return found, digest
