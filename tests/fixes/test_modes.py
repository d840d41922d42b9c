"""``G4DEBUG_FIXES``: none is SGLang itself, and needed leaves a healthy server's answers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_engine import ENGINE, drive, side_by_side

from g4debug.fixes import base
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks

pytestmark = ENGINE
DRIVER = Path(__file__).with_name("drive_modes.py")

# What every function, class and property of SGLang is, before and after its plugins were loaded.
LOOK = '''
import json, os, sys, types
import g4debug
from g4debug import cpu
cpu.activate()  # its stand-ins are there in either case
import sglang.srt.managers.scheduler
import sglang.srt.layers.attention.trtllm_mha_backend
import sglang.srt.layers.attention.hybrid_attn_backend
import sglang.srt.models.gemma4_mm
import sglang.srt.entrypoints.engine
import pkgutil
from g4debug.hooking import targets
for site in targets.SITES:  # what they are in, whatever the release
    if targets.path(site) is not None:
        pkgutil.resolve_name(targets.path(site).rpartition('.')[0])
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

def callables(space):
    return {k: v for k, v in vars(space).items()
            if callable(v) or isinstance(v, (property, classmethod, staticmethod))}

def code_of(value):
    inner = getattr(value, '__func__', getattr(value, 'fget', value))
    code = getattr(inner, '__code__', None)
    return code if isinstance(code, types.CodeType) else None  # some have whatever is asked for

def look():
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split('.')[0] != 'sglang':
            continue
        for key, value in callables(module).items():
            seen[name + '.' + key] = value, code_of(value)
            if isinstance(value, type) and value.__module__.split('.')[0] == 'sglang':
                for k, v in callables(value).items():
                    seen['.'.join((value.__module__, value.__qualname__, k))] = v, code_of(v)
    return seen

def code_in(module, seen):
    """What has code of this package, known by its folder: SGLang may lie below any other."""
    folder = os.path.join(os.path.dirname(module.__file__), '')
    return {k for k, (_, code) in seen.items()
            if code is not None and code.co_filename.startswith(folder)}

before = look()
load_plugins()
after = look()
from g4debug import plugin
stand_ins = code_in(cpu, after)
print('RESULT', json.dumps({
    'changed': sorted(k for k in before if k not in after or after[k][0] is not before[k][0]
                      or after[k][1] != before[k][1]),
    'looked at': len(before), 'ours': sorted(code_in(g4debug, after) - stand_ins),
    'stand-ins': len(stand_ins), 'hooks': len(HookRegistry._hooks),
    'installed': plugin.in_force.installed,
    'sites': plugin.in_force.hooks.sites,
}))
'''


def look(**environ: str) -> tuple[dict, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "g4debug.cpu", "-c", LOOK],
        env={**clean, **environ}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT ")), done.stderr


def test_none_is_sglang_itself_byte_for_byte():
    """With ``needed`` the same look does see hooks, so it is not blind."""
    none, said = look(G4DEBUG_FIXES="none")
    assert none["looked at"] > 10_000
    assert none["stand-ins"] > 0
    assert none["changed"] == none["ours"] == none["sites"] == []
    assert (none["hooks"], none["installed"]) == (0, False)
    assert "none in force; G4DEBUG_FIXES=none leaves out" in said
    needed, _ = look()
    assert needed["installed"] is True
    assert needed["hooks"] == len(needed["sites"]) > 0
    places = {targets.path(site) for site in needed["sites"]}
    assert places <= set(needed["changed"])


long = pytest.mark.long("two engines for each kind of server")


@pytest.mark.parametrize(
    ("mtp", "radix", "chunk", "page", "overlap"),
    [
        ("mtp", "radix", "0", "64", "overlap"),
        pytest.param("plain", "radix", "0", "64", "overlap", marks=long),
        *(
            pytest.param(mtp, radix, "128", "64", "overlap", marks=long)
            for mtp in ("mtp", "plain")
            for radix in ("radix", "no-radix")
        ),
        # 0.5.23 dies of its own with a draft and without overlap scheduling (#40155).
        *(
            pytest.param(mtp, radix, "128", page, overlap, marks=long)
            for mtp, radix, page, overlap in (
                ("mtp", "radix", "16", "overlap"),
                ("plain", "radix", "16", "overlap"),
                ("plain", "radix", "1", "overlap"),
                ("plain", "no-radix", "1", "no-overlap"),
                ("plain", "radix", "64", "no-overlap"),
            )
        ),
    ],
)
def test_needed_gives_a_healthy_server_its_own_answers_bit_for_bit(
    tmp_path, mtp, radix, chunk, page, overlap
):
    """chunk: tokens of a prefill chunk, 0 for SGLang's own choice: longer than a prompt.

    page: tokens of a page.
    """
    server = (mtp, radix, chunk, page, overlap)

    def run(name: str, **environ: str):
        return drive(tmp_path / name, str(DRIVER), *server, **environ)

    runs = side_by_side(
        none=lambda: run("none", G4DEBUG_FIXES="none"),
        needed=lambda: run("needed"),
    )
    for r in runs.values():
        assert r.status == 0, r.log[-3000:]
    assert "fixes: none in force" in runs["none"].log
    by_need = [s.fix.id for s in base.apply_all(Hooks(), {}, {}) if s.state == "applied"]
    assert by_need
    assert f"fixes: {len(by_need)} in force ({', '.join(by_need)})" in runs["needed"].log
    none, needed = runs["none"].result, runs["needed"].result
    assert none == needed  # logprobs as hexadecimal floats
    assert len({t for a in none for t in a["tokens"]}) > 50  # the model says something
    assert any(a["cached"] for a in none) == (radix == "radix")
