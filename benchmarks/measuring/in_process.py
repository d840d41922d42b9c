"""SGLang's Scheduler in this process: all that computes an answer, without what is around it."""

from __future__ import annotations

import atexit
import importlib.util
import inspect
from array import array
from importlib.metadata import version
from pathlib import Path
from typing import Any


def scheduler(arguments: dict[str, Any]) -> Any:
    """A Scheduler on rank 0 of 1, which makes model, pools, backends and prefix cache itself.

    Its process would make no more than that: it publishes the arguments (from 0.5.23 on), and is
    given the names of sockets. Here nobody reads from those.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(**arguments)
    _publish(args)
    given = {
        "server_args": args, "port_args": PortArgs.init_new(args), "gpu_id": 0, "tp_rank": 0,
        "moe_ep_rank": 0, "pp_rank": 0, "attn_cp_rank": 0, "moe_dp_rank": 0, "dp_rank": None,
    }  # fmt: skip
    takes = inspect.signature(Scheduler).parameters
    unknown = [n for n, p in takes.items() if p.default is p.empty and n not in given]
    if unknown:
        raise SystemExit(
            f"in_process: the Scheduler of SGLang {version('sglang')} asks for "
            f"{', '.join(unknown)}, which are not known here; run_scheduler_process in "
            "sglang/srt/managers/scheduler.py shows what they are in a server."
        )
    made = Scheduler(**{name: value for name, value in given.items() if name in takes})
    # It says in shared memory how busy it is (from 0.5.13 on), and leaves the file there.
    if path := getattr(getattr(made, "load_snapshot_writer", None), "path", None):
        atexit.register(Path(path).unlink)
    return made


def _publish(args: Any) -> None:
    """Put the arguments in force for this process, as run_scheduler_process does."""
    if importlib.util.find_spec("sglang.srt.runtime_context"):
        from sglang.srt import runtime_context

        if hasattr(runtime_context, "SpawnRanks"):
            ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
            runtime_context.publish(args, role="scheduler", ranks=ranks)
            return
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(args)


def request(ids: list[int], items: list[Any], image_token: int) -> Any:
    """What the tokenizer's process sends for a prompt with these pictures; one token is asked for.

    In the ids an ``image_token`` stands for each token of a picture, at the item's offsets.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)
    sampling.normalize(None)
    as_array = "array" in str(TokenizedGenerateReqInput.__annotations__["input_ids"])
    return TokenizedGenerateReqInput(
        rid="one", input_text="", input_ids=array("q", ids) if as_array else ids,
        input_embeds=None, token_type_ids=None,
        mm_inputs=MultimodalProcessorOutput(mm_items=items, im_token_id=image_token),
        sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False,
    )  # fmt: skip


class Prefill:
    """One request after the other through a Scheduler: asked, run up to its token, ended.

    The three are what an event loop without overlap does with a request that comes alone.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        takes = inspect.signature(scheduler.get_next_batch_to_run).parameters
        self._planned = "running_batch" in takes  # not up to 0.5.14
        self.slots: list[int] = []  # where the last one's KV was
        self._batch: Any = None
        self._result: Any = None

    def ask(self, request: Any) -> None:
        """Put the request into the scheduler's queue, with its pictures' hashes in its prompt."""
        self.scheduler.handle_generate_request(request)
        (waiting,) = self.scheduler.waiting_queue
        if reason := waiting.to_finish or waiting.finished_reason:
            raise RuntimeError(f"the scheduler refuses the prompt: {reason.to_json()}")

    def run(self) -> Any:
        """From the queue to the first token; the logits that it was taken from."""
        (waiting,) = self.scheduler.waiting_queue
        self._batch = self._next()
        found = self._batch.extend_num_tokens if self._batch else 0
        if found != len(waiting.origin_input_ids):
            raise RuntimeError(
                f"expected a prefill of the whole prompt, {len(waiting.origin_input_ids)} tokens, "
                f"got {found}: the pools, chunked_prefill_size or max_prefill_tokens are too small"
            )
        self._result = self.scheduler.run_batch(self._batch)
        return self._result.logits_output.next_token_logits

    def _next(self) -> Any:
        if not self._planned:
            return self.scheduler.get_next_batch_to_run()
        plan = self.scheduler.get_next_batch_to_run(
            running_batch=self.scheduler.running_batch, last_batch=self.scheduler.last_batch
        )
        self.scheduler.running_batch = plan.running_batch
        return plan.batch_to_run

    def end(self) -> int:
        """The token. The pools are empty again, so that the next request gets the same pages."""
        (finished,) = self._batch.reqs
        self.slots = self._batch.out_cache_loc.tolist()
        self.scheduler.process_batch_result(self._batch, self._result)
        self._batch = self._result = None
        if not finished.finished() or not self.scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("the request is not at its end after its only token")
        (token,) = finished.output_ids
        return int(token)
