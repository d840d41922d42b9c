"""Triton's interpreter replaces and computes the same, whether it is quickened or not."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from g4debug.cpu import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there")


@triton.jit
def twice(x):
    seen.append(replaced())
    return tl.where(x > 0, x * 2, tl.zeros_like(x))


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    seen.append(replaced())
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = twice(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(out + at, tl.sort(value), mask=at < n)


@triton.jit
def doubled(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, value + value)


OWNERS = (tl, core, tl.tensor, tl.math, core.tensor_descriptor_base)
PLAIN = {owner: dict(inspect.getmembers(owner)) for owner in OWNERS}
seen: list[set[tuple[str, str]]] = []


def replaced():
    """What is another object than before any launch."""
    now = {owner: dict(inspect.getmembers(owner)) for owner in OWNERS}
    return {
        (owner.__name__, name)
        for owner in OWNERS
        for name in now[owner].keys() | PLAIN[owner].keys()
        if now[owner].get(name) is not PLAIN[owner].get(name)
        and not name.startswith("__class")  # bound anew by each look
    }


def launched():
    seen.clear()
    x, out = torch.randn(50), torch.zeros(50)
    kernel[(4,)](x, out, 50, BLOCK=16)
    return x, out, [*seen, replaced()]


@pytest.fixture
def module(monkeypatch):
    module = importlib.import_module(interpreter.MODULE)
    monkeypatch.setattr(module, "inspect", inspect)
    return module


def test_the_same_is_replaced_in_each_function_and_nothing_afterwards(module):
    _, _, plain = launched()
    interpreter.quicken()
    for _ in range(2):  # it goes through everything, and then through the builtins alone
        x, out, found = launched()
        assert found == plain
        for first in range(0, 50, 16):
            expected = (x.clamp(min=0) * 2)[first : first + 16]
            padded = torch.zeros(16)
            padded[: len(expected)] = expected
            assert torch.equal(out[first : first + 16], padded.sort().values[: len(expected)])
    assert len(plain) == 9  # four programs, a function in each, and what is left afterwards
    assert len(plain[0]) > 100


def test_what_its_owner_gets_later_is_replaced_too(module, monkeypatch):
    interpreter.quicken()
    launched()
    builtin = core.builtin(lambda x, _semantic=None: x)
    monkeypatch.setattr(tl, "later", builtin, raising=False)
    monkeypatch.setitem(PLAIN[tl], "later", builtin)
    _, _, found = launched()
    assert ("triton.language", "later") in found[0]
    assert ("triton.language", "later") not in found[-1]


def test_it_is_in_force_once_in_the_cpu_engine(module):
    interpreter.quicken()
    first = module.inspect
    interpreter.quicken()
    assert module.inspect is first
    assert first.signature is inspect.signature


def test_types_are_the_same_as_of_triton_itself(module):
    interpreter.quicken()
    quick = module._get_np_dtype
    plain = quick._find
    types = [t for t in vars(tl).values() if type(t) is tl.dtype]
    types += [tl.pointer_type(t) for t in types]
    types += [tl.block_type(t, [4, 8]) for t in types]
    told = 0
    for given in [*types, *types]:
        try:
            expected = plain(given)
        except KeyError:  # such as void, which no value has
            with pytest.raises(KeyError):
                quick(given)
            continue
        assert quick(given) is expected
        told += 1
    assert told > 80


def test_no_sum_is_computed_a_second_time_for_an_assertion_that_is_off(module, monkeypatch):
    """Triton looks for overflows in 64 bits, and asserts nothing of it unless it debugs."""
    plain, builder = type(module.interpreter_builder.options)(), module.interpreter_builder
    assert plain.sanitize_overflow
    assert not plain.debug  # or the assertion would be made
    monkeypatch.setattr(builder, "options", plain)
    x = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    doubled[(1,)](x, out, BLOCK=2)
    interpreter.quicken()
    assert not builder.options.sanitize_overflow
    quick = torch.zeros(2, dtype=torch.int32)
    doubled[(1,)](x, quick, BLOCK=2)
    assert quick.tolist() == out.tolist() == [-2, 10]
    monkeypatch.setattr(module, "inspect", inspect)
    strict = type(plain)(debug=True)
    monkeypatch.setattr(builder, "options", strict)
    interpreter.quicken()
    assert builder.options is strict
