"""The arrays of a dump: torch reads what we write, and we read what torch writes, bit for bit."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_dumps import by_torch, repack, saved
from hypothesis import given
from hypothesis import strategies as st
from record_strategies import INT64, records, same
from sample_trap import sample_record

from g4debug.dumps import check, pickling, reading, writing
from g4debug.dumps.errors import DumpError, RefusedError
from g4debug.dumps.plain import to_plain

pytestmark = pytest.mark.once("reading a dump does not import SGLang")

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((ROOT / "tests").rglob("*.pt"))


def can_be_saved(dtype: torch.dtype) -> bool:
    """torch has names of dtypes of which it can make no tensor, or which it cannot save."""
    try:
        saved(torch.empty(2, dtype=dtype))
    except (RuntimeError, NotImplementedError, KeyError):
        return False
    return True


DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and can_be_saved(d)}
    - {torch.int64},
    key=str,
)


def built(data: bytes) -> dict[str, Any]:
    """The values of an archive, by our reader."""
    archive = reading.Archive(io.BytesIO(data), len(data))
    return check.build(archive.read("data.pkl"), reading._Tensors(archive), 0)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of int64 numbers: of any shape, transposed, with steps, offset, or empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    whole = torch.tensor(draw(st.lists(INT64, min_size=count, max_size=count)), dtype=torch.int64)
    view = whole.reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    for dim in range(view.dim()):
        start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        view = view[(slice(None),) * dim + (slice(start, None, step),)]
    return view


@given(st.lists(views(), max_size=3))
def test_we_read_the_tensors_that_torch_writes(tensors: list[torch.Tensor]) -> None:
    data = saved({"a": tensors, "b": "text"})
    assert same(built(data), by_torch(data))


@given(st.lists(views(), max_size=3), st.data())
def test_torch_reads_the_arrays_that_we_write(tensors: list[torch.Tensor], data: Any) -> None:
    values = {"a": [t.numpy() for t in tensors], "b": data.draw(st.text()), "c": [None, 1 << 70]}
    pickled, arrays = pickling.pickled(values)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for number, content in enumerate(arrays):
            archive.writestr(f"archive/data/{number}", content)
    assert same(built(out.getvalue()), values)
    if all(0 not in t.shape for t in tensors):  # torch has a stride of 1 where we have 0
        assert same(by_torch(out.getvalue()), values)


@given(records)
def test_torch_reads_every_dump_that_we_write(record: Any) -> None:
    data = writing.encode(record)
    assert same(by_torch(data), to_plain(record))
    assert same(built(data), to_plain(record))


@pytest.mark.parametrize("path", RECORDED, ids=[p.name for p in RECORDED])
def test_a_dump_that_torch_wrote_is_read_as_torch_reads_it(path: Path) -> None:
    data = path.read_bytes()
    assert same(built(data), by_torch(data))


def test_there_are_such_dumps() -> None:
    assert len(RECORDED) > 5
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.int32} < set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """No dump has one. It is refused in a line, also where numpy does not know it."""
    payload = to_plain(sample_record())
    payload["table"]["values"] = torch.empty(8, 16, dtype=dtype)
    path = tmp_path / "x.pt"
    path.write_bytes(saved(payload))
    with pytest.raises(DumpError) as e:
        reading.read(path)
    assert "\n" not in str(e.value)


COUNT = 12
NUMBERS = st.integers(-2, COUNT + 2) | st.sampled_from(
    [1 << 31, 1 << 40, 1 << 62, 1 << 70, -(1 << 63)]
)


@given(NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4), NUMBERS)
def test_no_claim_reaches_beyond_what_is_stored(
    offset: int, sides: list[tuple[int, int]], claimed: int
) -> None:
    """Whatever a file says of a tensor: it is as torch says, or refused."""
    shape, strides = (tuple(side[at] for side in sides) for at in (0, 1))
    whole = np.arange(COUNT, dtype=np.int64)
    good, _ = pickling.pickled({"a": whole})
    honest = pickling._tensor("0", whole.shape)
    assert good.count(honest) == 1
    ours = pickling._call("0", claimed, offset, shape, strides)
    data = repack(
        saved({"a": whole}), lambda r: r.update({"archive/data.pkl": good.replace(honest, ours)})
    )
    try:
        found = built(data)["a"]
    except RefusedError:  # in one line: `test_hostile_file`
        return
    assert claimed == COUNT
    expected = torch.as_strided(torch.arange(COUNT), shape, strides, offset)
    assert np.array_equal(found, expected.numpy())
    assert found.shape == shape
