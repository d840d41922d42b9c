"""An SGLang plugin of the engine tests: changes what one part of a step hands to the next.

It puts its functions *inside* of g4debug's hooks, as another plugin or a changed SGLang would be.
When ``ROWS`` requests decode together and some steps are behind them, the scheduler forks a child
for each case, one after the other. In the child the case changes one thing, once, and the requests
go on to their end, or to a finding. A child talks to nobody: it writes what came of it into
``MEDDLER_FOLDER/CASE.json``. So one engine serves many cases.

The cases are the functions below with ``@case``; ``MEDDLER_CASES`` names those that run.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS, STEPS = 3, 6  # how many requests decode, and how many steps before the first fork
AGAIN = "again"  # the request that asks the prefix cache for what the first one left there
ANYTIME: set[str] = set()  # places at which a case strikes that request
Meddle = Callable[..., Any]
CASES: dict[str, tuple[str, str, Meddle]] = {}  # name -> (place, "before" or "after", what it does)

SPEC = "sglang.srt.speculative"
DRAFT_WORKER = f"{SPEC}.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker"
PLACES = {
    "draft": f"{DRAFT_WORKER}.draft",
    "prepared": f"{SPEC}.eagle_utils.eagle_prepare_for_verify",
    "kernel": f"{SPEC}.eagle_utils.verify_tree_greedy_func",
    "sampled": f"{SPEC}.eagle_utils.eagle_sample",
    "verify": f"{SPEC}.eagle_worker_v2.EAGLEWorkerV2.verify",
    "draft_extend": f"{DRAFT_WORKER}._draft_extend_for_decode",
    "worker": f"{SPEC}.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2.forward_batch_generation",
    "stash": "sglang.srt.managers.overlap_utils.FutureMap.stash",
    "publish": "sglang.srt.managers.overlap_utils.FutureMap.publish",
    "gather": "sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras",
    "lengths": "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu",
    "copied": "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
    "sampler": "sglang.srt.model_executor.model_runner.ModelRunner.sample",
    "target": "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    "forward": "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "run_batch": "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "process": "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    "resolved": "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    "ended": "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._handle_finish_state_updated_req",
    "output": "sglang.srt.managers.scheduler_components.output_streamer"
    ".SchedulerOutputStreamer.stream_output",
}
# The same places of another worker, whose name MEDDLER_WORKER is.
LAYERED = f"{SPEC}.multi_layer_eagle_worker_v2.MultiLayerEagle"
WORKERS = {
    "multi-layer EAGLE": {
        "draft": f"{LAYERED}DraftWorker.draft",
        "verify": f"{LAYERED}WorkerV2.verify",
        "draft_extend": f"{LAYERED}DraftWorker._draft_extend_for_decode",
        "worker": f"{LAYERED}WorkerV2.forward_batch_generation",
    }
}
PLACES |= WORKERS.get(os.environ.get("MEDDLER_WORKER", ""), {})


def case(place: str, when: str = "after") -> Callable[[Meddle], Meddle]:
    def declare(meddle: Meddle) -> Meddle:
        CASES[meddle.__name__.replace("_", "-")] = (place, when, meddle)
        return meddle

    return declare


# --- what the cases are made of -------------------------------------------------------------------


def swapped(tensor: torch.Tensor, width: int = 1) -> torch.Tensor:
    """A copy in which rows 0 and 1 are exchanged; each has ``width`` numbers."""
    copy = tensor.clone()
    copy[:width], copy[width : 2 * width] = tensor[width : 2 * width], tensor[:width]
    assert not torch.equal(copy, tensor), "both rows are the same, so nothing was changed"
    return copy


def changed(tensor: torch.Tensor, at: int, by: int = 1) -> torch.Tensor:
    copy = tensor.clone()
    copy[at] = copy[at] + by if copy[at] + by >= 0 else 7
    return copy


def rows_of(batch: Any) -> list[int]:
    return [getattr(r, "kv", r).req_pool_idx for r in batch]


WIDTH = 4  # tokens of a verify
FAR = 1 << 20  # further than any row, length or token

# --- from the draft to the verify ----------------------------------------------------------------


@case("draft")
def draft_bonus(made, *args):
    made.draft_token = changed(made.draft_token, WIDTH)


@case("draft")
def draft_token(made, *args):
    made.draft_token = changed(made.draft_token, WIDTH + 2)


@case("draft")
def draft_rows(made, *args):
    made.draft_token = swapped(made.draft_token, WIDTH)


@case("draft")
def positions_all(made, *args):
    made.positions = made.positions + 1


@case("draft")
def positions_row(made, *args):
    made.positions[WIDTH : 2 * WIDTH] += 1


@case("draft")
def positions_rows(made, *args):
    made.positions = swapped(made.positions, WIDTH)


@case("draft")
def positions_one(made, *args):
    made.positions[WIDTH + 1] -= 1


@case("draft")
def tree_child(made, *args):
    made.retrieve_next_token[1, 0] = -1


@case("draft")
def tree_index(made, *args):
    made.retrieve_index[:2] = made.retrieve_index[[1, 0]]


@case("prepared")
def fed_bonus(made, *args, **kwargs):
    made[0].input_ids = changed(made[0].input_ids, WIDTH)


@case("prepared")
def fed_rows(made, *args, **kwargs):
    made[0].input_ids = swapped(made[0].input_ids, WIDTH)


@case("prepared")
def fed_positions(made, *args, **kwargs):
    made[0].positions = made[0].positions + 1


# --- within the verify ---------------------------------------------------------------------------


@case("sampled", "before")
def candidates(verify_input, *args, **kwargs):
    """After the target's forward, in place: the target has seen another token."""
    verify_input.draft_token[WIDTH + 1] += 1


