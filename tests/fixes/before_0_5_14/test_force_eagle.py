"""force-eagle on SGLang's real ServerArgs and its reading of the assistant's config."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from g4debug.cpu.geometry import TINY
from g4debug.cpu.models import tiny_models, write
from g4debug.cpu.server import server_arguments
from g4debug.fixes.before_0_5_14.force_eagle import FIX, SWITCH, limits, still_broken

pytestmark = pytest.mark.written_for("force-eagle")

ON = {SWITCH: "1"}


@pytest.fixture(scope="session")
def even(tmp_path_factory):
    """An assistant that EAGLE can serve, eagerly: one head dimension."""
    return write(replace(TINY, head_dim=64, swa_head_dim=64), tmp_path_factory.mktemp("m") / "even")


def args(models=None, **given):
    from sglang.srt.server_args import ServerArgs

    given = {"skip_tokenizer_init": True, **given}
    return ServerArgs(**server_arguments(models or tiny_models(), **given))


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE", "nextn"])
@pytest.mark.parametrize(
    ("environ", "resolved"),
    [({}, "FROZEN_KV_MTP"), ({SWITCH: "0"}, "FROZEN_KV_MTP"), (ON, "EAGLE")],
)
def test_the_promotion(arm, even, algorithm, environ, resolved):
    arm(**environ)
    made = args(even, speculative_algorithm=algorithm)
    assert made.speculative_algorithm == resolved
    made.check_server_args()  # this one can be served


def test_it_says_so(arm, even, caplog):
    arm(**ON)
    with caplog.at_level(logging.WARNING, "g4debug"):
        args(even)
    (said,) = (r.getMessage() for r in caplog.records if r.name == "g4debug")
    assert (
        said == f"g4debug: {SWITCH}: --speculative-algorithm NEXTN stays EAGLE, not FROZEN_KV_MTP"
    )


def test_an_assistant_that_eagle_cannot_serve_stops_the_start(arm):
    arm(**ON)
    made = args()
    with pytest.raises(SystemExit) as stopped:
        made.check_server_args()
    text = str(stopped.value)
    assert text.startswith(f"g4debug: {SWITCH}=1: this assistant cannot be served by EAGLE: ")
    assert "head dimensions 32 and 64" in text
    assert f"Unset {SWITCH}: SGLang then uses FROZEN_KV_MTP" in text


def test_hidden_size_and_cuda_graphs(arm, even):
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(str(even[1]), trust_remote_code=False)
    assert (config.text_config.hidden_size, config.backbone_hidden_size) == (32, 64)
    assert limits(config, cuda_graphs=False) == []
    (reason,) = limits(config, cuda_graphs=True)
    assert reason.startswith("its hidden size is 32, the target's 64")
    config.text_config.hidden_size = 64
    assert limits(config, cuda_graphs=True) == []


def test_drafts_and_algorithms_that_are_none_of_its_business(arm):
    arm(**ON)
    plain = args(mtp=False)
    plain.check_server_args()
    assert plain.speculative_algorithm is None
    with pytest.raises(ValueError, match="EAGLE3 is not supported"):
        args(speculative_algorithm="EAGLE3")


def test_an_explicit_frozen_kv_mtp_contradicts_it(arm):
    arm(**ON)
    with pytest.raises(SystemExit, match=f"{SWITCH}=1 and .* FROZEN_KV_MTP contradict"):
        args(speculative_algorithm="FROZEN_KV_MTP")


def test_shipped_off(sglang):
    assert FIX.purpose == "experiment"
    assert still_broken() is True
