"""A name for one launch of a server, the same in all of its processes.

``g4debug list`` groups the dumps of one launch by it. The server's first process makes the name up
and puts it into its environment, which the processes that it starts inherit.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import MutableMapping
from typing import Any

from g4debug.hooking.resolved import server_argument

VARIABLE = "G4DEBUG_LAUNCH"  # declared in settings.py
MADE_UP = "auto-"  # begins every name that was not given by the user

_ours = ("", 0)  # the name that a process made up, and the pid of that one: a fork inherits both


def begin(server: bool, environ: MutableMapping[str, str] | None = None) -> str:
    """Make sure that the environment has the launch's name, and return it.

    server: this process starts the others of a server. A name that the user gave is kept. A made-up
    one is kept in a process that a server started, and replaced in a server's first process: a
    server that is started by another one is a new launch.
    """
    global _ours
    env = os.environ if environ is None else environ
    name = env.get(VARIABLE, "").strip()
    inherited = not server or (name, os.getpid()) == _ours
    if not name or (name.startswith(MADE_UP) and not inherited):
        name = env[VARIABLE] = MADE_UP + secrets.token_hex(6)
        _ours = (name, os.getpid())
    return name


def of(scheduler: Any) -> str:
    """The name of this process's launch, '' if it has none.

    The nodes of a server share no environment. Where SGLang runs on several, and the user gave no
    name, the name is made from ``--dist-init-addr``, which is the same on all of them. Only a hash
    of it is used, because people pass dumps around.
    """
    name = os.environ.get(VARIABLE, "").strip()
    if name and not name.startswith(MADE_UP):
        return name
    arguments = getattr(scheduler, "server_args", None)
    address = server_argument(arguments, "dist_init_addr")
    nodes = server_argument(arguments, "nnodes", 1)
    if isinstance(address, str) and address and isinstance(nodes, int) and nodes > 1:
        return "nodes-" + hashlib.sha256(address.encode()).hexdigest()[:12]
    return name
