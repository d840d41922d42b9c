"""What the line of an Xid in dmesg says beside the address: whose fault it is, and how exact.

An MMU fault has the begin of the GPU's page that was missing, which is 4 KiB at least, and the
process by its number on the host. In a container the same process may have another number.
"""

from __future__ import annotations

import re

SAYS = "Xid in dmesg"
PAGE = 4096  # bytes of the GPU's smallest page: an address that is none's begin was not rounded
ROUNDED = (
    "an Xid has the begin of the GPU's page, not the address: the token is not known, and where "
    "that page is larger than 4 KiB, the KV page may be a later one"
)
BEFORE = 512  # characters in front of an address in which its process stands
_OF = re.compile(r"pid='?(\d{1,10})(?!\d)'?(?:,\s*name='?([^,'\n]{1,64}))?")


def rounding(address: int) -> int:
    """Bytes from the address on in which the one that faulted lies, at least; 0: it is exact."""
    return 0 if address % PAGE else PAGE


def process(line: str, at: int) -> tuple[int, str]:
    """Process id and name of the Xid whose address is at ``at``; -1 and '' are not known."""
    begin = line.rfind("pid=", max(0, at - BEFORE), at)
    match = _OF.match(line, begin, at) if begin >= 0 else None
    return (int(match[1]), (match[2] or "").strip()) if match else (-1, "")


def doubt(pid: int, name: str, of: int) -> str:
    """Why the fault may be none of the dump's process, ``of``; '' if nothing says so.

    It is no reason to refuse: whether the dump's process had another number on the host is not in
    the dump.
    """
    if of <= 0 or pid == of:
        return ""
    if pid < 0:
        return f"the Xid does not say whose fault it is; the dump is of process {of}"
    called = f" ({name})" if name else ""
    return (
        f"the Xid is of process {pid}{called}, the dump of process {of}: this map is another "
        "process's, unless the server ran in a container, which has numbers of its own"
    )
