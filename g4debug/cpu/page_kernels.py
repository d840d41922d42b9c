"""SGLang's kernels that only move page numbers, in torch: the same results, in a tenth of the time.

The CPU engine runs SGLang's Triton kernels in Triton's interpreter, which takes half of a replay.
Here are those that take most of it. `install` is for replays only: everything else runs SGLang's
own code. Each of them is compared with the interpreter in tests/cpu/test_page_kernels.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

Given = Mapping[str, Any]  # a kernel's arguments, by SGLang's names


def page_tables(given: Given) -> None:
    """Each row's pages: ``page_table[b, k] = slot of token k * PAGE_SIZE // PAGE_SIZE``.

    And the same of the SWA slots, if there are any. req_to_token: int32 [rows, tokens]; the tables:
    int32 [requests, pages]. Integers are divided as C does.
    """
    page, table = given["PAGE_SIZE"], given["page_table_ptr"]
    rows, lens = given["req_pool_indices_ptr"].tolist(), given["seq_lens_ptr"].tolist()
    for request, (row, tokens) in enumerate(zip(rows, lens, strict=True)):
        slots = given["req_to_token_ptr"][row, 0 : max(0, tokens) : page]
        table[request, : len(slots)] = _pages(slots, page, table)
        if given["HAS_SWA"]:
            mapping = given["full_to_swa_ptr"]
            slots = slots.long()
            if "full_to_swa_numel" in given:  # not in 0.5.15
                slots = slots.clamp(0, given["full_to_swa_numel"] - 1)
            swa = mapping[slots]
            swa_table = given["swa_page_table_ptr"]
            swa_table[request, : len(slots)] = _pages(swa, page, swa_table)


def _pages(slots: torch.Tensor, page: int, table: torch.Tensor) -> torch.Tensor:
    return torch.div(slots, page, rounding_mode="trunc").to(table.dtype)


def gather_rows(given: Given) -> None:
    """Rows ``idx`` of three or four buffers: ``d = s[idx]``."""
    index = given["idx_ptr"].long()
    for n in range(4 if given["HAS3"] else 3):
        given[f"d{n}"].copy_(given[f"s{n}"][index])


def extend(given: Given) -> None:
    """Slots for tokens ``pre_lens[b]`` to ``seq_lens[b]``: the rest of a page, then new pages."""
    page, free, out = given["page_size"], given["free_page_ptr"], given["out_indices"]
    within = torch.arange(page, dtype=out.dtype)
    at = taken = 0
    pre_lens, seq_lens = given["pre_lens_ptr"].tolist(), given["seq_lens_ptr"].tolist()
    last = given["last_loc_ptr"].tolist()
    for before, after, location in zip(pre_lens, seq_lens, last, strict=True):
        rest = min(after, -(-before // page) * page) - before
        out[at : at + rest] = location + 1 + within[:rest]
        count = -(-after // page) - -(-before // page)
        pages = _some(free, taken, count).to(out.dtype)
        slots = (pages[:, None] * page + within).view(-1)[: after - before - rest]
        out[at + rest : at + after - before] = slots
        at += after - before
        taken += count


def decode(given: Given) -> None:
    """A slot for one more token of each request: in its page, or the first one of a new page."""
    page, free, out = given["page_size"], given["free_page_ptr"], given["out_indices"]
    lens, last = given["seq_lens_ptr"].tolist(), given["last_loc_ptr"].tolist()
    new = [(n - 1) % page == 0 for n in lens]
    pages = iter(_some(free, 0, sum(new)).tolist())
    slots = [
        next(pages) * page if fresh else location + 1
        for fresh, location in zip(new, last, strict=True)
    ]
    out.copy_(torch.tensor(slots, dtype=out.dtype))


def _some(free: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Pages of the free list. SGLang looks only later if there are so many: page 0 for the rest."""
    found = free[first : first + count]
    return torch.cat([found, found.new_zeros(count - len(found))])


class InTorch:
    """Stands where SGLang says ``kernel[grid](...)``."""

    def __init__(self, kernel: Any, function: Callable[[Given], None]) -> None:
        self.kernel, self.function = kernel, function
        self.names = tuple(kernel.arg_names)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._run

    def _run(self, *args: Any, **kwargs: Any) -> None:
        self.function({**dict(zip(self.names, args, strict=False)), **kwargs})


_OPS, _SRT = "sglang.kernels.ops", "sglang.srt"
# Where each is in some release. What a release does not have, or has elsewhere, is left alone.
PLACES = (
    (f"{_OPS}.attention.trtllm_mha_page_table", "create_trtllm_mha_kv_indices_triton", page_tables),
    (
        f"{_SRT}.layers.attention.triton_ops.trtllm_mha_page_table",
        "create_trtllm_mha_kv_indices_triton",
        page_tables,
    ),
    (f"{_OPS}.speculative.gather_spec_extras", "_gather_rows_kernel", gather_rows),
    (f"{_SRT}.speculative.triton_ops.gather_spec_extras", "_gather_rows_kernel", gather_rows),
    (f"{_SRT}.mem_cache.allocator", "alloc_extend_kernel", extend),
    (f"{_SRT}.mem_cache.allocator", "alloc_decode_kernel", decode),
    (f"{_SRT}.mem_cache.allocator.paged", "alloc_extend_kernel", extend),
    (f"{_SRT}.mem_cache.allocator.paged", "alloc_decode_kernel", decode),
)


def found() -> dict[str, tuple[Any, str, Callable[[Given], None]]]:
    """``module:name`` -> the module, the name and the function, of what this SGLang has."""
    here: dict[str, tuple[Any, str, Callable[[Given], None]]] = {}
    for name, attribute, function in PLACES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(getattr(module, attribute, None), "arg_names"):
            here[f"{name}:{attribute}"] = module, attribute, function
    return here


def install() -> tuple[str, ...]:
    """Put them in SGLang's place in this process. Returns where."""
    places = found()
    for module, attribute, function in places.values():
        setattr(module, attribute, InTorch(getattr(module, attribute), function))
    return tuple(places)
