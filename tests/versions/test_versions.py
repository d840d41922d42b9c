"""Every fix and every hook site on every SGLang release that this project stands on.

``make versions``. The wheels are unpacked and read, never installed or imported. The right states
were established by reading and running the releases; a fix without a row here fails, so that nobody
adds one without looking.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import variables_read
import wheels

from g4debug import discovery
from g4debug.findings import decisive
from g4debug.fixes import base
from g4debug.fixes.source import exists, source
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks

A, N, OFF = "applied", "not-needed", "off"
# What a server without any switch says; one column for each release of wheels.RELEASES.
STATES = {
    #                     12p1 13p1 0.5.14 15p1 0.5.18 0.5.21 0.5.23
    "draft-embedding-shard": (A, A, A, A, A, A, N),  # 0.5.23 asks what the draft's embedding is
    "draft-window":       (N, N, A, A, A, A, A),  # up to 0.5.13 a page more is kept
    "force-eagle":        (OFF, OFF, N, N, N, N, N),  # a way out of v1's promotion
    "frozen-kv-mtp-v2":   (OFF, N, N, N, N, N, N),  # upstream has it from 0.5.14 on
    "fused-router":       (A, N, N, N, N, N, N),  # 0.5.13 has a kernel of its own
    "hopper-extend-blocks": (A, N, N, N, N, N, N),  # upstream has it from 0.5.13 on
    "hybrid-pool-swap":   (N, A, A, A, A, A, A),  # the pool is the backend's from 0.5.13 on
    "idle-admission":     (A, A, A, A, A, A, A),  # upstream has mended it in part (#32379)
    "idle-draft-input":   (A, A, N, N, N, N, N),  # 0.5.13 has it, but not under DP attention
    "ignore-eos-admission": (N, N, N, N, N, A, A),  # up to 0.5.18 the page is not counted
    "last-decode":        (A, A, A, A, N, N, N),  # 0.5.18 has another prefix cache
    "locked-prefix":      (A, A, A, N, N, N, N),
    "mm-batched-encoder": (A, A, A, A, N, N, A),  # not run on 0.5.16 to 0.5.22
    "mm-piecewise-graph": (OFF, OFF, N, N, N, N, N),
    "optional-kv":        (A, N, N, N, N, N, N),  # 0.5.13 has it
    "page-clamp":         (OFF, OFF, OFF, OFF, OFF, OFF, OFF),
    "parked-chunk":       (A, A, A, A, A, A, A),  # upstream has not mended it yet (#36458)
    "residual-aliasing":  (A, A, A, A, A, A, N),  # 0.5.23 hands the residual over explicitly
    "ple-tail":           (A, A, A, A, N, N, A),  # as mm-batched-encoder
    "result-fence":       (N, N, A, A, N, N, N),  # 0.5.18 has its barrier after the launch
    "shared-kv-graphs":   (N, N, N, N, N, A, A),  # 0.5.21 looks up layers by their id
    "spec-batch-guards":  (A, A, N, N, N, N, N),  # from 0.5.14 on FROZEN_KV_MTP is spec v2
    "swa-ratio":          (A, A, A, A, N, N, A),  # as mm-batched-encoder
    "swa-state-swap":     (N, N, N, N, N, N, N),  # shipped in no wheel: main from #25103 to #26966
    "triple-rmsnorm":     (A, A, A, A, N, N, N),  # 0.5.23 norms at its stage boundaries
    "triton-decode-window": (OFF, OFF, OFF, OFF, OFF, OFF, OFF),
    "verify-attention":   (N, N, N, N, N, N, A),  # asked for from 0.5.18 on; run on the last only
    "vision-layer":       (A, A, A, A, N, N, A),  # as mm-batched-encoder
    "yoco-fast-prefill":  (A, N, N, A, N, N, A),  # not run on the others
}  # fmt: skip


@pytest.fixture(params=wheels.RELEASES)
def release(request):
    """A release, unpacked; targets and probes look at it."""
    if not request.config.getoption("--versions"):
        pytest.skip("downloads SGLang's wheels: make versions")
    try:
        root = wheels.unpacked(request.param)
    except wheels.NoWheel as e:
        pytest.fail(str(e), pytrace=False)
    with targets.looking_at(root):
        assert str(targets.sglang_version()) == request.param
        yield request.param


def test_every_fix_has_a_row():
    assert set(STATES) == set(discovery.names("fix"))
    assert all(len(row) == len(wheels.RELEASES) for row in STATES.values())


def test_every_fix_is_in_its_state(release):
    column = wheels.RELEASES.index(release)
    states = {s.fix.id: s for s in base.apply_all(Hooks(), {}, {}, mode="all")}
    wrong = {
        name: str(states[name])
        for name, row in STATES.items()
        if name in states and states[name].state != row[column]
    }
    assert not wrong


def test_a_fix_that_is_written_for_a_release_can_be_put_there(release):
    """Forced on, so that fixes that are off by default or not needed are tried, too."""
    for name in discovery.names("fix"):
        fix = discovery.load("fix", name)
        if targets.matches(fix.needs):
            assert base._apply(fix, Hooks(), {name: True}, {}).state == "applied"


def test_every_probe_can_answer_where_its_fix_is_written_for(release):
    for name in discovery.names("fix"):
        fix = discovery.load("fix", name)
        if targets.matches(fix.needs):
            assert fix.still_broken() in (True, False)


def test_every_hook_site_is_there_or_declared_absent(release):
    missing = {
        site: dotted
        for site in targets.SITES
        if (dotted := targets.path(site)) is not None and not exists(dotted)
    }
    assert not missing


# Declared absent although the function is there, because it does another thing there, as the
# comments in targets.py say, or is not used: 0.5.13 has FutureMap, but not for FROZEN_KV_MTP, and
# what only frozen-kv-mtp-v2 or hopper-extend-blocks hook is looked at on 0.5.12 alone. Before v2
# the worker keeps the functions for the tree and the verify under names of its own. From 0.5.23 on
# a match gives a node, whose pages come from elsewhere. FlashMLA and some drafts' workers are
# hooked only from the release on with which they were run.
_FLASHMLA = ("decode", "extend", "init", "init_graph_state", "metadata", "metadata_replay")
_WORKERS = ("layered.draft", "layered.draft_extend", "layered.forward", "layered.verify")
UNLIKE = {
    **dict.fromkeys((f"attn.flashmla.{name}" for name in _FLASHMLA), "<0.5.23"),
    **dict.fromkeys((*_WORKERS, "ngram.draft", "ngram.forward"), "<0.5.23"),
    **dict.fromkeys(("eagle.draft", "eagle.draft_extend", "eagle.forward"), "<0.5.15"),
    "attn.fa3.metadata_in_graph": ">=0.5.13,<0.5.18",
    "attn.flashmla.metadata_capture": "<0.5.13",
    "graphs.capture_prefill": ">=0.5.18,<0.5.21",
    "runner.eager_load_batch": ">=0.5.14,<0.5.15",
    "attn.hybrid_metadata": "<0.5.13",
    "attn.hybrid_metadata_out_graph": ">=0.5.13,<0.5.14",
    "attn.trtllm_mha.metadata_in_graph": ">=0.5.13,<0.5.15",
    "attn.triton.extend_blocks": ">=0.5.13,<0.5.18",
    "batch.maybe_evict_swa": "<0.5.14",
    "draft.tree": "<0.5.14",
    "future.gather": ">=0.5.13,<0.5.14",
    "future.inputs": ">=0.5.13,<0.5.14",
    "future.publish": ">=0.5.13,<0.5.14",
    "future.resolve_lens": ">=0.5.13,<0.5.14",
    "future.stash": ">=0.5.13,<0.5.14",
    "grammar.begin": ">=0.5.13",
    "overlap.forward": ">=0.5.13",
    "overlap.verify": ">=0.5.13",
    "result.resolve": ">=0.5.13,<0.5.15",
    "spec.create_worker": ">=0.5.13",
    "spec.supports_v2": ">=0.5.13,<0.5.14",
    "tree.radix.match": ">=0.5.23",
    "tree.unified.match": ">=0.5.23",
    "verify.kernel": "<0.5.14",
}


def test_what_is_declared_absent_is_absent(release):
    there = {
        site
        for site, places in targets.SITES.items()
        if targets.path(site) is None
        and any(dotted is not None and exists(dotted) for _, dotted in places)
    }
    assert there == {site for site, releases in UNLIKE.items() if targets.matches(releases)}


def test_a_hook_site_is_a_function(release):
    for site in targets.SITES:
        if (dotted := targets.path(site)) is not None:
            # A plain function, or what a decorator made of one: name = decorate(...)(function).
            assert re.search(r"^\s*(async )?def |^\w+ = \w+\(.*\)\(", source(dotted), re.M), site


def test_every_argument_that_is_read_exists(release):
    """A limit that reads one that is gone would say that all is judged."""
    srt = targets.sglang_root() / "sglang" / "srt"
    # From 0.5.21 on the fields are in one file for each group, and ServerArgs is made of them.
    groups = sorted((srt / "arg_groups" / "fields").glob("*.py"))
    text = "\n".join(path.read_text() for path in (srt / "server_args.py", *groups))
    fields = set(re.findall(r"^    (\w+)\s*:", text, re.M))
    declared = {name for name, since in targets.ARGUMENTS.items() if targets.matches(since or ">0")}
    assert declared <= fields, sorted(declared - fields)
    undeclared = (targets.ARGUMENTS.keys() - declared) & fields
    assert not undeclared, f"{sorted(undeclared)}: they exist here, and are declared for later only"


def test_each_variable_by_which_the_host_decides_is_known(release):
    assert not variables_read.unknown(targets.sglang_root() / "sglang" / "srt")


def test_each_variable_that_is_on_a_tape_is_read_by_a_release(release):
    if release != wheels.RELEASES[-1]:
        pytest.skip("all releases are read together")
    known = {*decisive.DECISIVE, *decisive.ON_TAPE, *decisive.OTHER_WAYS, *decisive.SECONDS}
    for one in wheels.RELEASES:
        for path in (wheels.unpacked(one) / "sglang" / "srt").rglob("*.py"):
            text = path.read_text() if path.name != "environ.py" else ""
            known = {name for name in known if name not in text}
    assert not known


def test_nothing_of_sglang_is_imported(release):
    """The probes and ``apply`` read; what they import would be another release's."""
    code = (
        "import sys; from pathlib import Path; from g4debug.hooking import targets\n"
        "from g4debug.fixes import base; from g4debug.hooking.hooks import Hooks\n"
        f"with targets.looking_at(Path({str(targets.sglang_root())!r})):\n"
        "    base.apply_all(Hooks(), {}, {})\n"
        "print([m for m in ('sglang', 'torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_registry_that_cannot_be_reached_is_said(tmp_path, monkeypatch):
    for name, value in {
        "XDG_CACHE_HOME": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(wheels.NoWheel, match=r"^SGLang 0\.5\.14 was not checked: .*registry"):
        wheels.unpacked("0.5.14")
    assert not list(wheels.cache().iterdir())
