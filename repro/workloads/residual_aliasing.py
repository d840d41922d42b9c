"""A variant of residual_aliasing: a real Gemma-4 forward that captures hidden states.

It compares the states that the model captured with copies that were made when each layer was
entered.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.arguments import as_named_here
from harness.engine import made
from harness.workload import Workload

from g4debug.fixes.source import exists
from workloads import e4b_trtllm_mtp

TOKENS = 200


def cpu(requests: int | None) -> Workload:
    from g4debug.cpu.server import engine_arguments

    return Workload(1, (TOKENS, TOKENS), 0, 0, engine_arguments(mtp=False), timeout=300)


def cuda(requests: int | None) -> Workload:
    return e4b_trtllm_mtp.cuda(4).without_mtp().given(disable_cuda_graph=True)


DEVICES = {"cpu": cpu, "cuda": cuda}


def main(device: str, result: Path, workload: str, requests: int) -> None:
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if device == "cpu":
        write_in_place()
    runner, text_model = load(made(device, workload, requests).engine)
    captured = list(range(1, len(text_model.layers)))
    runner.model.set_eagle3_layers_to_capture([i - 1 for i in captured])

    truth: dict[int, torch.Tensor] = {}
    handed: list[torch.Tensor] = []
    for i in captured:
        text_model.layers[i].register_forward_pre_hook(
            lambda layer, args, kwargs, i=i: truth.__setitem__(i, kwargs["hidden_states"].clone()),
            with_kwargs=True,
            prepend=True,  # before any other hook can hand the layer something else
        )
    text_model.register_forward_hook(lambda model, args, output: handed.extend(output[1]))
    prefill(runner)

    worst, wrong = 1.0, []
    for i, got in zip(captured, handed, strict=True):
        cosine = torch.nn.functional.cosine_similarity(truth[i].float(), got.float(), dim=-1)
        worst = min(worst, float(cosine.min()))
        if not torch.equal(truth[i], got):
            wrong.append(i)
    result.write_text(json.dumps({"captured": captured, "wrong": wrong, "cosine": worst}))


def write_in_place() -> None:
    """Stand-in for sgl_kernel.fused_add_rmsnorm(x, residual): sum into residual, norm into x.

    SGLang's CPU norm gives the same numbers in new tensors, so a CPU alone never shows this.
    """
    from sglang.srt.layers.layernorm import RMSNorm

    native = RMSNorm.forward_native  # what SGLang takes on a CPU without AMX

    def forward_native(self: Any, x: Any, residual: Any = None, *args: Any) -> Any:
        if residual is None:
            return native(self, x)
        normed, total = native(self, x, residual, *args)
        return x.copy_(normed), residual.copy_(total)

    RMSNorm.forward_native = RMSNorm.forward_cpu = forward_native


def load(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """SGLang's ModelRunner on a small Gemma-4, and its text model."""
    from sglang.srt.server_args import PortArgs, ServerArgs

    server_args = ServerArgs(
        **{**as_named_here(arguments), "skip_tokenizer_init": False, "log_level": "error"}
    )
    publish(server_args)
    runner, _ = one_batch().load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    runner = runner.torch_runner
    text_model = getattr(runner.model, "language_model", None) or runner.model.model
    return runner, text_model


def publish(server_args: Any) -> None:
    """Makes them this process's, as SGLang's benchmark of one batch does before it loads."""
    from sglang.srt import server_args as module

    if not exists("sglang.srt.runtime_context.SpawnRanks"):
        module.set_global_server_args_for_scheduler(server_args)
        return
    from sglang.srt.runtime_context import SpawnRanks, publish

    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))


def one_batch() -> Any:
    """SGLang's benchmark of one batch, which loads a model without a server."""
    moved = "sglang.benchmark.one_batch"  # since 0.5.18
    return importlib.import_module(moved if exists(moved) else "sglang.bench_one_batch")


def prefill(runner: Any) -> None:
    prompt = [2, *(4 + i % 400 for i in range(TOKENS - 1))]
    benchmark = one_batch()
    requests = benchmark.prepare_synthetic_inputs_for_latency_test(1, TOKENS, [prompt])
    benchmark.extend(requests, runner)
