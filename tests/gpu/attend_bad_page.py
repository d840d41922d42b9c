"""FlashInfer's real decode kernel on a table with one bad live cell.

``bare``: as it is. ``guarded``: with the guard's table. ``graph``: guard and attention in one
CUDA graph, captured on a sound table; the bad page appears before the replay.
"""

from __future__ import annotations

import sys

import flashinfer
import torch

from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.guard import TrapBuffer

DEV, DIM, PAGE, BATCH, LENGTH, PAGES, BAD = "cuda", 256, 64, 8, 2000, 512, 10_000_000
COLUMNS = -(-LENGTH // PAGE)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), atol=1e-2)


def main(mode: str) -> None:
    torch.manual_seed(0)
    k = torch.randn(PAGES, 2, PAGE, DIM, device=DEV, dtype=torch.bfloat16)
    v, q = torch.randn_like(k), torch.randn(BATCH, 8, DIM, device=DEV, dtype=torch.bfloat16)
    table = torch.randint(0, PAGES, (BATCH, COLUMNS), device=DEV, dtype=torch.int32)
    lengths = torch.full((BATCH,), LENGTH, device=DEV, dtype=torch.int32)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=DEV)
    safe = torch.zeros_like(table)
    trap = TrapBuffer(torch.device(DEV))
    mailbox = trap.new_mailbox()

    def attend(pages: torch.Tensor) -> torch.Tensor:
        return flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            query=q,
            kv_cache=(k, v),
            workspace_buffer=workspace,
            block_tables=pages,
            seq_lens=lengths,
            max_seq_len=4096,
            bmm1_scale=DIM**-0.5,
            bmm2_scale=1.0,
            window_left=511,
        )

    def guarded() -> torch.Tensor:
        page_guard.launch(table, safe, lengths, None, trap, mailbox, PAGES, PAGE, 511)
        return attend(safe)

    sound = guarded().clone()
    torch.cuda.synchronize()
    assert not trap.tripped
    assert close(sound, attend(table))  # the guard changes nothing on a sound table
    if mode == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = guarded()
        table[0, -1] = BAD
        graph.replay()
    else:
        table[0, -1] = BAD
        out = attend(table) if mode == "bare" else guarded()
    torch.cuda.synchronize()
    for left in trap.take():
        record = left.record
        print(f"tripped row {record.row} column {record.at} value {record.value}")
    same = close(out[1:], sound[1:]) and not close(out[0], sound[0])
    print(f"survived; other rows as without the bad page: {same}")


if __name__ == "__main__":
    main(sys.argv[1])