@case("kernel")
def kernel_lens(found, *args, **kwargs):
    _predict, _index, correct = found
    correct[1] += 1 if correct[1] < WIDTH - 1 else -1


@case("kernel")
def kernel_bonus(found, *args, **kwargs):
    predict, _index, correct = found
    predict[WIDTH + int(correct[1])] += 1


@case("kernel")
def kernel_both(found, *args, **kwargs):
    """One token more, and the accepted index agrees."""
    _predict, index, correct = found
    row = next(i for i in range(ROWS) if correct[i] < WIDTH - 1)
    correct[row] += 1
    index[row, correct[row]] = row * WIDTH + correct[row]


@case("sampled")
def sample_lens(found, *args, **kwargs):
    _predict, lens, _index = found
    lens[1] += 1 if lens[1] < WIDTH else -1


@case("sampled")
def sample_rows(found, *args, **kwargs):
    found[0][:] = swapped(found[0], WIDTH)


@case("sampled")
def sample_index(found, *args, **kwargs):
    found[2][:2] = found[2][[1, 0]]


@case("verify")
def result_lens(result, *args, **kwargs):
    result.accept_lens = changed(result.accept_lens, 1, 1 if result.accept_lens[1] < WIDTH else -1)


@case("verify")
def result_lens_far(result, *args, **kwargs):
    result.accept_lens = changed(result.accept_lens, 1, FAR)


@case("verify")
def result_lens_and_lengths(result, *args, **kwargs):
    by = 1 if result.accept_lens[1] < WIDTH else -1
    result.accept_lens = changed(result.accept_lens, 1, by)
    result.new_seq_lens = changed(result.new_seq_lens, 1, by)


@case("verify")
def result_rows(result, *args, **kwargs):
    result.next_token_ids = swapped(result.next_token_ids, WIDTH)


@case("verify")
def result_rows_and_bonus(result, *args, **kwargs):
    """Tokens and bonus tokens, so that the next step goes on from what was put out."""
    result.next_token_ids = swapped(result.next_token_ids, WIDTH)
    ends = torch.arange(ROWS) * WIDTH + result.accept_lens - 1
    result.next_draft_input.bonus_tokens = result.next_token_ids[ends]


@case("verify")
def result_bonus(result, *args, **kwargs):
    result.next_draft_input.bonus_tokens = changed(result.next_draft_input.bonus_tokens, 1)


@case("verify")
def result_hidden(result, *args, **kwargs):
    result.logits_output.hidden_states[: 2 * WIDTH] = swapped(
        result.logits_output.hidden_states[: 2 * WIDTH], WIDTH
    )


# --- to the next step ----------------------------------------------------------------------------


