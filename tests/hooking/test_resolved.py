"""The arguments of a server are read as SGLang resolved them, on SGLang's own record."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

import g4debug
from g4debug.hooking import targets
from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.sanitizer import unsupported

ROOT = Path(g4debug.__file__).parent


def test_what_sglang_decided_counts_and_not_what_was_given(sglang):
    """With pipeline parallelism SGLang switches overlap scheduling off."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", device="cpu")
    assert unsupported.overlaps(args)
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:  # the record itself is written
        args.disable_overlap_schedule = True
    else:
        declare_resolution(args, "test", disable_overlap_schedule=True)
        assert not args.disable_overlap_schedule
    assert not unsupported.overlaps(args)


@pytest.mark.skipif(not targets.matches(">=0.5.23"), reason="the width is a new argument")
def test_dp_attention_has_a_width_and_no_switch(sglang):
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", device="cpu", tp_size=2, attn_dp_size=2)
    assert dp_attention(args)
    assert "DP attention" in unsupported.other_rows(args)
    assert not dp_attention(ServerArgs(model_path="dummy", device="cpu", tp_size=2))


def test_what_is_not_declared_cannot_be_read():
    with pytest.raises(KeyError):
        server_argument(SimpleNamespace(pp_szie=2), "pp_szie")
    assert server_argument(None, "pp_size", 1) == 1


# What shows all arguments, or is a part of SGLang on a machine without a GPU.
MAY = ("trapping/sanitise.py", "hooking/resolved.py", "cpu/", "pools/", "fixes/", "faults/")


def test_nobody_reads_an_argument_from_the_record_itself():
    """This covers reads from ``server_args``. Variables of other names are left to the review."""
    wrong = []
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name.startswith(MAY):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            read = ""
            if isinstance(node, ast.Attribute):
                read = ast.unparse(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                read = ast.unparse(node.args[0])
            if read.rpartition(".")[2] == "server_args":
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
