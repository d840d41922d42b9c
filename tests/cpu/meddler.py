"""An SGLang plugin of the engine test: breaks page tables while a file with that name exists.

`wrong-draft`: the assistant reads the pages of its neighbour in the batch.
`out-of-range`: the target reads a page that does not exist.
Says first in what kind of process SGLang loads it.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path


def say(file):
    """What a process has that did nothing but import SGLang; less what names this run's folder, and
    less g4debug's own modules, which a warm process has imported already."""
    own = str(file.parents[1])
    found = {
        "modules": sorted(n for n in sys.modules if not ours(n)),
        "path": [p for p in sys.path if own not in p],
        "folder": os.getcwd(),
        "environ": {k: v for k, v in os.environ.items() if own not in v and k != "SGLANG_RUN_ID"},
        "script": sys.argv[0],
        "main": sys.modules["__main__"].__dict__.get("__file__"),
        "signals": {n.name: str(signal.getsignal(n)) for n in signal.Signals},
        "threads": [t.name for t in threading.enumerate()],
        "collector": gc.get_threshold(),
        "group": (os.getsid(0) == os.getpgid(0), os.getsid(0) in (os.getpid(), os.getppid())),
    }
    file.write_text(json.dumps(found))


def ours(name):
    """A module of g4debug, but for the stand-ins that SGLang imports."""
    return name.startswith("g4debug.") and not name.startswith("g4debug.cpu")


def register():
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend as Backend

    folder = Path(os.environ["MEDDLER_FLAGS"])
    say(folder / f"{multiprocessing.current_process().name}.json")
    real = Backend._get_layer_page_table

    def meddle(self, layer, forward_batch):
        table = real(self, layer, forward_batch)
        draft = type(forward_batch.spec_info).__name__ == "FrozenKVMTPDraftInput"
        if draft and (folder / "wrong-draft").exists():
            return table.roll(1, 0)
        if not draft and (folder / "out-of-range").exists():
            table = table.clone()
            table[0, 0] = 10**6
        return table

    Backend._get_layer_page_table = meddle
