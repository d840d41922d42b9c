"""Fix swa-ratio on SGLang's own ServerArgs, ModelConfig and pool configurator."""

from __future__ import annotations

import argparse
import logging
import pickle

import pytest
import torch
from published import A4B_26B, DENSE_31B, folder
from real_configurator import model_config, solve

from g4debug.cpu.server import server_arguments
from g4debug.fixes import source, swa_ratio
from g4debug.hooking import targets

pytestmark = pytest.mark.written_for("swa-ratio")

SWITCH = "G4DEBUG_FIX_SWA_RATIO"
ON = {SWITCH: "1"}


@pytest.fixture
def models(sglang, tmp_path):
    return {
        "moe": folder(tmp_path / "moe", A4B_26B),
        "dense": folder(tmp_path / "dense", DENSE_31B),
    }


def engine_args(model, **given):
    """ServerArgs as ``Engine(**kwargs)`` makes them."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**server_arguments((model, model), mtp=False, **given))


def cli_args(model, *given):
    """ServerArgs as ``sglang.launch_server`` makes them."""
    from sglang.srt.server_args import ServerArgs

    from g4debug.cpu.server import _flag

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = server_arguments((model, model), mtp=False).items()
    flags = [part for name, value in arguments for part in _flag(name, value)]
    return ServerArgs.from_cli_args(parser.parse_args([*flags, *given]))


def checked(server_args):
    """The ratio after ``check_server_args``, which the launching process calls."""
    resolved(server_args).check_server_args()
    return swa_ratio.in_force(server_args, "swa_full_tokens_ratio")


def resolved(server_args):
    """From 0.5.21 on the launching process lets ServerArgs decide what was not given."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


@pytest.mark.parametrize("make", [engine_args, cli_args], ids=["Engine", "command line"])
@pytest.mark.parametrize(("model", "ratio"), [("moe", 0.15), ("dense", 0.8)])
def test_the_default_depends_on_the_experts(arm, models, make, model, ratio):
    arm(**ON)
    assert checked(make(models[model])) == ratio


@pytest.mark.parametrize("model", ["moe", "dense"])
@pytest.mark.parametrize("given", [0.8, 0.3, 0.15, 1.0])
def test_a_users_value_is_kept_and_0_8_is_one(arm, models, model, given):
    arm(**ON)
    assert checked(engine_args(models[model], swa_full_tokens_ratio=given)) == given
    flag = ("--swa-full-tokens-ratio", str(given))
    assert checked(cli_args(models[model], *flag)) == given


def test_a_config_file_counts_as_the_user(arm, models, tmp_path):
    from sglang.srt.server_args import prepare_server_args

    from g4debug.cpu.server import _flag

    arm(**ON)
    file = tmp_path / "server.yaml"
    file.write_text("swa-full-tokens-ratio: 0.8\n")
    arguments = server_arguments((models["moe"], models["moe"]), mtp=False).items()
    flags = [part for name, value in arguments for part in _flag(name, value)]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level  # prepare_server_args sets up logging
    try:
        given = prepare_server_args([*flags, "--config", str(file)])
        default = prepare_server_args(flags)
    finally:
        root.handlers[:], root.level = handlers, level
    assert checked(given) == 0.8
    assert checked(default) == 0.15


def test_without_the_fix_it_is_sglangs_own(arm, models):
    arm(**{SWITCH: "0"})
    assert checked(engine_args(models["moe"])) == 0.8


def test_server_args_that_were_built_before_the_plugin_are_changed_too(arm, models):
    """``Engine(server_args=ServerArgs(...))``: built first, checked later."""
    built = engine_args(models["moe"])
    arm(**ON)
    assert checked(built) == 0.15


def test_server_args_from_another_process_are_left_alone(arm, models):
    """Nothing tells a default from a user's value after pickling: it is kept."""
    arm(**ON)
    args = engine_args(models["moe"])
    known = args.swa_full_tokens_ratio is None  # as in 0.5.23: nobody gives that
    assert checked(pickle.loads(pickle.dumps(args))) == (0.15 if known else 0.8)


def test_it_says_what_it_did(arm, models, caplog):
    arm(**ON)
    with caplog.at_level(logging.INFO, "g4debug"):
        checked(engine_args(models["moe"]))
        checked(engine_args(models["dense"]))
        checked(engine_args(models["moe"], swa_full_tokens_ratio=0.8))
    said = [r.message for r in caplog.records if "swa-ratio" in r.message]
    assert "setting swa_full_tokens_ratio to 0.15: this Gemma-4 has 128 experts" in said[0]
    assert "keeping swa_full_tokens_ratio=0.8: this is a dense Gemma-4" in said[1]
    assert "keeping swa_full_tokens_ratio=0.8: the user gave it" in said[2]


