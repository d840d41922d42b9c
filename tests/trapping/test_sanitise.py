"""No secret gets into a dump, wherever it stands; and what helps to find a bug does."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from g4debug import discovery
from g4debug.trapping import sanitise
from g4debug.trapping.sanitise import DEFAULT, SET, arguments, environment, model

SECRET = "s3cr3tVALUE"
HOME, ROOT, USERS = ("/" + name for name in ("home", "root", "Users"))


@pytest.fixture(scope="module")
def parse(_sglang_imported):
    """``parse(*command line)``: SGLang's own ServerArgs from a real command line."""
    from sglang.srt.server_args import ServerArgs

    def parsed(*line: str):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        asked = parser.parse_args(["--model-path", "dummy", *line])
        # Not from_cli_args: its checks want a real model, and what they change is not judged here.
        aliases = {"tp_size": "tensor_parallel_size", "dp_size": "data_parallel_size"}
        if hasattr(ServerArgs, "__struct_fields__"):  # 0.5.23's checks come later
            given = {f: getattr(asked, f) for f in fields(ServerArgs) if hasattr(asked, f)}
            return ServerArgs(**given)
        args = object.__new__(ServerArgs)
        for field in fields(ServerArgs):
            name = aliases.get(field, field)
            value = getattr(asked, name, getattr(asked, field, getattr(args, field, None)))
            object.__setattr__(args, field, value)
        return args

    return parsed


def fields(kind) -> tuple[str, ...]:
    """The names of all arguments."""
    struct = getattr(kind, "__struct_fields__", None)
    return tuple(f.name for f in dataclasses.fields(kind)) if struct is None else struct


SECRETIVE = (
    ("--api-key", SECRET),
    ("--admin-api-key", SECRET),
    ("--ssl-keyfile", f"{HOME}/{SECRET}/key.pem"),
    ("--ssl-certfile", f"/etc/{SECRET}/cert.pem"),
    ("--ssl-keyfile-password", SECRET),
    ("--json-model-override-args", json.dumps({"hub": {"api_key": SECRET}})),
    ("--model-loader-extra-config", json.dumps({"aws_session": SECRET})),
    ("--hicache-storage-backend-extra-config", json.dumps({"master": f"u:{SECRET}@host"})),
    ("--kv-events-config", json.dumps({"endpoint": f"tcp://u:{SECRET}@host:1"})),
    ("--otlp-traces-endpoint", f"https://u:{SECRET}@host"),
    ("--download-dir", f"{HOME}/{SECRET}/models"),
    ("--served-model-name", SECRET),
    ("--chat-template", f"{HOME}/{SECRET}/template.jinja"),
    ("--model-path", f"{HOME}/{SECRET}/gemma-4"),
    ("--model-path", f"/data/{SECRET}/models--google--gemma-4-E4B-it/snapshots/0123456789ab"),
    ("--model-path", f"s3://id:{SECRET}@bucket/gemma-4?X-Amz-Signature={SECRET}"),
    ("--tokenizer-path", f"~/{SECRET}/tokenizer/"),
    ("--speculative-draft-model-path", f"./{SECRET}/gemma-4-assistant"),
    ("--log-level", f"hf_{SECRET}"),  # shown, but for what it says
    ("--log-level", f"https://me:{SECRET}@host"),
    ("--log-level", f"info,password={SECRET}"),
)


@pytest.mark.parametrize("line", SECRETIVE)
def test_no_argument_tells_a_secret(parse, line):
    different, same = arguments(parse(*line))
    assert SECRET not in repr((different, same))
    name = line[0].removeprefix("--").replace("-", "_")
    assert name in different


def test_every_argument_is_told_at_least_by_name(parse):
    args = parse("--api-key", SECRET)
    different, same = arguments(args)
    assert {*different, *same} == {*fields(type(args))}
    assert not different.keys() & same.keys()
    assert different["api_key"] == SET
    assert same["admin_api_key"] == DEFAULT
    assert same["ssl_keyfile"] == DEFAULT


def test_what_helps_is_told_with_its_value(parse):
    sizes = "cuda_graph_bs" if "cuda_graph_bs" in fields(type(parse())) else "cuda_graph_bs_decode"
    different, same = arguments(
        parse(
            *("--model-path", "google/gemma-4-E4B-it", "--page-size", "64", "--dp-size", "2"),
            *("--enable-dp-attention", "--enable-hierarchical-cache", "--hicache-ratio", "3.5"),
            *("--chunked-prefill-size", "4096", "--disaggregation-mode", "decode"),
            *("--" + sizes.replace("_", "-"), "1", "2", "4", "--attention-backend", "trtllm_mha"),
        )
    )
    expected = {
        "model_path": "google/gemma-4-E4B-it",
        "page_size": 64,
        "dp_size": 2,
        "enable_dp_attention": True,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 3.5,
        "chunked_prefill_size": 4096,
        "disaggregation_mode": "decode",
        sizes: "1 2 4",
        "attention_backend": "trtllm_mha",
    }
    assert {k: different.get(k) for k in expected} == expected
    assert same["enable_mixed_chunk"] is False
    assert same["tp_size"] == 1


