"""Builds the values of a dump from its pickle, and refuses what g4debug does not write.

Unpickling runs whatever a file asks for. ``torch.load(weights_only=True)`` does not, but it
believes what the file says: a tensor may claim more bytes than the file has, one list may be
repeated a million times, nested tuples may take forever to hash, and 32 MB of opcodes may become
4 GB of objects. So this module has a small reader of its own, in the manner of a pickle virtual
machine (Python's ``pickletools`` describes it): it knows only the opcodes that ``torch.save`` uses
for plain values and int64 tensors. It calls nothing that the file names. The size of a value is
counted when it is pushed, so that a file is refused before it takes long or needs much memory. This
module does not import numpy.
"""

from __future__ import annotations

import itertools
import math
import pickletools
import re
import struct
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from g4debug.dumps.errors import CodeError, DamagedError, NewerError, NotADumpError

KIND = "g4debug-dump"  # the same as in record.py, which imports numpy

MAX_PICKLE_BYTES = 16 << 20
MAX_OPCODES = 2_000_000
MAX_WEIGHT = 96 << 20  # bytes of all texts, lists, mappings and tensors; what is repeated counts
MAX_DEPTH = 32
MAX_NUMBER_BYTES = 32  # a larger number could not be divided
MAX_SCANNED = 100_000  # opcodes of a refused file in which we look for code
TEXT_BYTES, LIST_BYTES, DICT_BYTES, PAIRS_BYTES, PAIR_BYTES = 60, 80, 80, 200, 60

LONG_SIZE = 8  # bytes
LONGS = b"torch\nLongStorage"
REBUILD = b"torch._utils\n_rebuild_tensor_v2"
HOOKS = b"collections\nOrderedDict"
# These names are in any torch checkpoint and are harmless: such a file is no dump, but no attack.
CHECKPOINT = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_\w+|torch (b?float|u?int)\d+|collections OrderedDict"
)
NO_DUMP = "a torch file, but not a g4debug dump"
TOO_MUCH = "it has more values than any dump"

_CODE = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}


class Storages(Protocol):
    """The records of a dump that hold tensors."""

    def size(self, key: str) -> int:
        """Bytes of a tensor's record. Raises DamagedError if there is none."""

    def tensor(self, key: str, offset: int, shape: list[int], strides: list[int]) -> Any:
        """An int64 array over a record. offset, strides: in elements, as torch counts them."""