def test_no_swa_pool_no_change(sglang, models):
    args = resolved(engine_args(models["moe"], disable_hybrid_swa_memory=True))
    assert swa_ratio.choose(args) == (0.8, "there is no SWA pool (disable_hybrid_swa_memory)")


def test_another_model_is_none_of_its_business(sglang, models, monkeypatch):
    args = resolved(engine_args(models["moe"]))
    config = swa_ratio._model_config(args).hf_config
    monkeypatch.setattr(config, "architectures", ["LlamaForCausalLM"])
    assert swa_ratio.choose(args) is None


def test_where_sglang_sizes_by_requests_the_ratio_is_not_touched(sglang, models, monkeypatch):
    """0.5.14 and later; 12p1 has no such configurator, whatever the arguments are."""
    args = resolved(engine_args(models["moe"], disable_radix_cache=True, max_running_requests=8))
    assert swa_ratio.choose(args)[0] == (0.15 if targets.matches("<0.5.14") else 0.8)
    real = source.exists
    monkeypatch.setattr(
        swa_ratio, "exists", lambda path: path.endswith("CapPoolConfigurator") or real(path)
    )
    assert swa_ratio.choose(args) == (
        0.8,
        "SGLang does not read it: it sizes the SWA pool by max_running_requests",
    )
    assert swa_ratio.choose(resolved(engine_args(models["moe"])))[0] == 0.15  # with a radix cache


def test_the_installed_sglang_needs_it(sglang):
    assert swa_ratio.still_broken()
    assert targets.matches(swa_ratio.FIX.needs)


BRANCH = """
    def adjust(self):
        if model_arch in ["Gemma4ForCausalLM"]:
            self.attention_backend = "triton"{extra}
        elif model_arch == "Step3p5ForCausalLM":
            self.swa_full_tokens_ratio = 1.0
"""


@pytest.mark.parametrize(
    ("extra", "found"),
    [("", False), ("\n            self.swa_full_tokens_ratio = 0.15", True)],
)
def test_the_probe_reads_gemma4s_branch_and_no_other(extra, found):
    branches = swa_ratio.gemma4_branches(BRANCH.format(extra=extra))
    assert any(swa_ratio.FIELD in text for text in branches) is found


# The seeds' layouts, PRs #2 and #7. They do not say how many bytes KV had: each pair of layouts
# leaves one interval, and the middle of it is assumed here. Everything else is published.
BYTES_26B = (109_478_041_600, 109_478_092_800)
BYTES_31B = (98_052_341_760, 98_054_963_200)


@pytest.mark.parametrize(
    ("model", "interval", "page", "ratio", "layout"),
    [
        ("moe", BYTES_26B, 1, 0.8, (593_956, 475_164)),  # PR #2
        ("moe", BYTES_26B, 1, 0.15, (2_138_243, 320_736)),  # PR #2
        ("moe", BYTES_26B, 64, 0.15, (2_138_240, 320_704)),  # PR #7
        ("dense", BYTES_31B, 64, 0.8, (132_992, 106_368)),  # PR #7
        ("dense", BYTES_31B, 64, 0.15, (478_720, 71_808)),  # PR #7
    ],
)
def test_the_seeds_layouts_to_the_page(models, monkeypatch, model, interval, page, ratio, layout):
    config = model_config(models[model])
    low, high = interval

    def by_sglang(memory):
        return solve(monkeypatch, config, torch.bfloat16, ratio, memory, page)

    assert by_sglang((low + high) // 2) == layout
    assert by_sglang(low) == by_sglang(high - 1) == layout


@pytest.mark.parametrize(
    ("model", "interval", "layouts"),
    [
        ("moe", BYTES_26B, [(1, 0.8, 593_956), (1, 0.15, 2_138_243)]),
        ("dense", BYTES_31B, [(64, 0.8, 132_992), (64, 0.15, 478_720)]),
    ],
)
def test_the_assumed_bytes_are_all_that_the_seeds_leave_open(
    models, monkeypatch, model, interval, layouts
):
    """One byte below or above the interval, one of the two layouts is another."""
    config = model_config(models[model])
    for memory in (interval[0] - 1, interval[1]):
        got = [
            solve(monkeypatch, config, torch.bfloat16, ratio, memory, page)[0] == full
            for page, ratio, full in layouts
        ]
        assert not all(got)
