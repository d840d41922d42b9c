"""Checks a file before torch opens it: is it a whole dump, and as large as it claims to be?

``torch.load(weights_only=True)`` runs no code from the file, but it believes what the file says.
A tensor may claim more bytes than the file has, and torch then reads past its buffer. Nested
tuples may take forever to hash. One list may be repeated a million times. So the zip is checked
first: it must be uncompressed and small, and every checksum must be right. Then the pickle in it
is walked, opcode by opcode, with stand-ins for the objects. Only what g4debug writes passes. This
module does not import torch.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KIND = "g4debug-dump"  # the same as in record.py, which imports torch

MAX_RECORDS = 64
MAX_PICKLE_BYTES = 32 << 20
MAX_VALUES = 4_000_000  # values in a dump; what is repeated counts each time

MAX_BITS = 256  # of a number; a larger one could not be divided

LONGS = "torch LongStorage"
LONG_SIZE = 8  # bytes
REBUILD = "torch._utils _rebuild_tensor_v2"
HOOKS = "collections OrderedDict"
GLOBALS = {LONGS, REBUILD, HOOKS}
# These names are in any torch checkpoint and are harmless: such a file is no dump, but no attack.
CHECKPOINT = re.compile(r"torch \w+Storage|torch\._utils _rebuild_\w+|torch (b?float|u?int)\d+")
NO_DUMP = "a torch file, but not a g4debug dump"

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_EMPTY = {"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"}
_CODE = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}


class DamagedError(Exception):
    """The file is not an intact dump. The text says what is wrong."""


class NotADumpError(Exception):
    """The file may be intact, but it is not a dump. The text says what it is."""


class NewerError(Exception):
    """The dump has a newer schema. The text is the schema's number."""


class CodeError(Exception):
    """The file contains something that would run code or build an object."""


@dataclass(eq=False)
class _Thing:
    """A stand-in for an object: what it is, how many values it has, and if it may still grow."""

    what: str
    value: Any = None
    weight: int = 1
    closed: bool = False


_MARK = _Thing("mark")


def open_archive(data: bytes) -> dict[str, bytes]:
    """The records of an uncompressed zip, by name, without the top folder.

    Raises NotADumpError if the zip is compressed or has no ``data.pkl``. (torch compresses
    nothing, and in a small compressed file a huge tensor could hide.) Raises DamagedError if it is
    no zip, or a checksum is wrong.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_RECORDS:
                raise DamagedError(f"{len(entries)} records, at most {MAX_RECORDS} expected")
            if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
                raise NotADumpError("a compressed zip file; a dump is not compressed")
            if sum(e.file_size for e in entries) > len(data):
                raise DamagedError("claims to hold more bytes than the file has")
            records = {e.filename.partition("/")[2]: archive.read(e) for e in entries}
    except (DamagedError, NotADumpError):
        raise
    except Exception as e:  # zipfile raises many types for a damaged file, and none can be mended
        text = str(e) or type(e).__name__
        missing = text == "File is not a zip file"  # but it begins like one
        raise DamagedError("its zip directory is missing" if missing else text) from e
    if "data.pkl" not in records:
        raise NotADumpError("a zip file, but not made by torch.save (it has no data.pkl)")
    return records


def pack(records: Mapping[str, bytes]) -> io.BytesIO:
    """The checked records as a new archive, so that torch reads these and no others."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"dump/{name}", data)
    out.seek(0)
    return out


def check_pickle(records: Mapping[str, bytes], schema: int) -> None:
    """Walk ``data.pkl`` without building anything.

    Raises

    * CodeError for a global, an object or a call that no dump has;
    * NewerError if the schema is above ``schema``, because the rest is then unknown;
    * NotADumpError for another kind of torch file;
    * DamagedError for everything else that g4debug does not write: tensors that reach beyond
      their storage, storages that reach beyond their record, keys that are no text, more than
      MAX_VALUES values.
    """
    data = records["data.pkl"]
    if len(data) > MAX_PICKLE_BYTES:
        raise DamagedError(f"its values take {len(data) >> 20} MiB, more than any dump")
    try:
        # Look for code first, in the whole file, because that is the most important thing to say.
        found = _scan(data)
        if found > schema:
            raise NewerError(str(found))
        _Walk(records).run(data)
    except (ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError) as e:
        raise DamagedError(f"its values cannot be read: {e}") from e


def _scan(data: bytes) -> int:
    """Raise CodeError if the pickle would run anything. Returns its schema, -1 if it has none."""
    key, schema, is_dump = "", -1, False
    for op, arg, _ in _opcodes(data):
        known = op.name != "GLOBAL" or arg in GLOBALS or CHECKPOINT.fullmatch(str(arg))
        if op.name in _CODE or not known:
            raise CodeError(str(arg or op.name))
        if op.name in ("BINPUT", "LONG_BINPUT"):
            continue  # between a key and its value
        if key == "schema" and op.name in ("BININT", "BININT1", "BININT2") and arg is not None:
            schema = int(arg)
        key = arg if isinstance(arg, str) else ""
        is_dump = is_dump or key == KIND
    return schema if is_dump else -1


