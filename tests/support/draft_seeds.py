"""An SGLang plugin of test_yoco_engine.py: what the draft gets of a prefill, in a file.

That is the last hidden state of each prompt. What the draft proposes is verified, so that no token
tells of a wrong one. The toy's assistant proposes almost the same without it, so that the count of
verifies does not, either. ``DRAFT_SEEDS`` is the file. ``DRAFT_GETS=zeros`` breaks the hand-over.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import installed_plugin

WORKERS = ("frozen_kv_mtp_worker_v2", "frozen_kv_mtp_worker")


def installed(folder: Path) -> dict[str, str]:
    """The environment of an engine that has the plugin and writes to ``folder / "seeds"``."""
    installed_plugin.install(folder / "plugin", "draft-seeds", "draft_seeds:register")
    path = installed_plugin.path(folder / "plugin", Path(__file__).parent)
    return {"PYTHONPATH": path, "DRAFT_SEEDS": str(folder / "seeds")}


def read(folder: Path) -> list[list[float]]:
    """The rows that were handed over, in order. Those that are zero are left out.

    With the path that is what a chunk has that is not the last of its prompt: nobody reads it.
    """
    lines = (folder / "seeds").read_text().splitlines()
    return [row for line in lines for row in json.loads(line) if any(row)]


def register() -> None:
    from sglang.srt.distributed import get_tp_group

    for name in WORKERS:
        try:
            worker = importlib.import_module(f"sglang.srt.speculative.{name}")
        except ImportError:
            continue
        if not hasattr(worker, "select_last_extend_hidden"):
            continue  # it has another worker's
        if os.environ.get("DRAFT_GETS") == "zeros":
            real = worker.select_last_extend_hidden
            worker.select_last_extend_hidden = lambda *a, real=real, **k: real(*a, **k) * 0
        for found in vars(worker).values():
            select = getattr(found, "__dict__", {}).get("_select_last_extend_hidden")
            if select is None:
                continue

            def seen(*args: Any, select: Any = select, **kwargs: Any) -> Any:
                hidden = select(*args, **kwargs)
                if get_tp_group().rank_in_group == 0:
                    with Path(os.environ["DRAFT_SEEDS"]).open("a") as f:
                        print(json.dumps(hidden.tolist()), file=f)
                return hidden

            found._select_last_extend_hidden = seen