@case("draft_extend", "after")
def seed_bonus(none, worker, batch, result, **kwargs):
    result.next_draft_input.bonus_tokens = swapped(result.next_draft_input.bonus_tokens)


@case("draft_extend", "after")
def seed_hidden(none, worker, batch, result, **kwargs):
    result.next_draft_input.hidden_states = swapped(result.next_draft_input.hidden_states)


@case("worker")
def left_hidden(result, *args, **kwargs):
    result.next_draft_input.hidden_states = swapped(result.next_draft_input.hidden_states)


@case("worker")
def left_bonus(result, *args, **kwargs):
    result.next_draft_input.bonus_tokens = swapped(result.next_draft_input.bonus_tokens)


@case("stash", "before")
def stash_bonus(future_map, indices, payload):
    payload.bonus_tokens = swapped(payload.bonus_tokens)


@case("stash", "before")
def stash_one(future_map, indices, payload):
    payload.bonus_tokens = changed(payload.bonus_tokens, 1)


@case("stash", "before")
def stash_hidden(future_map, indices, payload):
    payload.hidden_states = swapped(payload.hidden_states)


def exchange(buffer: torch.Tensor, indices: torch.Tensor) -> None:
    a, b = (int(i) for i in indices[:2])
    buffer[[a, b]] = buffer[[b, a]]


@case("stash")
def map_tokens(none, future_map, indices, payload):
    exchange(future_map.output_tokens_buf, indices)


@case("stash")
def map_one(none, future_map, indices, payload):
    future_map.output_tokens_buf[indices[1]] += 1


@case("stash")
def map_hidden(none, future_map, indices, payload):
    exchange(future_map.hidden_states_buf, indices)


@case("publish")
def map_lengths(none, future_map, indices, lens, *args):
    exchange(future_map.new_seq_lens_buf, indices)


@case("publish")
def map_length(none, future_map, indices, lens, *args):
    future_map.new_seq_lens_buf[indices[1]] -= 1


@case("stash")
def map_rows(none, future_map, indices, payload):
    """All that there is in two rows."""
    for name in ("output_tokens_buf", "hidden_states_buf", "new_seq_lens_buf"):
        buffer = getattr(future_map, name)
        if buffer is not None:  # not each worker hands hidden states to the next step
            exchange(buffer, indices)


@case("gather")
def gathered_bonus(none, future_map, batch):
    batch.spec_info.bonus_tokens = swapped(batch.spec_info.bonus_tokens)


@case("gather")
def gathered_hidden(none, future_map, batch):
    batch.spec_info.hidden_states = swapped(batch.spec_info.hidden_states)


@case("lengths", "before")
def future_indices(future_map, batch, *args, **kwargs):
    batch.spec_info.future_indices = swapped(batch.spec_info.future_indices)


# --- what a forward is given ----------------------------------------------------------------------


@case("forward")
def forward_rows(made, *args, **kwargs):
    made.req_pool_indices = swapped(made.req_pool_indices)


@case("forward")
def forward_row_far(made, *args, **kwargs):
    made.req_pool_indices = changed(made.req_pool_indices, 1, FAR)


@case("run_batch", "before")
def batch_row_far(scheduler, batch):
    batch.req_pool_indices = changed(batch.req_pool_indices, 1, FAR)


@case("run_batch", "before")
def batch_row_negative(scheduler, batch):
    batch.req_pool_indices = batch.req_pool_indices.clone()
    batch.req_pool_indices[1] = -1


@case("forward")
def forward_length(made, *args, **kwargs):
    made.seq_lens = changed(made.seq_lens, 1)


@case("stash")
def map_far(none, future_map, indices, payload):
    """No token: the process would end in the first layer."""
    future_map.output_tokens_buf[indices[1]] = FAR


@case("draft")
def draft_far(made, *args):
    made.draft_token = changed(made.draft_token, WIDTH + 2, FAR)


@case("forward")
def forward_position(made, *args, **kwargs):
    made.positions = changed(made.positions, 1)


# --- without speculation -------------------------------------------------------------------------


@case("sampler")
def sampled_rows(tokens, *args):
    tokens[:] = swapped(tokens)


@case("sampler")
def sampled_one(tokens, *args):
    tokens[1] += 1


