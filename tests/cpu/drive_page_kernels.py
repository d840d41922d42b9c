"""Driven by test_page_kernels.py: kernels that move pages, SGLang's and those in torch.

``drive_page_kernels.py ROUNDS``
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from typing import Any


def given_for(function: str, dice: random.Random) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Random arguments in SGLang's order, keywords, and the first dimension of the grid."""
    import torch

    def numbers(low: int, high: int, *shape: int, dtype: Any = torch.int64) -> torch.Tensor:
        count = 1
        for n in shape:
            count *= n
        drawn = [dice.randint(low, high) for _ in range(count)]
        return torch.tensor(drawn, dtype=dtype).view(shape)

    requests, page = dice.randint(1, 5), dice.choice([16, 64])
    if function == "page_tables":
        tokens, pool = 9 * page, 64 * page
        lens = [0, *(dice.randint(0, tokens) for _ in range(requests))]
        rows = numbers(0, 7, len(lens))
        slots = numbers(-1 if dice.random() < 0.3 else 0, pool, 8, tokens, dtype=torch.int32)
        swa = dice.random() < 0.7
        mapping = numbers(-1, pool, pool) if swa else None
        table = numbers(7, 7, len(lens), 11, dtype=torch.int32)
        return (
            (slots, rows, torch.tensor(lens, dtype=torch.int32), mapping, table,
             table.clone() if swa else None),
            {"PAGE_SIZE": page, "HAS_SWA": swa, "numel": pool if swa else 0},
            len(lens),
        )  # fmt: skip
    if function == "gather_rows":
        widths = [dice.randint(1, 6) for _ in range(4)]
        index = numbers(0, 8, requests)
        args: list[Any] = [index]
        for width in widths:
            args += [numbers(0, 99, 9, width), numbers(5, 5, requests, width), width]
        return tuple(args), {"HAS3": dice.random() < 0.5, "BLOCK": 8}, requests
    lens = [dice.randint(0, 5 * page) for _ in range(requests)]
    free = numbers(1, 99, 60)
    if function == "extend":
        after = [n + dice.randint(0, 4 * page) for n in lens]
        out = numbers(0, 0, sum(after) - sum(lens))
        last = torch.tensor([n - 1 + page * dice.randint(1, 9) for n in lens])
        args = [torch.tensor(lens), torch.tensor(after), last, free, out]
    else:
        out = numbers(0, 0, requests)
        args = [torch.tensor([n + 1 for n in lens]), numbers(1, 999, requests), free, out]
    return tuple(args), {"bs_upper": 8, "page_size": page}, requests


def compare(kernel: Any, function: Any, dice: random.Random) -> None:
    import torch

    from g4debug.cpu.page_kernels import InTorch

    args, keywords, first = given_for(function.__name__, dice)
    second = 1
    if function.__name__ == "page_tables":
        slots, rows, lens, mapping, table, swa_table = args
        has_numel = "full_to_swa_numel" in kernel.arg_names
        if not has_numel:  # nor does it look at what is no slot
            slots.clamp_(0, 64 * 16 - 1)
        more = (keywords.pop("numel"),) if has_numel else ()
        strides = slots.stride(0), table.stride(0)
        args = (slots, rows, lens, mapping, table, swa_table, *more, *strides)
        second = 3
        if not has_numel:
            keywords.pop("numel")
    mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    kernel[(first, second)](*args, **keywords)
    InTorch(kernel, function)[(first, second)](*mine, **keywords)
    for a, b in zip(args, mine, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), (function.__name__, a, b)


def main() -> None:
    from g4debug import cpu

    cpu.prepare()
    rounds = int(sys.argv[1])
    importlib.import_module("sglang.srt.managers.scheduler")
    from g4debug.cpu.page_kernels import found

    dice, compared = random.Random(3), {}
    for place, (module, attribute, function) in found().items():
        for _ in range(rounds):
            compare(getattr(module, attribute), function, dice)
        compared[place] = rounds
    print("RESULT", json.dumps({"compared": compared}), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
