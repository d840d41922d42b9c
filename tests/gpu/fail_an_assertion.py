"""Driven by test_device_assert_gpu.py: a kernel of PyTorch's gets an index that its table has not.

``fail_an_assertion.py HOW FOLDER``: the flight recorder meets the error and dumps into FOLDER. The
tracer, the trap and the dump are the real ones, and so is the error; scheduler and models stand in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import device_asserts
from g4debug.tracers.flight_recorder.tracer import FlightRecorder
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap

VOCABULARY, HALF, WIDE = 4096, 2048, 2560
CUDA = torch.device("cuda")


class Draft(torch.nn.Module):
    """It was given the first half of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.target_embed_weight = torch.zeros(HALF, WIDE, device=CUDA, dtype=torch.bfloat16)


class Target(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, WIDE, device=CUDA)


class Runner:
    def __init__(self, model: torch.nn.Module, is_draft_worker: bool) -> None:
        self.model, self.is_draft_worker = model, is_draft_worker
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY)


def ids(count: int) -> torch.Tensor:
    return torch.arange(count, device=CUDA) % HALF + HALF


def embedding(table: torch.Tensor, count: int) -> object:
    return torch.nn.functional.embedding(ids(count), table)


def replayed(table: torch.Tensor, count: int) -> object:
    """Sound when it is captured; the ids change before the replay."""
    mine = ids(count) - HALF
    torch.nn.functional.embedding(mine, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.nn.functional.embedding(mine, table)
    mine += HALF
    graph.replay()
    return out


def compiled(table: torch.Tensor, count: int) -> object:
    look_up = torch.compile(lambda i, t: torch.nn.functional.embedding(i, t) * 2)
    look_up(ids(count) - HALF, table)
    return look_up(ids(count), table)


def written(table: torch.Tensor, count: int) -> object:
    table[ids(count)] = 1
    return table


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "embedding": lambda t: embedding(t, 4096),
    "embedding-small": lambda t: embedding(t, 3),
    "embedding-narrow": lambda t: embedding(t[:, :5].contiguous(), 4096),
    "graph": lambda t: replayed(t, 64),
    "compiled": lambda t: compiled(t, 64),
    "index": lambda t: t[ids(4096)],
    "put": lambda t: written(t, 4096),
    "gather": lambda t: torch.gather(t, 0, ids(4096)[:, None]),
    "scatter": lambda t: torch.zeros(1, HALF, device=CUDA).scatter_(
        1, ids(8)[None], torch.ones(1, 8, device=CUDA)
    ),
}


def main(how: str, folder: Path) -> None:
    settings = Settings(debug=True, debug_dir=folder)
    recorder = Recorder(settings.steps)
    trap = Trap(settings, Describer(recorder))
    tracer = FlightRecorder(Context("flight-recorder", Hooks(), settings, recorder, trap))
    runners = Runner(Target(), False), Runner(Draft(), True)
    for runner in runners:
        tracer.seen.runner(runner)
    recorder.attach(SimpleNamespace(server_args=SimpleNamespace(tp_size=1)))
    tracer.after_scheduler_init(None)
    try:
        WAYS[how](runners[1].model.target_embed_weight)
        torch.cuda.synchronize()
    except RuntimeError:
        there = device_asserts.any_in(tracer.printed.text())
        print("THE TEXT WAS THERE WITH THE ERROR:", there, flush=True)
        tracer.on_loop_exception()
    else:
        print("NOTHING FAILED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