@case("target")
def target_rows(result, *args, **kwargs):
    result.next_token_ids = swapped(result.next_token_ids)


@case("target")
def target_one(result, *args, **kwargs):
    result.next_token_ids = changed(result.next_token_ids, 1)


@case("target", "before")
def input_rows(worker, batch, *args, **kwargs):
    batch.input_ids = swapped(batch.input_ids)


@case("target", "before")
def input_one(worker, batch, *args, **kwargs):
    batch.input_ids[1] += 1


@case("target", "before")
def device_length(worker, batch, *args, **kwargs):
    batch.seq_lens = changed(batch.seq_lens, 1, -1)


# --- on the host ---------------------------------------------------------------------------------


@case("copied")
def host_rows(none, result, *args, **kwargs):
    width = WIDTH if result.accept_lens is not None else 1
    result.next_token_ids = swapped(result.next_token_ids, width)


@case("process", "before")
def host_one(scheduler, batch, result):
    width = WIDTH if result.accept_lens is not None else 1
    result.next_token_ids = changed(result.next_token_ids, width)


@case("process", "before")
def host_lens(scheduler, batch, result):
    result.accept_lens = changed(result.accept_lens, 1, 1 if result.accept_lens[1] < WIDTH else -1)


@case("resolved")
def kept_rows(kept, *args):
    a, b = kept[0], kept[1]
    n = min(len(a), len(b))
    a[:n], b[:n] = b[:n], a[:n]


@case("output", "before")
def output_one(streamer, reqs, *args, **kwargs):
    reqs[1].output_ids[-1] += 1


@case("ended")
def output_end(none, processor, request, *args, **kwargs):
    """The last token that leaves, of the first request that ends."""
    if request.finished_reason is None:
        return False
    request.output_ids[request.finished_len - 1] += 1
    return True


@case("output", "before")
def output_rows(streamer, reqs, *args, **kwargs):
    a, b = reqs[0].output_ids, reqs[1].output_ids
    a[-1], b[-1] = b[-1], a[-1]


@case("run_batch", "before")
def committed(scheduler, batch, *args, **kwargs):
    getattr(batch.reqs[1], "kv", batch.reqs[1]).kv_committed_len += 1


@case("process")
def committed_after(none, scheduler, batch, result):
    getattr(batch.reqs[1], "kv", batch.reqs[1]).kv_committed_len += 1


OWN = frozenset(CASES)  # another plugin may add its own


# --- how they get there --------------------------------------------------------------------------


class State:
    """Of this process. name: the case that this child runs, '' in the scheduler itself."""

    def __init__(self) -> None:
        self.name, self.place, self.when, self.meddle = "", "", "", None
        self.batch = None  # that runs, or whose result is processed
        self.step = self.fired = 0
        self.forked = False
        self.requests: list[Any] = []
        self.first = b""  # the first message of the tokenizer, pickled
        self.sent: dict[str, list[int]] = {}  # what has left, by request
        self.wanted = os.environ["MEDDLER_CASES"].split(",")
        self.folder = Path(os.environ["MEDDLER_FOLDER"])

    def at(self, place: str, when: str, *args: Any, **kwargs: Any) -> None:
        if (place, when) == ("output", "before"):
            self.sent |= {str(r.rid): list(r.output_ids) for r in args[1]}
        suits = place in ANYTIME or self.suits()
        if (place, when) != (self.place, self.when) or self.fired or not suits:
            return
        from g4debug import plugin

        self.fired = plugin.in_force.recorder.step
        if self.meddle(*args, **kwargs) is False:  # there is nothing of that kind here
            self.fired = 0

    def suits(self) -> bool:
        """Each of the requests is in this decode."""
        batch = self.batch
        return batch is not None and len(batch.reqs) == ROWS and self.decodes

    decodes = False

    def asked_again(self) -> list[Any]:
        """The first request once more, for a case that strikes what the prefix cache gives it.

        For what it gives to the prefix cache, its prompt is another one: backwards.
        """
        if self.place not in ANYTIME or not self.first:
            return []
        message, self.first = pickle.loads(self.first), b""
        found = next(iter(getattr(message, "batch", [message])))
        found.rid = AGAIN
        if self.place == "insert":
            found.input_ids = found.input_ids[::-1]
        return [found]

    def report(self, finding: Any, error: str = "") -> None:
        words = None
        if finding is not None:
            at = finding.location
            words = {
                "check": finding.check, "kind": finding.kind, "site": finding.site,
                "headline": finding.headline, "expected": finding.expected, "got": finding.got,
                "cause": finding.cause, "request": at.request, "row": at.row, "column": at.column,
                "step": at.step, "runner": at.runner,
            }  # fmt: skip
        tokens = {str(r.rid): list(r.output_ids) for r in self.requests}
        rids = [str(r.rid) for r in self.requests]
        from g4debug import plugin

        told = plugin.in_force.recorder.status.findings
        found = {"finding": words, "tokens": tokens, "rids": rids, "error": error,
                 "fired": self.fired, "sent": self.sent,
                 "told": [list(kind) for kind in told]}  # fmt: skip
        (self.folder / f"{self.name or 'sound'}.json").write_text(json.dumps(found))


