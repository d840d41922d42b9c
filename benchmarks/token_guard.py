"""Measures the guard of token lists (attention backend triton) on a GPU, in a CUDA graph.

    python benchmarks/token_guard.py [--tokens 500,8000,32000] [--rows 1,8,64] [--page-size 64]

A decode's list is as long as the context, so the guard's cost grows with it. Each figure is the
median over replays of a graph with 20 launches, in microseconds for one launch: of the guard with
ranges only, with the truth (``req_to_token``, shadow, owners), and of a plain copy of the list,
which is the least that reading it can cost. A forward has two lists, one for the full and one for
the sliding layers; the second one is as long as the window.
"""

from __future__ import annotations

import functools
import statistics

import torch
from guard_time import HERE, Case, graph_of, load
from measuring import options


def main() -> None:
    parser = options.parser(__doc__, rounds=50, out="")
    parser.add_argument("--tokens", default="500,8000,32000")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--page-size", type=int, default=64)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, page {args.page_size}")
    print("rows,tokens,ranges_us,truth_us,copy_us")
    device, tree = torch.device("cuda"), load(HERE)
    for rows in map(int, args.rows.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            case = Case(rows, tokens, device, args.page_size)
            lists, truth = case.lists(tree), case.truth(tree, swa=False, by_snapshot=False)
            trap, copy = tree.TrapBuffer(device), torch.empty_like(lists.indices)
            guard = functools.partial(
                tree.token_guard.launch, lists, trap, trap.new_mailbox(),
                case.pages * args.page_size, args.page_size,
            )  # fmt: skip
            measures = [
                graph_of(functools.partial(guard, None)),
                graph_of(functools.partial(guard, truth)),
                graph_of(functools.partial(copy.copy_, lists.indices)),
            ]
            times = [statistics.median(us() for _ in range(args.rounds)) for us in measures]
            assert not trap.tripped, trap.take()
            print(f"{rows},{tokens},{','.join(f'{t:.1f}' for t in times)}", flush=True)


if __name__ == "__main__":
    main()
