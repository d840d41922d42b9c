"""Whom a line is about: the server, or another process of the machine, or container of the pod.

The kernel names who was killed or whose kernel faulted, and Kubernetes the container. Where no name
is given, the line counts as the server's.
"""

from __future__ import annotations

import re

# SGLang calls its processes sglang::…; an interpreter's may be the server's.
_SERVER = re.compile(r"sglang|python|pt_main|ray::|<unknown>|unknown|\?")
_NAMED = (
    re.compile(r"Killed process \d+,? \(([^)]*)\)"),
    re.compile(r"oom-kill:constraint=.*\btask=([^,]+)"),
    # A GPU that has failed fails for all: only a kernel that faulted is somebody's.
    re.compile(r"NVRM: Xid \([^)]*\): (?:13|31|43|45), .*?\bname=([^,\s]+)"),
)
_CONTAINER = (
    re.compile(r"^([\w.-]{1,100}?)(?:-\d+)? exited with code \d+"),
    re.compile(r"Container ([\w.-]{1,100}) failed \w+ probe"),
)
# systemd and supervisord name what they started, and what was killed.
_SERVICE = re.compile(
    r"(?:^|: )([\w@.\\-]{1,100})\.(?:service|scope): |\bexited: (\S{1,100}) \(terminated by "
    r"|\bspawned: '([^']{1,100})' with pid |\b(?:Started|Starting) ([\w@.\\-]{1,100})\.service\b"
)
_SERVICES = re.compile(rb"\.service\b|\.scope: |exited: |spawned: '")
MOST_SERVICES = 1000  # of a log that are remembered
_KEY = re.compile(rb"( *)([\w.-]{1,100}):\s*$")


def of_line(text: str, logged: set[str]) -> str:
    """The name of the process that a line is about, if it is another one than the server; or ''.

    logged: the containers that lines of the log came from.
    """
    for regex in _CONTAINER:
        if logged and (found := regex.search(text)):
            return "" if found[1] in logged else found[1]
    for regex in _NAMED:
        if found := regex.search(text):
            return "" if _SERVER.match(found[1]) else found[1]
    return ""


def service(text: str) -> str:
    """The service that a line of systemd or supervisord is about; '' if it is not of these."""
    found = _SERVICE.search(text)
    return next(filter(None, found.groups()), "") if found is not None else ""


class Services:
    """The services of a machine that a log names."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def take(self, data: bytes) -> None:
        """A line that SGLang did not form."""
        if len(self._names) < MOST_SERVICES and _SERVICES.search(data) is not None:
            self._names |= {service(data.decode("utf-8", "replace"))} - {""}

    def other(self, name: str) -> bool:
        """Whether a service is not the server's. Of several, one that is named after it is."""
        return "sglang" not in name and len(self._names) > 1


class Pod:
    """A pod that ``kubectl describe`` tells of. container: whose lines these are, '' if none."""

    def __init__(self) -> None:
        self.container = ""
        self._names: dict[str, bool] = {}  # whether it runs SGLang
        self._depth: int | None = None  # of the names; None outside of the containers
        self._margin = 0

    def take(self, data: bytes) -> None:
        """A line that SGLang did not form."""
        if self._depth is None and b"ontainer" not in data:
            return
        found = _KEY.match(data)
        if found is not None and found[2] in (b"Containers", b"containers", b"containerStatuses"):
            self._depth, self._margin, self.container = 0, len(found[1]), ""
            return
        if self._depth is None:
            return
        if data.strip() and not data.startswith(b" " * (self._margin + 1)):
            self._depth, self.container = None, ""
        elif found is not None and (not self._depth or len(found[1]) == self._depth):
            self._depth = len(found[1])
            self.container = found[2].decode()
            self._names.setdefault(self.container, False)
        elif self.container and b"sglang" in data:
            self._names[self.container] = True

    def other(self, name: str, logged: set[str]) -> bool:
        """Whether a container is not the server's, as far as it is known.

        logged: the containers that lines of the log came from. Of several containers, where nothing
        says which is the server, none is accused.
        """
        served = {one for one, sglang in self._names.items() if sglang} or logged & set(self._names)
        return name not in served if served else len(self._names) > 1