def wrap(state: State, place: str) -> None:
    *owners, name = PLACES[place].split(".")
    for n in range(len(owners), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(owners[:n]))
            break
        except ModuleNotFoundError:
            continue
    for part in owners[n:]:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def around(*args: Any, **kwargs: Any) -> Any:
        if place == "worker":
            kwargs.pop("pp_proxy_tensors", None)  # upstream #40155: without overlap it dies of it
        state.at(place, "before", *args, **kwargs)
        result = real(*args, **kwargs)
        state.at(place, "after", result, *args, **kwargs)
        return result

    setattr(owner, name, around)
    for module in list(sys.modules.values()):  # those that have it by name
        if getattr(module, "__name__", "").startswith("sglang") and (
            module.__dict__.get(name) is real
        ):
            setattr(module, name, around)


def register() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import ipc_channels, request_receiver

    importlib.import_module(f"{SPEC}.frozen_kv_mtp_worker_v2")
    state = State()
    for place in PLACES:
        wrap(state, place)
    run, process, loop = (
        Scheduler.run_batch,
        Scheduler.process_batch_result,
        Scheduler.run_event_loop,
    )
    receive = request_receiver.SchedulerRequestReceiver.recv_requests

    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        state.batch, state.decodes = batch, batch.forward_mode.is_decode()
        state.step += len(batch.reqs) == ROWS and state.decodes
        state.scheduler = scheduler
        if state.name:
            state.requests += [r for r in batch.reqs if r.rid == AGAIN and r not in state.requests]
        return run(scheduler, batch, *args, **kwargs)

    def process_result(scheduler: Any, batch: Any, result: Any) -> Any:
        state.batch, state.decodes = batch, batch.forward_mode.is_decode()
        return process(scheduler, batch, result)

    def recv_requests(receiver: Any, *args: Any, **kwargs: Any) -> Any:
        if state.name:
            again = state.asked_again()
            if not again and all(r.finished() for r in state.requests):
                state.report(None)
                os._exit(0)
            return again
        if state.step >= STEPS and not state.forked:
            state.forked = True
            for name in state.wanted:
                fork(state, name)
                if state.name:
                    return []
        found = receive(receiver, *args, **kwargs)
        if found and not state.first:
            state.first = pickle.dumps(found[0])
        return found

    def run_event_loop(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return loop(scheduler, *args, **kwargs)
        except BaseException as e:
            if not state.name:
                raise
            finding = getattr(e, "finding", None)
            state.report(finding, "" if finding else traceback.format_exc())
            os._exit(0)

    Scheduler.run_batch, Scheduler.process_batch_result = run_batch, process_result
    Scheduler.run_event_loop = run_event_loop
    request_receiver.SchedulerRequestReceiver.recv_requests = recv_requests
    send = ipc_channels.SenderWrapper.send_output

    def send_output(*args: Any, **kwargs: Any) -> Any:
        return None if state.name else send(*args, **kwargs)

    ipc_channels.SenderWrapper.send_output = send_output


def fork(state: State, name: str) -> None:
    """Run a case in a child, or no case at all for "sound"; returns in both processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    state.requests = list(state.batch.reqs)
    state.name = name
    if name != "sound":
        state.place, state.when, state.meddle = CASES[name]
