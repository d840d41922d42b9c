"""Measures the guard of token lists (attention backend triton) on a GPU, in a CUDA graph.

    python benchmarks/token_guard.py [--tokens 500,8000,32000] [--rows 1,8,64] [--page-size 64]

A decode's list is as long as the context, so the guard's cost grows with it. Each figure is the
median over replays of a graph with 20 launches, in microseconds for one launch: of the guard with
ranges only, with the truth (``req_to_token``, shadow, owners), and of a plain copy of the list,
which is the least that reading it can cost. A forward has two lists, one for the full and one for
the sliding layers; the second one is as long as the window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from measuring import kernels, options

from g4debug.backends.handed_over import TokenLists
from g4debug.ledger import shadow as shadows
from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.page_table import token_guard
from g4debug.tracers.page_table.check import Truth

LAUNCHES = 20


def served(rows: int, tokens: int, page_size: int) -> tuple[TokenLists, Truth, int]:
    """Lists of ``rows`` requests of ``tokens`` tokens, what is true of them, tokens of the pool."""
    columns = -(-tokens // page_size)
    pages = rows * columns + 1
    own = (torch.randperm(pages - 1) + 1).view(rows, columns, 1) * page_size
    own = (own + torch.arange(page_size)).view(rows, -1)
    table = torch.zeros(rows + 1, columns * page_size, dtype=torch.int32)
    table[1:] = own.to(torch.int32)
    shadow = shadows.new(pages, "cuda")
    shadow[:-1] = shadows.HELD
    owners = torch.zeros(pages + 1, dtype=torch.int32)
    owners[own[:, ::page_size] // page_size] = torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
    lists = TokenLists(
        own[:, :tokens].flatten().cuda(),
        (torch.arange(rows + 1) * tokens).to(torch.int32).cuda(),
        torch.full((rows,), tokens).cuda(),
        splits=torch.full((rows,), 8, dtype=torch.int32).cuda(),
        max_splits=16,
    )
    truth = Truth(
        table.cuda(),
        torch.arange(1, rows + 1).cuda(),
        False,
        shadow,
        owners=owners.cuda(),
        protected=torch.zeros(rows + 1, dtype=torch.int32).cuda(),
        padding=1,
    )
    return lists, truth, pages * page_size


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """For one call, in a graph of LAUNCHES calls. The median over the rounds."""
    graph, _ = kernels.captured(lambda i: call(), LAUNCHES)
    clock = kernels.Clock()
    return statistics.median(clock.us(graph.replay) / LAUNCHES for _ in range(rounds))


def main() -> None:
    parser = options.parser(__doc__, rounds=50, out="")
    parser.add_argument("--tokens", default="500,8000,32000")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--page-size", type=int, default=64)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, page {args.page_size}")
    print("rows,tokens,ranges_us,truth_us,copy_us")
    for rows in map(int, args.rows.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            lists, truth, pool = served(rows, tokens, args.page_size)
            trap, copy = TrapBuffer(torch.device("cuda")), torch.empty_like(lists.indices)
            mailbox = trap.new_mailbox()

            def guard(
                truth: Truth | None,
                lists: TokenLists = lists,
                trap: TrapBuffer = trap,
                mailbox: int = mailbox,
                pool: int = pool,
            ) -> None:
                token_guard.launch(lists, trap, mailbox, pool, args.page_size, truth)

            times = [
                microseconds(lambda guard=guard: guard(None), args.rounds),
                microseconds(lambda guard=guard, truth=truth: guard(truth), args.rounds),
                microseconds(lambda copy=copy, lists=lists: copy.copy_(lists.indices), args.rounds),
            ]
            assert not trap.tripped, trap.take()
            print(f"{rows},{tokens},{','.join(f'{t:.1f}' for t in times)}", flush=True)


if __name__ == "__main__":
    main()
