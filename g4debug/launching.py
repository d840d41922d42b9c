"""Launches small Triton kernels with as little work on the host as there can be.

Triton looks at every argument of every launch: its type, whether a number is 1, whether a pointer
is aligned. For a kernel with 30 arguments this takes several times as long as the launch itself, in
the middle of a server's step. So a kernel of ours declares that none of this matters to it
(:func:`kernel`). Then only the types of its tensors and its constants decide which compiled kernel
runs, and a :class:`Launcher` remembers that one. It also means that no other alignment of a tensor
makes Triton compile again while a server is serving.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton

Grid = tuple[int, int, int]
_MOST = 2**31  # Triton passes a number below this as 32 bits, and any other as 64


def kernel(tensors: int, numbers: int) -> Callable[[Callable[..., Any]], Any]:
    """Make a Triton kernel of a function with its parameters in this order.

    tensors: how many are tensors. numbers: how many after these are integers. All others are
    ``tl.constexpr``.
    """

    def made(function: Callable[..., Any]) -> Any:
        names = list(inspect.signature(function).parameters)
        return triton.jit(
            function,
            do_not_specialize=names[tensors : tensors + numbers],
            do_not_specialize_on_alignment=names[:tensors],
        )

    return made


class Launcher:
    """Launches one kernel that was made by :func:`kernel`.

    options: of Triton, such as ``num_warps``.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self.function = function
        self.options = options
        # (device, constants, types of the tensors) -> the compiled kernel, and the constants that
        # the kernel itself gives a value.
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch it on the current stream, without waiting for it.

        constants: the values of its first ``tl.constexpr`` parameters; the others have defaults.
        """
        key = (tensors[0].get_device(), constants, *[t.dtype for t in tensors])
        known = self._compiled.get(key)
        if known is not None and max(numbers) < _MOST and min(numbers) >= -_MOST:
            compiled, defaults = known
            compiled[grid](*tensors, *numbers, *constants, *defaults)
            return
        compiled = self.function[grid](*tensors, *numbers, *constants, **self.options)
        # Triton's interpreter compiles nothing. Neither does anybody who compiles later.
        if type(compiled).__name__ == "CompiledKernel" and known is None:
            parameters = self.function.params[len(tensors) + len(numbers) + len(constants) :]
            self._compiled[key] = compiled, tuple(p.default for p in parameters)