def test_the_list_holds_no_argument_that_may_name_a_place_or_a_person(parse):
    """A path, an address, a template or a JSON text is no value out of a fixed list."""
    doubtful = ("path", "dir", "addr", "host", "url", "config", "template", "key", "name", "file")
    named = {*fields(type(parse()))}
    wrong = {a for a in sanitise.ARGUMENTS & named if any(a.endswith(d) for d in doubtful)}
    assert wrong == set()


def test_arguments_that_are_no_dataclass():
    class Args:
        def __init__(self):
            self.page_size, self.api_key, self.token = 64, SECRET, SECRET

    assert arguments(Args()) == ({"page_size": 64, "api_key": SET, "token": SET}, {})
    assert arguments(None) == ({}, {})


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it"),
        (f"{HOME}/alice/models/gemma-4/", "gemma-4"),
        (f"{ROOT}/.cache/huggingface/hub/models--google--gemma-4/snapshots/0123456789ab/",
         "google/gemma-4@01234567"),
        ("../alice/gemma", "gemma"),
        ("s3://bucket/team/gemma?token=x", "gemma"),
        ("gemma", "gemma"),
        ("", ""),
    ],
)  # fmt: skip
def test_of_a_path_only_the_last_part_is_shown(path, shown):
    assert model(path) == shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_API_KEY", SECRET),
        ("SGLANG_hf_token", SECRET),
        ("SGLANG_Passwd", SECRET),
        ("NCCL_AUTH", SECRET),
        ("SGLANG_CREDENTIALS", SECRET),
        ("G4DEBUG_SECRET", SECRET),
        ("CUDA_BEARER", SECRET),
        ("SGLANG_ENDPOINT", f"https://me:{SECRET}@host/x"),
        ("SGLANG_ENDPOINT", f"https://host/x?access_token={SECRET}"),
        ("SGLANG_EXTRA", json.dumps({"a": {"apiKey": SECRET}})),
        ("SGLANG_EXTRA", f"hf_{SECRET}"),
        ("SGLANG_EXTRA", "x" * 500 + SECRET),
        ("G4DEBUG_X", f"http://u:{SECRET}@h"),
    ],
)
def test_no_variable_tells_a_secret(name, value):
    assert environment({name: value}) == {name: SET}


@pytest.mark.parametrize(
    "name", ["HOME", "sglang_api_key", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB"]
)
def test_of_other_variables_not_even_the_name_is_told(name):
    assert environment({name: SECRET}) == {}


def test_what_helps_of_the_environment_is_told():
    told = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "TORCH_LOGS": "+dynamo",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_INTERPRET": "1",
        "SGLANG_ENABLE_SPEC_V2": "1",
        "G4DEBUG_FAULTS": "seed=7;page-oob=5%3*corrupt(1)@layer=4;stale-swa-state=on",
        "G4DEBUG_MODE": "log",
    }
    assert environment({**told, "PATH": "/bin"}) == told


@pytest.mark.parametrize("fault", discovery.names("fault"))
def test_no_fault_s_name_is_a_secret(fault):
    """A replay injects the dump's faults again, so it has to know them."""
    told = {"G4DEBUG_FAULTS": f"seed=7;page-oob=5%3*on; {fault} = 1*on@mode=decode"}
    assert environment(told) == told


def test_what_is_no_fault_in_their_variable_stays_a_secret():
    for value in ("token=abc", "my-token-oob=abc", "page-oob=on;hf_token=abc", "token-oob=key=abc"):
        assert environment({"G4DEBUG_FAULTS": value}) == {"G4DEBUG_FAULTS": SET}, value


def test_a_home_folder_names_nobody():
    got = environment({"SGLANG_TRTLLM_MHA_DEBUG_DIR": f"{HOME}/alice/dumps"})
    assert got == {"SGLANG_TRTLLM_MHA_DEBUG_DIR": "~/dumps"}
    assert environment({"TRITON_CACHE_DIR": f"{ROOT}/x:{USERS}/bob"}) == {
        "TRITON_CACHE_DIR": "~/x:~"
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/mnt/users/alice/cache", "…/cache"),
        ("/data/alice/a:/scratch/bob/b", "…/a:…/b"),
        ("/usr/local/cuda-13.0", "/usr/local/cuda-13.0"),
        ("/tmp/dumps/a", "/tmp/dumps/a"),
        ("10.1.2.3", "<address>"),
        ("tcp://10.1.2.3:5000", "tcp://<address>:5000"),
        ("127.0.0.1", "127.0.0.1"),
        ("1.2.3", "1.2.3"),
        ("Bearer abc", SET),
    ],
)
def test_a_value_names_no_place_and_no_machine(value, shown):
    assert environment({"SGLANG_X": value}) == {"SGLANG_X": shown}


def test_a_number_or_a_switch_is_shown_under_any_name_that_is_no_secrets():
    class Args:
        def __init__(self):
            self.brand_new_switch, self.new_size, self.new_rate = True, 7, 0.5
            self.api_key_count, self.new_name = 3, "somebody"

    different, _ = arguments(Args())
    assert different == {
        "brand_new_switch": True,
        "new_size": 7,
        "new_rate": 0.5,
        "api_key_count": SET,
        "new_name": SET,
    }
