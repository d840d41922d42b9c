"""Reads the lines that CUDA prints about assertions that failed in kernels. Imports no SGLang.

Each thread with a failed assertion prints a line, thousands of threads the same one::

    /pytorch/aten/src/ATen/native/cuda/Indexing.cu:1141: indexSelectLargeIndex: block: [3,0,0],
    thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.

The form is in NVIDIA's CUDA C++ Programming Guide, section "Assertion". Which lookup a file and a
kernel belong to is read off PyTorch's sources (``aten/src/ATen/native/cuda``). An embedding is an
``index_select`` there, and in newer releases a large ``index_select`` is a ``gather``.
``torch.compile`` makes Triton kernels. Their assertions do not name the lookup, but the size of the
table: ``index out of bounds: 0 <= tmp4 < 32000``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Literal

from g4debug.findings.record import DeviceAssert

# embedding: torch.nn.functional.embedding, index_select. index: tensor[index], tensor[index] = x.
# gather: torch.gather, and scatter.
Sort = Literal["embedding", "index", "gather"]
WORDS: dict[str, str] = {
    "embedding": "an embedding or index_select",
    "index": "tensor[index]",
    "gather": "a gather or scatter",
}
MOST = 16  # different assertions that are kept
TEXT = 200  # characters that are kept of an expression or of a kernel's name
NUMBER = r"-?\d+"
TRIPLE = rf"\[({NUMBER},{NUMBER},{NUMBER})\]"
LINE = re.compile(
    r"(?<![^\s:`])(?P<file>[^\s:`]{1,500}):(?P<line>\d{1,9}):"
    r"(?: (?P<function>[^\n`]{0,2000}?):)? "
    rf"block: {TRIPLE}, thread: {TRIPLE}\s"
    r"Assertion `(?P<expression>[^\n]{0,2000}?)` failed\."
)
# The kind of lookup in each of PyTorch's files.
FILES: dict[str, tuple[Sort, ...]] = {
    "Indexing.cu": ("embedding",),
    "IndexKernel.cu": ("index",),
    # The fast way of index_select, tensor[index] and gather, where rows are long and aligned.
    "IndexKernelUtils.cu": ("embedding", "index", "gather"),
    "ScatterGatherKernel.cu": ("embedding", "gather"),  # an index_select of many rows is a gather
}
ANY: tuple[Sort, ...] = ("embedding", "index", "gather")
SELECTS = re.compile(r"indexSelect|srcSelectDimSize")
BOUND = re.compile(r"index out of bounds: 0 <= .* < (\d{1,18})$")
OF_AN_INDEX = re.compile(r"out of bounds|\b(?:src|dst)?(?:index|ind|idx)\w*\b.*<", re.I)


def parse(text: str) -> tuple[DeviceAssert, ...]:
    """The different assertions, in the order of their first lines. At most MOST of them.

    Two lines are the same if they differ in nothing but block and thread.
    """
    found: dict[tuple[str, str, int, str], DeviceAssert] = {}
    if not any_in(text):
        return ()
    for match in LINE.finditer(text):
        expression = match["expression"].strip()[:TEXT]
        file, line = _file(match["file"]), int(match["line"])
        function = (match["function"] or "").strip()[:TEXT]
        key = (expression, file, line, function)
        if key in found:
            found[key] = replace(found[key], count=found[key].count + 1)
        elif len(found) < MOST:
            found[key] = DeviceAssert(
                expression, file, line, function, block=match[4], thread=match[5]
            )
    return tuple(found.values())


def any_in(text: str) -> bool:
    """True if the text may have such a line."""
    return "Assertion " in text


def _file(path: str) -> str:
    """The end of a path, because its beginning may name a person."""
    # A folder above the packages is the user's, and may be called like one of them.
    installed = re.split(r"(?:site|dist)-packages/", path.replace("\\", "/"))[-1]
    parts = PurePosixPath(installed).parts
    for package in ("ATen", "sglang", "flashinfer"):
        if package in parts[:-1]:
            return "/".join(parts[parts.index(package) :])[-TEXT:]
    return parts[-1][-TEXT:] if parts else path[-TEXT:]


def sorts(found: DeviceAssert) -> tuple[Sort, ...]:
    """Which sorts of lookups this assertion belongs to. () if it is not about an index."""
    name = PurePosixPath(found.file).name
    if name == "Indexing.cu" and not SELECTS.search(f"{found.function} {found.expression}"):
        return ()  # index_add and index_fill, which are no lookups
    if name in FILES:
        return FILES[name]
    return ANY if about_an_index(found) else ()


def about_an_index(found: DeviceAssert) -> bool:
    """True if the expression compares an index with a bound."""
    return bool(OF_AN_INDEX.search(found.expression))


def bound(found: DeviceAssert) -> int:
    """How many rows the table has, as the assertion says. -1 if it does not say that."""
    match = BOUND.search(found.expression)
    return int(match[1]) if match else -1


def place(found: DeviceAssert) -> str:
    """For example ``Indexing.cu:1141 indexSelectLargeIndex``."""
    where = f"{PurePosixPath(found.file).name}:{found.line}"
    named = found.function not in ("", "unknown")
    return f"{where} {found.function[:60]}" if named else where


def total(found: Sequence[DeviceAssert]) -> int:
    """How many threads printed them."""
    return sum(one.count for one in found)
