"""Reading SGLang's source: the installed one, and one that is only unpacked."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from sglang_of import sglang_of

from g4debug.fixes.source import exists, source
from g4debug.hooking import targets

TREE = {
    "sglang/__init__.py": "from sglang.api import hello\n",
    "sglang/api.py": "def hello():\n    return 1\n",
    "sglang/srt/pool/__init__.py": "from .inner import Pool as Public\nimport sglang.api as api\n",
    "sglang/srt/pool/inner.py": """
from sglang.srt.base import mixins
from sglang.srt.base.mixins import Mixin
from torch import nn
LIMIT = 3
try:
    import fast
except ImportError:
    def slow():
        pass
if True:
    class Guarded:
        x: int = 1

class Pool(nn.Module, Mixin[int], mixins.Other):
    @property
    @Mixin.decorate
    def size(self):
        return 1

    def alloc(self):
        return 2
    def alloc(self):
        return 3
""",
    "sglang/srt/base/mixins.py": """
class Root:
    def deep(self):
        return "deep"
class Mixin(Root):
    async def shared(self):
        return "mixin"
class Other:
    def shared(self):
        return "other"
    def last(self):
        return "last"
class Circle(Circle):
    pass
from sglang.srt.base.mixins import ring
class Rebuilt:
    def method(self): ...
Rebuilt = struct("Rebuilt", vars(Rebuilt))
""",
    "sglang/srt/all.py": """
from torch import *
from .pool.inner import *
from .base.mixins import *
""",
    "sglang/srt/newer.py": "def of a newer python\n",
    "sglang-9.8.7.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 9.8.7\n",
}
POOL = "sglang.srt.pool.Public"


@pytest.fixture
def tree(tmp_path):
    with sglang_of(tmp_path, TREE):
        yield tmp_path


@pytest.mark.parametrize(
    ("dotted", "first", "last"),
    [
        ("sglang.api", "def hello():", "return 1"),
        ("sglang.srt.pool", "from .inner", "api"),
        ("sglang.hello", "def hello():", "return 1"),
        ("sglang.srt.pool.api.hello", "def hello():", "return 1"),
        (f"{POOL}.size", "@property", "return 1"),
        (f"{POOL}.alloc", "def alloc", "return 3"),
        (f"{POOL}.shared", "async def shared", 'return "mixin"'),
        (f"{POOL}.deep", "def deep", 'return "deep"'),
        (f"{POOL}.last", "def last", 'return "last"'),
        (POOL, "class Pool(", "return 3"),
        ("sglang.srt.base.mixins.Rebuilt.method", "def method", "..."),
        ("sglang.srt.pool.inner.LIMIT", "LIMIT", "= 3"),
        ("sglang.srt.all.LIMIT", "LIMIT", "= 3"),
        ("sglang.srt.all.Root.deep", "def deep", 'return "deep"'),
        ("sglang.srt.pool.inner.slow", "def slow", "pass"),
        ("sglang.srt.pool.inner.Guarded.x", "x: int", "= 1"),
    ],
)
def test_what_is_there(tree, dotted, first, last):
    text = source(dotted).strip()
    assert text.startswith(first)
    assert text.endswith(last)
    assert exists(dotted)


@pytest.mark.parametrize(
    ("dotted", "error"),
    [
        ("sglang.nowhere.Class", AttributeError),  # sglang/__init__.py has no such name
        ("sglang.srt.nowhere.Class", ImportError),
        ("sglang.srt.all.nothing", AttributeError),
        ("sglang.srt", ImportError),
        ("sglang.srt.newer.thing", ImportError),
        (f"{POOL}.free", AttributeError),
        (f"{POOL}.alloc.inside", AttributeError),
        ("sglang.srt.pool.api", AttributeError),
        ("sglang.srt.base.mixins.Circle.x", AttributeError),
        ("sglang.srt.base.mixins.ring", AttributeError),
    ],
)
def test_what_is_not_there_is_an_error_that_means_target_missing(tree, dotted, error):
    with pytest.raises(error):
        source(dotted)
    assert not exists(dotted)


def test_the_version_of_an_unpacked_wheel(tree, tmp_path):
    assert str(targets.sglang_version()) == "9.8.7"
    assert targets.matches(">=9")
    with targets.looking_at(tmp_path / "srt"):  # nests, and has no metadata
        assert targets.sglang_version() is None
    assert str(targets.sglang_version()) == "9.8.7"


def test_a_changed_file_is_read_again(tree):
    path = tree / "sglang/api.py"
    assert "return 1" in source("sglang.hello")
    path.write_text("\n\ndef hello():\n    return 2\n")
    assert source("sglang.hello") == "def hello():\n    return 2\n"


def test_the_installed_one_is_what_inspect_says(sglang):
    """On real classes, one of them inherited from a mixin."""
    import pkgutil

    for site in (
        "attn.trtllm_mha.layer_page_table",
        "scheduler.run_batch",
        "scheduler.stream_output",
    ):
        dotted = targets.path(site)
        real = pkgutil.resolve_name(dotted.rpartition(".")[0])
        function = inspect.unwrap(getattr(real, dotted.rpartition(".")[2]))
        assert source(dotted) == inspect.getsource(function)


def test_nothing_is_imported():
    if targets.sglang_version() is None:
        pytest.skip("needs sglang")
    code = (
        "import sys; from g4debug.hooking import targets; from g4debug.fixes.source import exists\n"
        "assert exists(targets.path('scheduler.run_batch'))\n"
        "print([m for m in ('torch', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
