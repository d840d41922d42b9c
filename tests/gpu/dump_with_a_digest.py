"""Driven by test_page_digests_gpu.py: a CUDA error while a digest of the pages is on its way.

``dump_with_a_digest.py``: the context dies of a real illegal access. Prints what the digest says
then. The allocator stands in.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from g4debug.tracers.flight_recorder.page_digests import PageDigests


@triton.jit
def read_far_away(memory, out):
    tl.store(out, tl.load(memory + (1 << 40)))


def main() -> None:
    pages = torch.arange(1, 400, device="cuda")
    allocator = SimpleNamespace(free_pages=pages, full_to_swa_index_mapping=pages.clone())
    digests = PageDigests()
    digests.look(allocator, 1)
    torch.cuda.synchronize()
    taken = digests.take()
    assert taken is not None
    print("before:", taken[0], taken[1] != 0, flush=True)
    digests.look(allocator, 2)
    read_far_away[(1,)](pages, torch.zeros(1, dtype=torch.int64, device="cuda"))
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("error:", str(error).splitlines()[0], flush=True)
    print("after:", digests.take(), flush=True)


if __name__ == "__main__":
    main()
