"""A real Gemma4DecoderLayer outside of a server. Only attention is a stand-in.

It is the layer of a toy geometry, with seeded weights of sensible size; ``RadixAttention`` calls
the backend of the batch, and :class:`Backend` answers with q, so that no KV pool is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import releases
import torch

TOKENS = 5


class Backend:
    """Stands in for an attention backend: gives back q."""

    def forward(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return q.reshape(len(q), -1)


class Batch:
    """Stands in for a ForwardBatch: what RadixAttention reads of it."""

    def __init__(self) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.attn_backend, self.forward_mode = Backend(), ForwardMode.DECODE
        if releases.has("sglang.srt.layers.layer_boundary"):  # the residual is the batch's there
            from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

            residual_batch.start(self)


def count_launches(monkeypatch: Any, modules: Iterable[ModuleType]) -> dict[str, int]:
    """How often each kernel is launched, from now on; a module's launcher has its name."""
    counted: dict[str, int] = {}
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        real = getattr(module, name)

        def spy(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    return counted


@contextmanager
def one_process(model_path: str, device: str = "cpu", **arguments: Any) -> Iterator[None]:
    """Process groups of one process, and server arguments, as SGLang's layers ask for them."""
    from sglang.srt import server_args as module
    from sglang.srt.distributed import parallel_state

    args = module.ServerArgs(
        model_path=model_path,
        device=device,
        skip_tokenizer_init=True,
        attention_backend="triton",  # for a CPU SGLang chooses one that 0.5.13 refuses
        **arguments,
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with releases.configuration_kept():
        releases.publish(args)
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo",
            distributed_init_method=f"tcp://127.0.0.1:{port}",
        )  # fmt: skip
        try:
            parallel_state.initialize_model_parallel()
            with forward_context():
                yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def forward_context() -> AbstractContextManager[Any]:
    """From 0.5.13 on RadixAttention asks the forward's context for the backend, not the batch."""
    if not releases.has("sglang.srt.model_executor.forward_context"):
        return nullcontext()
    from sglang.srt.model_executor import forward_context as module

    context: AbstractContextManager[Any] = module.forward_context(module.ForwardContext(Backend()))
    return context


def layer_stack() -> AbstractContextManager[Any]:
    """What layers are built in from 0.5.23 on: each is told which ones are before and after it."""
    if not releases.has("sglang.srt.layers.layer_boundary"):
        return nullcontext()
    from sglang.srt.layers.layer_boundary import factories

    stack: AbstractContextManager[Any] = factories.layer_stack()
    return stack


def config(geometry: Any, **other: Any) -> Any:
    """SGLang's config object of a toy geometry, with some fields replaced."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**(replace(geometry).target_config() | other))


def layer(geometry: Any, number: int = 0, **other: Any) -> Any:
    """Layer ``number`` in eval mode; call it inside of ``one_process``."""
    from sglang.srt.models.gemma4_causal import Gemma4DecoderLayer

    with layer_stack():
        made = Gemma4DecoderLayer(number, config(geometry, **other)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(number)
    for _, p in made.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(1 + 0.1 * noise if p.dim() == 1 else noise / p.shape[-1] ** 0.5)
    made.layer_scalar.fill_(0.75)
    if made.enable_moe_block:
        _scale_on_cpu(made.router.norm)
    return made


def _scale_on_cpu(norm: Any) -> None:
    """0.5.13 folds the router's scale into its norm's weight; on a CPU that norm ignores it, on
    CUDA it does not. In 0.5.12 the weight is ones."""
    sglangs = norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = sglangs(x)
        return normed if x.is_cuda else normed * norm.weight

    norm.forward = forward


def inputs(geometry: Any, tokens: int = TOKENS) -> dict[str, Any]:
    """Arguments of the layer's forward, fresh each time: SGLang writes into hidden_states."""
    generator = torch.Generator().manual_seed(tokens)
    everyones = torch.randn(tokens, geometry.layers, geometry.ple or 1, generator=generator)
    return {
        "positions": torch.arange(tokens),
        "hidden_states": torch.randn(tokens, geometry.hidden, generator=generator),
        "per_layer_input": everyones[:, 0] if geometry.ple else None,
        "forward_batch": Batch(),
    }
