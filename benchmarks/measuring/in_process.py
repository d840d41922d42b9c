"""SGLang's ModelRunner in this process, on the releases that differ in who prepares it."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any


def model_runner(arguments: dict[str, Any], device: str) -> Any:
    """A ModelRunner on rank 0 of 1. Its pools and backends exist only up to 0.5.13.

    From 0.5.23 on the scheduler publishes the arguments and makes the groups of ranks first.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(**arguments)
    published = _published(args)
    config = ModelConfig.from_server_args(args)
    port = PortArgs.init_new(args).nccl_port
    if published and importlib.util.find_spec("sglang.srt.distributed.bootstrap"):
        from sglang.srt.distributed import bootstrap

        bootstrap.init_parallel_runtime(server_args=args, device=device, dist_port=port)
        bootstrap.init_layer_runtime(model_config=config)
    given = {
        "model_config": config, "mem_fraction_static": args.mem_fraction_static or 0.8,
        "gpu_id": 0, "nccl_port": port, "server_args": args, "tp_rank": 0, "tp_size": 1,
        "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1,
    }  # fmt: skip
    takes = inspect.signature(ModelRunner).parameters
    return ModelRunner(**{name: value for name, value in given.items() if name in takes})


def _published(args: Any) -> bool:
    """Put the arguments in force for this process; True if SGLang has a context for them."""
    if importlib.util.find_spec("sglang.srt.runtime_context"):
        from sglang.srt import runtime_context

        if hasattr(runtime_context, "SpawnRanks"):
            ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
            runtime_context.publish(args, role="scheduler", ranks=ranks)
            return True
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(args)
    return False
