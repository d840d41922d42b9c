"""Driven by test_prefix_cache_twins.py: two requests with one prompt come back from a retraction.

What they had in the prefix cache is evicted by then. Both are admitted in one batch, the second one
with a chunk that ends in its answer. SGLang's own requests, allocator and prefix cache, for a model
without sliding layers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "versions"))

import drive_ledger  # noqa: E402
import served  # noqa: E402
import torch  # noqa: E402

PAGE = served.PAGE
ANSWERS, MOST = (20, 120), (60, 140)  # tokens: before the retraction, and in all


class Server(served.Server):
    """A server with one pool."""

    def __init__(self, core: str) -> None:
        super().__init__(spec=False, radix=True, overlap=False, core=core)
        base = "sglang.srt.mem_cache"
        allocator = served.first(f"{base}.allocator.paged.PagedTokenToKVPoolAllocator")
        kv = SimpleNamespace()
        self.allocator = allocator(served.FULL, PAGE, torch.float32, "cpu", kv, False)
        kinds = served.first(f"{base}.unified_cache.component_type.ComponentType")
        params = served.first(f"{base}.cache_init_params.CacheInitParams")
        self.tree = served.tree_class(True)(
            params(
                disable=False, req_to_token_pool=self.rows, page_size=PAGE,
                token_to_kv_pool_allocator=self.allocator, chunked_prefill_size=served.CHUNK,
                tree_components=(kinds.FULL,), tree_core_backend=core,
            )
        )  # fmt: skip


def books(core: str, folder: Path) -> tuple[drive_ledger.Books, Server]:
    found = drive_ledger.Books(folder, None, "")
    server = Server(core)
    found.compare = lambda after: None  # type: ignore[method-assign]  # it is for two pools
    found.hooks.after_swa_init(None, server.allocator)  # in place of the pools of a hybrid model
    found.serve(server)
    return found, server


def drive(core: str, folder: Path) -> dict[str, Any]:
    found, server = books(core, folder)
    for rid in ("r1", "r2"):
        server.come(rid, [5] * PAGE, 0)
    for number, request in enumerate(server.waiting):
        request.output_ids.extend([7 + number] * ANSWERS[number])
        request.sampling_params.max_new_tokens = MOST[number]
        request.retracted_stain, request.retraction_count = True, 1
    chunks, split = 0, []
    insert = server.tree.insert

    def inserted(params: Any) -> Any:
        split.append(len(params.key))
        return insert(params)

    server.tree.insert = inserted
    for _ in range(60):
        server.round(lambda: 1)
        chunks += server.chunked is not None
    return {
        "served": server.served, "chunks": chunks, "inserts": split,
        "broken": found.ledger.broken, "doubts": found.cache._doubts,
        "judged": found.cache.context.status.tally("pages handed over").count,
    }  # fmt: skip


def main() -> None:
    import json

    served.without_kernels()
    served.fast_kernels()
    with tempfile.TemporaryDirectory() as folder:
        print("RESULT", json.dumps(drive(sys.argv[1], Path(folder))), flush=True)


if __name__ == "__main__":
    main()
