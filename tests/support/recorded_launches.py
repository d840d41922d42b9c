"""Run by test_launching.py: compares what a Launcher launches with what Triton does.

The driver is a stand-in, because there need be no GPU: it compiles for sm90, and keeps what it is
given instead of launching it.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

launched: list[tuple[Any, ...]] = []


class Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return (1, hash(kernel), 10, 0, 1024)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Recorded:
    """In the place of the C function that launches."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any,
        enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        values = [(a.data_ptr(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        launched.append((x, y, z, stream, function, *values))


class Driver:
    utils, launcher_cls = Utils(), Recorded

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    driver.set_active(Driver())
    from g4debug.ledger import shadow

    pages = torch.zeros(101, dtype=torch.int32)
    tokens = torch.arange(5000)
    cases = [
        (indices, swa, size, value, flags)
        for indices in (tokens, tokens[1:2], tokens[3:4000].to(torch.int32))
        for swa in (None, tokens)
        for size, value in ((64, 0), (1, 1), (2**31, 3))  # the last one is a number of 64 bits
        for flags in ((True, False), (False, True))
    ]
    for launch in (shadow._launch, None, shadow._launch):
        for indices, swa, size, value, flags in cases:
            tensors = (pages, indices, indices if swa is None else swa)
            numbers = (indices.numel(), size, 100, value)
            constants = (swa is not None, *flags, shadow.BLOCK)
            grid = (-(-indices.numel() // shadow.BLOCK), 1, 1)
            if launch is None:
                shadow._mark_kernel[grid](*tensors, *numbers, *constants)
            else:
                launch(grid, tensors, numbers, constants)
    count = len(cases)
    assert len(launched) == 3 * count
    first, triton_itself, later = (launched[i * count :][:count] for i in range(3))
    assert first == triton_itself
    assert later == triton_itself
    assert len({launch[4] for launch in launched}) > 4  # several compiled kernels
    assert shadow._launch._compiled, "no launch was shortened, so nothing was compared"
    print("the launches are the same")


if __name__ == "__main__":
    main()