class Sizes:
    """The records of tensors that are only checked: their sizes are real, each tensor is None.

    sizes: the bytes of each record, by its key.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def size(self, key: str) -> int:
        if key not in self._sizes:
            raise DamagedError(f"it has no tensor {key!r}")
        return self._sizes[key]

    def tensor(self, key: str, offset: int, shape: list[int], strides: list[int]) -> None:
        return None


class _Global:
    """A stand-in for one of the three things that a dump names."""

    def __init__(self, name: bytes) -> None:
        self.name = name


class _Storage:
    def __init__(self, key: str, count: int) -> None:
        self.key, self.count = key, count


_GLOBALS = {name: _Global(name) for name in (LONGS, REBUILD, HOOKS)}
_HOOKS = object()  # an empty OrderedDict
_ONCE = object()  # in the memo: something that may not be used again
_OUTSIDE = {tuple, _Global, _Storage, object}  # they are no values, only parts of a tensor


def build(data: bytes | bytearray, storages: Storages, schema: int) -> dict[str, Any]:
    """The mapping that ``data`` (``data.pkl``) describes.

    Raises

    * CodeError for a global, an object or a call that no dump has;
    * NewerError for a refused file with a schema above ``schema``;
    * NotADumpError for another kind of torch file;
    * DamagedError for everything else that g4debug does not write: tensors that reach beyond
      their storage, storages that reach beyond their record, keys that are no text, something
      other than a text that is used twice, or more than any dump has.
    """
    refuse_size(len(data))
    try:
        values = _Machine(data, storages).run()
    except (NotADumpError, DamagedError):
        _explain(bytes(data), schema)
        raise
    if not isinstance(values, dict):
        raise NotADumpError(NO_DUMP)
    return values


def refuse_size(size: int) -> None:
    """Raise DamagedError if so many bytes of values are more than any dump has."""
    if size > MAX_PICKLE_BYTES:
        raise DamagedError(f"its values take {size >> 20} MiB, more than any dump's")


def beginning(data: bytes, last: str) -> dict[str, Any]:
    """The first entries of the mapping, up to the key ``last``. Its value has to be a text.

    ``data`` is the beginning of ``data.pkl``. No tensor may be among the entries. Raises
    DamagedError or NotADumpError if ``data`` ends before.
    """
    values = _Machine(data, Sizes({}), last).run()
    if not isinstance(values, dict):
        raise NotADumpError(NO_DUMP)
    return values


class _Machine:
    """The stack, its marks, and the memo, as in unpickling.

    Marks are kept apart, as positions in the stack. A list or mapping is filled while it is on the
    stack and is never fetched from the memo, so the result is a tree.
    """

    def __init__(self, data: bytes | bytearray, storages: Storages, last: str = "") -> None:
        self.data, self.storages, self.last = data, storages, last
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.room = MAX_WEIGHT

    def run(self) -> Any:
        try:
            return self._run()
        except (ValueError, IndexError, struct.error) as e:
            raise DamagedError("its values end too early or cannot be read") from e

    def _run(self) -> Any:  # one loop, because a call for each opcode would take twice the time
        data, stack, marks, memo, last = self.data, self.stack, self.marks, self.memo, self.last
        push, remember = stack.append, memo.append
        if data[:2] != b"\x80\x02":
            raise NotADumpError(f"{NO_DUMP} (a pickle of another protocol)")
        at, end = 2, len(data)
        for _ in range(MAX_OPCODES):
            code = data[at]
            at += 1
            if code == 0x68:  # BINGET
                push(self._again(data[at]))
                at += 1
            elif code == 0x71 or code == 0x72:  # BINPUT, LONG_BINPUT
                number = data[at] if code == 0x71 else int.from_bytes(data[at : at + 4], "little")
                at += 1 if code == 0x71 else 4
                # pickle counts them. A number of the file's own could make a list of any length.
                if number != len(memo):
                    raise DamagedError("its memo is out of order")
                top = stack[-1]
                remember(top if type(top) is str or type(top) is _Global else _ONCE)
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                push(self._again(int.from_bytes(data[at : at + 4], "little")))
                at += 4
            elif code == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x4A:  # BININT
                push(_INT.unpack_from(data, at)[0])
                at += 4
            elif code == 0x58:  # BINUNICODE
                size = int.from_bytes(data[at : at + 4], "little")
                at += 4
                if size > end - at:
                    raise DamagedError("a text is cut off")
                self._weigh(TEXT_BYTES + size)
                text = data[at : at + size].decode("utf-8", "surrogatepass")
                at += size
                if not text.isascii():  # then Python needs up to four bytes for each character
                    self._weigh(4 * len(text))
                push(text)
                if last and len(marks) == 1 and len(stack) > 2 and stack[-2] == last:
                    return dict(zip(stack[1::2], stack[2::2], strict=True))
            elif code == 0x28:  # MARK
                if len(marks) >= MAX_DEPTH:
                    raise DamagedError("it is nested too deeply")
                marks.append(len(stack))
            elif code == 0x65 or code == 0x61:  # APPENDS, APPEND
                items = self._to_mark() if code == 0x65 else self._pop(1)
                target = self._target(list, items)
                target.extend(items)
            elif code == 0x75 or code == 0x73:  # SETITEMS, SETITEM
                items = self._to_mark() if code == 0x75 else self._pop(2)
                target = self._target(dict, items)
                keys = items[::2]
                if len(items) % 2 or not set(map(type, keys)) <= {str}:
                    raise DamagedError("a key is not a text")
                self._weigh(PAIRS_BYTES + PAIR_BYTES * len(keys))
                target.update(zip(keys, items[1::2], strict=True))
            elif code == 0x5D:  # EMPTY_LIST
                self._weigh(LIST_BYTES)
                push([])
            elif code == 0x7D:  # EMPTY_DICT
                self._weigh(DICT_BYTES)
                push({})
            elif code == 0x4E:  # NONE
                push(None)
            elif code == 0x88 or code == 0x89:  # NEWTRUE, NEWFALSE
                push(code == 0x88)
            elif code == 0x47:  # BINFLOAT
                push(_FLOAT.unpack_from(data, at)[0])
                at += 8
            elif code == 0x8A:  # LONG1
                size = data[at]
                at += 1
                if size > MAX_NUMBER_BYTES or size > end - at:
                    raise DamagedError("a number is longer than any in a dump")
                push(int.from_bytes(data[at : at + size], "little", signed=True))
                at += size
            elif code == 0x29:  # EMPTY_TUPLE
                push(())
            elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                self._weigh(LIST_BYTES)
                push(tuple(self._pop(code - 0x84)))
            elif code == 0x74:  # TUPLE
                self._weigh(LIST_BYTES)
                push(tuple(self._to_mark()))
            elif code == 0x63:  # GLOBAL
                second = data.index(b"\n", data.index(b"\n", at, at + 100) + 1, at + 200)
                name = bytes(data[at:second])
                if name not in _GLOBALS:
                    raise NotADumpError(NO_DUMP)
                push(_GLOBALS[name])
                at = second + 1
            elif code == 0x51:  # BINPERSID
                push(self._storage(*self._pop(1)))
            elif code == 0x52:  # REDUCE
                push(self._call(*self._pop(2)))
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise DamagedError("its values do not end where they should")
                return stack[0]
            elif code == 0x62:  # BUILD
                raise NotADumpError(NO_DUMP)
            else:
                raise DamagedError(f"opcode {code:#x}, which no dump has")
        raise DamagedError(TOO_MUCH)

    def _weigh(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise DamagedError(TOO_MUCH)

    def _again(self, number: int) -> Any:
        """The value in the memo. A text counts each time, because each use repeats it."""
        value = self.memo[number]
        if type(value) is str:
            self._weigh(len(value))
        elif value is _ONCE:
            raise DamagedError("a list, mapping or tensor is used twice")
        return value

    def _pop(self, count: int) -> list[Any]:
        stack = self.stack
        if len(stack) - count < (self.marks[-1] if self.marks else 0):
            raise DamagedError("its values end too early")
        items = stack[-count:]
        del stack[-count:]
        return items

    def _to_mark(self) -> list[Any]:
        stack, mark = self.stack, self.marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    def _target(self, kind: type, items: list[Any]) -> Any:
        """The list or mapping at the top of the stack, which gets these items."""
        stack = self.stack
        if len(stack) <= (self.marks[-1] if self.marks else 0) or type(stack[-1]) is not kind:
            raise DamagedError("a list or mapping is filled out of order")
        if not _OUTSIDE.isdisjoint(map(type, items)):
            raise NotADumpError(NO_DUMP)
        return stack[-1]

    def _storage(self, at: Any) -> _Storage:
        if type(at) is not tuple or len(at) != 5:
            raise NotADumpError(NO_DUMP)
        kind, dtype, key, device, count = at
        if kind != "storage" or device != "cpu" or dtype is not _GLOBALS[LONGS]:
            raise DamagedError("a tensor is not int64 on the CPU")
        if type(key) is not str or type(count) is not int:
            raise DamagedError("a tensor has an unknown form")
        size = self.storages.size(key)
        if count < 0 or count * LONG_SIZE != size:
            raise DamagedError(f"a tensor claims {count} elements, but its data has {size} bytes")
        return _Storage(key, count)

    def _call(self, function: Any, arguments: Any) -> Any:
        """The two calls that a dump has: an empty OrderedDict, and a tensor."""
        if type(function) is not _Global or function.name == LONGS:
            raise CodeError("a call")
        if function.name == HOOKS:
            if arguments != ():
                raise NotADumpError(NO_DUMP)
            return _HOOKS
        if type(arguments) is not tuple or len(arguments) != 6:
            raise NotADumpError(NO_DUMP)
        storage, offset, shape, strides, grad, hooks = arguments
        if type(storage) is not _Storage or hooks is not _HOOKS or grad is not False:
            raise DamagedError("a tensor has an unknown form")
        if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
            raise DamagedError("the shape of a tensor is no shape")
        if len(shape) > MAX_DEPTH or any(
            type(n) is not int or not 0 <= n < 1 << 40 for n in (offset, *shape, *strides)
        ):
            raise DamagedError("the shape of a tensor is no shape")
        count = math.prod(shape)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        # With stride 0, a small file could make a huge tensor: more elements than are stored.
        if count > storage.count or max(shape, default=0) >= 1 << 31:
            raise DamagedError(
                f"a tensor of shape {list(shape)} has only {storage.count} stored elements"
            )
        if count and last >= storage.count:
            raise DamagedError(f"a tensor of shape {list(shape)} reaches past its stored elements")
        # Not only its own elements: whoever reads on may copy them for each tensor.
        self._weigh(LIST_BYTES * 4 + storage.count * LONG_SIZE)
        return self.storages.tensor(storage.key, offset, list(shape), list(strides))


_INT = struct.Struct("<i")
_FLOAT = struct.Struct(">d")


def _explain(data: bytes, known: int) -> None:
    """Raise CodeError if a refused pickle would run anything, or NewerError.

    That is what matters most to the reader, whatever was met first. known: the newest schema that
    this g4debug reads.
    """
    key, schema, is_dump = "", -1, False
    try:
        for op, arg, _ in itertools.islice(_opcodes(data), MAX_SCANNED):
            harmless = op.name != "GLOBAL" or CHECKPOINT.fullmatch(str(arg))
            if op.name in _CODE or not harmless:
                raise CodeError(str(arg or op.name))
            if op.name in ("BINPUT", "LONG_BINPUT"):
                continue  # between a key and its value
            if key == "schema" and op.name in ("BININT", "BININT1", "BININT2") and arg is not None:
                schema = int(arg)
            key = arg if isinstance(arg, str) else ""
            is_dump = is_dump or key == KIND
    except (ValueError, IndexError, OverflowError, MemoryError):
        return  # pickletools cannot read on; nothing found so far
    if is_dump and schema > known:
        raise NewerError(str(schema))


def _opcodes(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    with warnings.catch_warnings():  # Python warns about escapes in a damaged text
        warnings.simplefilter("ignore")
        yield from pickletools.genops(data)