def _opcodes(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    with warnings.catch_warnings():  # Python warns about escapes in a damaged text
        warnings.simplefilter("ignore")
        yield from pickletools.genops(data)


class _Walk:
    """Goes through the opcodes with a stack of stand-ins, as unpickling would."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self.records = records
        self.stack: list[_Thing] = []
        self.memo: dict[int, _Thing] = {}

    def run(self, data: bytes) -> None:
        for op, arg, _ in _opcodes(data):
            self._step(op.name, arg)
        if len(self.stack) != 1 or self.stack[0].what != "EMPTY_DICT":
            raise NotADumpError(NO_DUMP)

    def _step(self, name: str, arg: Any) -> None:
        push, stack = self.stack.append, self.stack
        if name == "LONG1" and arg.bit_length() > MAX_BITS:
            raise DamagedError("a number is longer than any in a dump")
        if name in _LITERALS:
            push(_Thing("text" if isinstance(arg, str) else "number", arg))
        elif name in _CONSTANTS:
            push(_Thing("constant", _CONSTANTS[name]))
        elif name in _EMPTY:
            push(_Thing(name, ()))
        elif name == "MARK":
            push(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            push(self.memo[arg])
        elif name == "GLOBAL":
            if arg not in GLOBALS:
                raise NotADumpError(NO_DUMP)
            push(_Thing("global", arg))
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            items = self._pop_mark() if name == "TUPLE" else self._pop(int(name[-1]))
            push(_Thing("tuple", tuple(items), self._weigh(1, items), closed=True))
        elif name in ("APPEND", "APPENDS"):
            self._grow("EMPTY_LIST", self._pop(1) if name == "APPEND" else self._pop_mark())
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._pop_mark()
            if any(k.what != "text" for k in items[::2]) or len(items) % 2:
                raise DamagedError("a key is not a text")
            self._grow("EMPTY_DICT", items)
        elif name == "BINPERSID":
            push(self._storage(stack.pop()))
        elif name == "REDUCE":
            push(self._call(*self._pop(2)))
        elif name == "BUILD":
            raise NotADumpError(NO_DUMP)
        elif name not in ("PROTO", "STOP"):
            raise DamagedError(f"opcode {name}, which no dump has")

    def _pop(self, count: int) -> list[_Thing]:
        items = self.stack[-count:]
        if len(items) < count or _MARK in items:
            raise DamagedError("its values end too early")
        del self.stack[-count:]
        return items

    def _pop_mark(self) -> list[_Thing]:
        items: list[_Thing] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _grow(self, what: str, items: list[_Thing]) -> None:
        target = self.stack[-1]
        # A closed object is part of another one already, whose weight could not be corrected.
        if target.what != what or target.closed:
            raise DamagedError("a list or mapping is filled out of order")
        target.weight = self._weigh(target.weight, items)

    def _weigh(self, weight: int, items: list[_Thing]) -> int:
        for item in items:
            item.closed = True
            weight += item.weight
        if weight > MAX_VALUES:
            raise DamagedError(f"it has more than {MAX_VALUES} values")
        return weight

    def _storage(self, at: _Thing) -> _Thing:
        kind, dtype, key, device, count = (t.value for t in at.value)
        if kind != "storage" or device != "cpu" or dtype != LONGS:
            raise DamagedError("a tensor is not int64 on the CPU")
        size = len(self.records[f"data/{key}"])
        if type(count) is not int or count < 0 or count * LONG_SIZE != size:
            raise DamagedError(f"a tensor claims {count} elements, but its data has {size} bytes")
        return _Thing("storage", count)

    def _call(self, function: _Thing, arguments: _Thing) -> _Thing:
        if function.what == "global" and function.value == HOOKS and arguments.value == ():
            return _Thing("hooks", closed=True)
        if function.what != "global" or function.value != REBUILD:
            raise CodeError(str(function.value))
        storage, offset, size, stride, grad, hooks = arguments.value
        shape = [t.value for t in size.value]
        strides = [t.value for t in stride.value]
        numbers = [offset.value, *shape, *strides]
        if storage.what != "storage" or hooks.what != "hooks" or grad.value is not False:
            raise DamagedError("a tensor has an unknown form")
        if any(type(n) is not int or n < 0 for n in numbers) or len(shape) != len(strides):
            raise DamagedError("the shape of a tensor is no shape")
        count = math.prod(shape)
        last = offset.value + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        # With stride 0, a small file could make a huge tensor: more elements than are stored.
        if count > storage.value or max(shape, default=0) >= 1 << 31:
            raise DamagedError(
                f"a tensor of shape {shape} has only {storage.value} stored elements"
            )
        if count and last >= storage.value:
            raise DamagedError(f"a tensor of shape {shape} reaches past its stored elements")
        return _Thing("tensor", closed=True)
