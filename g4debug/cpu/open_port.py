"""SGLang's last step of a start waits until the server's port is open.

At the end of a start SGLang asks the server over HTTP to freeze Python's garbage collector. Without
a warm-up (``--skip-server-warmup``, which the CPU engine gives) it asks from a thread that is
started before the port is opened. Chance decided which of them was first, and a healthy start often
ended in four tracebacks about a refused connection.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 10.0  # seconds; SGLang then gives the server as many to answer
PAUSE = 0.02  # seconds


def awaited(freeze: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps `_freeze_gc_after_server_warmup`. A port that does not open is for SGLang to tell."""

    @functools.wraps(freeze)
    def wait(server_args: Any) -> None:
        url = urlsplit(server_args.url())
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection((url.hostname, url.port), PATIENCE):
                break
            time.sleep(PAUSE)
        freeze(server_args)

    return wait
