"""Which lines of a log are looked at: those with a word that some pattern is about.

A log of gigabytes is mostly others, so this must be quick. A regular expression tries its
alternatives one after the other; as a tree of letters it tries one letter, whatever their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORDS = (
    "Error|Exception|g4debug|CUDA|cudaE|cuda error|CUBLAS|NCCL|nccl|xit code|Xid|memory|Assertion"
    "|sserted|atchdog|Traceback|  File |server_args=|launch_server|sglang|assert|key = key|SIGTERM"
    "|Gracefully|onnection|crash diagnostics|pool|FORCE_EAGLE|Bidirectional|aborted last|in use"
    "|No space|kernel image|PIECEWISE|cannot be served|OOMKilled|oom-kill|unrecognized|not a valid"
    "|fatal|Fatal|Broken pipe|initialized|out of resource|failed to recv|recvValue|heartbeat|Leak"
    "|swa_tombstone|fallen off|appear to have|fmhaSm100f|page-table|switch fix|so a finding could"
    "|sigquit|SIGQUIT|ECC |transfer failed|handshake failed|bootstrap failed|ERROR|Terminating"
    "|launch failure|Health check|Timed out waiting|huggingface|gated repo|Interrupt|warmup error"
    "|aborted request|Memory access|to bind on|nvshmem|AlignedAllocator|ninja|Ninja|find nvcc"
    "|DeepEP|KV double|KV page|onitoredBarrier|other ranks|SocketImpl|TCPStore|recognize this"
    "|device function|Pyspy dump|NaN |Inf detected|Killed|terminated with|exited with"
    "|probe, will|requests before crash|SXid|NVLink|NVIDIA driver|busy or unavailable"
    "|Can't load tokenizer|untagged|Unrecognized model|compilation failed|TMA descriptor"
    "|OOM killer|oom_kill|Out Of Memory|core dumped|Caught signal|* SIG|CANCELLED AT|xit Code"
    "|xitCode|code=killed|code=dumped|terminated by SIG|Duplicate GPU|available workers"
    "|Child process|exited on signal|low on resource|CUDNN_STATUS"
)


class _Node(dict[str, "_Node"]):
    """What may follow on a letter. ends: a word is whole here, so nothing need follow."""

    ends = False


def any_of(words: Iterable[str]) -> str:
    """A regular expression for a text that has one of these words."""
    root = _Node()
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, _Node())
        node.ends = True
    return _follow(root)


def _follow(node: _Node) -> str:
    if node.ends:
        return ""
    found = [re.escape(letter) + _follow(after) for letter, after in node.items()]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


TRIGGER = re.compile(any_of(_WORDS.split("|")).encode())
