"""Lists the lookups that SGLang makes in a step, and the known facts about each index and table.

Nothing is read from the device, which may be dead. The shapes of tensors are host facts. Known are
the indices that SGLang keeps in Python: the tokens of each request, its row and its lengths. They
are read once, when the scheduler has died. Only weak references to batches and models
(:class:`Seen`) are noted before.

Which lookups there are was read off SGLang, for the releases of docs/supported.md. It is no list of
all of them: the model's experts and a LoRA have some, too, and so does every plugin.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from g4debug.findings.record import Lookup, Step
from g4debug.hooking import targets
from g4debug.hooking.resolved import server_argument

BATCHES = 3  # SGLang has two on their way with overlap scheduling
EXTEND = "EXTEND"
TOKENS = 1 << 24  # of requests that are looked through; more would take seconds


class Seen:
    """The models and the last batches of this process, without keeping them alive."""

    def __init__(self) -> None:
        self._runners: list[weakref.ref[Any]] = []
        self._batches: deque[weakref.ref[Any]] = deque(maxlen=BATCHES)

    def runner(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """A ``ModelRunner`` is being made. The scheduler may not know it before it has died."""
        self._runners.append(weakref.ref(runner))

    def batch(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """This ``ScheduleBatch`` is about to run."""
        self._batches.append(weakref.ref(batch))

    @property
    def runners(self) -> list[Any]:
        return [found for ref in self._runners if (found := ref()) is not None]

    def requests(self, scheduler: Any) -> list[Any]:
        """The requests of the last batches and of the running one, each once."""
        batches = [ref() for ref in self._batches]
        batches += [getattr(scheduler, name, None) for name in ("last_batch", "running_batch")]
        found: dict[int, Any] = {}
        for batch in batches:
            found.update((id(r), r) for r in getattr(batch, "reqs", None) or ())
        return list(found.values())


class Host:
    """The host's knowledge when the scheduler has died.

    unfinished: the recorded steps that the device may not have finished, oldest first. whole: they
    are all recorded. rank: the tensor-parallel one, -1 if not known.
    """

    def __init__(
        self, scheduler: Any, seen: Seen, steps: Iterable[Step], finished: int, rank: int = -1
    ) -> None:
        self.scheduler, self.rank = scheduler, rank
        self.unfinished = [step for step in steps if step.step > finished]
        self.whole = bool(self.unfinished) and self.unfinished[0].step == finished + 1
        self.requests = seen.requests(scheduler)
        self.target: Any = next((r for r in seen.runners if not _is_draft(r)), None)
        self.draft: Any = next((r for r in seen.runners if _is_draft(r)), None)
        self.args = getattr(scheduler, "server_args", None)

    @property
    def exact(self) -> bool:
        """True if the host made all indices: prefills alone are under way.

        In a decode step SGLang takes tokens, lengths and rows from what the device computed.
        """
        return self.whole and all(step.forward_mode == EXTEND for step in self.unfinished)

    @property
    def vocabulary(self) -> int:
        """Tokens of the vocabulary, -1 if not known."""
        for owner in (self.scheduler, self.target, self.draft):
            size = getattr(getattr(owner, "model_config", None), "vocab_size", None)
            if isinstance(size, int):
                return size
        return -1

    def size(self, name: str) -> int:
        """A number of the server's arguments, 0 if it is not set."""
        found = server_argument(self.args, name)
        return found if isinstance(found, int) else 0

    def text_tokens(self) -> tuple[int, int]:
        """The smallest and the largest token id of the requests; (0, -1) if there is none.

        Requests with images or sound are left out: SGLang puts hashes in place of their tokens, and
        takes them out again before it looks anything up.
        """
        lows, highs, room = [], [], TOKENS
        for request in self.requests:
            if getattr(request, "multimodal_inputs", None) is not None:
                continue
            for ids in (request.origin_input_ids, request.output_ids):
                room -= len(ids)
                if len(ids) and room >= 0:
                    lows.append(min(ids))
                    highs.append(max(ids))
        return (min(lows), max(highs)) if lows else (0, -1)

    @property
    def some_left_out(self) -> bool:
        """True if not all of the tokens are in ``text_tokens``."""
        if any(getattr(r, "multimodal_inputs", None) is not None for r in self.requests):
            return True
        return sum(len(r.origin_input_ids) + len(r.output_ids) for r in self.requests) > TOKENS


def lookups(host: Host) -> list[Lookup]:
    """All lookups of the table below, not judged. One that cannot be read says why."""
    found = []
    for make in (
        target_embedding, per_layer_embedding, draft_embedding, centroids, rope, rows_of_requests,
        future_rows, mapping, full_pool, swa_pool, accepted, penalties, stop_tokens,
    ):  # fmt: skip
        try:
            found += [lookup for lookup in make(host) if lookup is not None]
        except Exception as e:  # of a release that keeps something elsewhere
            name = f"the lookup {make.__name__.replace('_', ' ')}"
            note = f"its table could not be read: {type(e).__name__}: {e}"[:200]
            found.append(Lookup(name, "not known", "indices", note=note))
    return found


Found = Iterator[Lookup | None]


def target_embedding(host: Host) -> Found:
    model = getattr(host.target, "model", None)
    for name, module in _modules(model, "embed_tokens"):
        never = ""
        if _size(module, "tp_size") > 1:  # VocabParallelEmbedding
            never = "ids outside of this rank's part of the vocabulary are masked before"
        low, high = host.text_tokens()
        exact = host.exact and not host.some_left_out and high >= low
        if not exact and host.vocabulary > 0:
            low, high = min(low, 0), max(high, host.vocabulary - 1)
        yield Lookup(
            "the target's token embedding", _file(model), "token ids", ("embedding",),
            _rows(module.weight), low, high, exact, never, f"module {name}",
        )  # fmt: skip
        return


def per_layer_embedding(host: Host) -> Found:
    model = getattr(host.target, "model", None)
    for name, module in _modules(model, "embed_tokens_per_layer"):
        masks = type(model).__name__.startswith("Gemma4")
        yield Lookup(
            "the per-layer embedding", _file(model), "token ids", ("embedding",),
            _rows(module.weight), 0, host.vocabulary - 1,
            never="ids that it does not have are replaced by 0 before" if masks else "",
            note=f"module {name}",
        )  # fmt: skip
        return


def draft_embedding(host: Host) -> Found:
    """The lookup of the draft's tokens in its embedding.

    A Gemma-4 assistant was given the target's table (``set_embed_and_head``). A target with tensor
    parallelism may have given it only this rank's part of the vocabulary. Other drafts have an
    embedding of their own.
    """
    model = getattr(host.draft, "model", None)
    if model is None:
        return
    never = ""
    if hasattr(model, "target_embed_weight"):
        if model.target_embed_weight is None:  # not given yet, so nothing was looked up in it
            return
        rows = _rows(model.target_embed_weight)
    else:
        module = next((module for _, module in _modules(model, "embed_tokens")), None)
        if module is None:
            return
        rows = _rows(module.weight)
        if _size(module, "tp_size") > 1:
            never = "ids outside of this rank's part of the vocabulary are masked before"
    size, vocabulary, note = host.size("tp_size"), host.vocabulary, ""
    if 0 <= rows < vocabulary and not never:
        note = f"the vocabulary has {vocabulary:,} tokens, and the draft gets ids of all of them"
        if size > 1 and rows == -(-vocabulary // size):
            which = (
                f"TP rank {host.rank} of {size}" if host.rank >= 0 else f"one of {size} TP ranks"
            )
            note = f"it was given the part of the vocabulary of {which}, not the whole; {note}"
    yield Lookup(
        "the draft's token embedding", _file(model), "token ids", ("embedding",), rows, 0,
        vocabulary - 1, never=never, note=note,
    )  # fmt: skip


def centroids(host: Host) -> Found:
    model = getattr(host.draft, "model", None)
    if getattr(model, "token_ordering", None) is not None:
        yield Lookup(
            "the scatter of the draft's logits to tokens", _file(model), "token_ordering",
            ("gather",), host.vocabulary, note="the indices are in the draft's checkpoint",
        )  # fmt: skip


def rope(host: Host) -> Found:
    """The positions of the target and the draft in the shortest of their tables."""
    tables = [
        (_rows(module.cos_sin_cache), module)
        for runner in (host.target, host.draft)
        if getattr(runner, "model", None) is not None
        for module in runner.model.modules()
        if hasattr(getattr(module, "cos_sin_cache", None), "shape")
    ]
    if not tables:
        return
    rows, module = min(tables, key=lambda x: x[0])
    low, high = 0, -1
    for step in host.unfinished:
        more = 0 if step.forward_mode == EXTEND else host.size("speculative_num_draft_tokens")
        lengths = step.seq_lens or step.committed  # with overlap SGLang may not have lengths yet
        high = max([high, *(n + max(more, 1) - 1 for n in lengths)])
    if host.exact:
        high -= 1  # the last token of a prompt of n tokens is at n - 1
    yield Lookup(
        "the rotary embedding", _file(module), "positions", ("embedding", "index"), rows, low, high,
        host.exact, note="most of SGLang's kernels for it assert nothing",
    )  # fmt: skip


def rows_of_requests(host: Host) -> Found:
    pool = getattr(host.scheduler, "req_to_token_pool", None) or getattr(
        host.target, "req_to_token_pool", None
    )
    if pool is not None:
        low, high = _rows_in_use(host)
        yield Lookup(
            "req_to_token", _file(pool), "req_pool_indices", ("index",), _rows(pool.req_to_token),
            low, high, host.exact and high >= low,
            note=f"each row has {pool.req_to_token.shape[1]:,} tokens",
        )  # fmt: skip


def future_rows(host: Host) -> Found:
    future = getattr(host.scheduler, "future_map", None)
    for name in ("output_tokens_buf", "token_ids_buf"):
        table = getattr(future, name, None)
        if table is not None:
            low, high = _rows_in_use(host) if name == "output_tokens_buf" else (0, -1)
            yield Lookup(
                "the FutureMap", _file(future), "rows", ("index",), _rows(table), low, high,
                note=f"its table {name}",
            )  # fmt: skip
            return


def mapping(host: Host) -> Found:
    allocator: Any = getattr(host.scheduler, "token_to_kv_pool_allocator", None)
    table = getattr(allocator, "full_to_swa_index_mapping", None)
    if table is not None:
        yield Lookup(
            "full_to_swa_index_mapping", _file(allocator), "locations", ("index",), _rows(table),
            0, int(allocator.size_full) + int(allocator.page_size) - 1,
        )  # fmt: skip


def full_pool(host: Host) -> Found:
    yield _pool(host, "full", ("full_kv_pool", ""), ("size_full", "size"))


def swa_pool(host: Host) -> Found:
    yield _pool(host, "swa", ("swa_kv_pool",), ("size_swa",))


def _pool(host: Host, name: str, pools: Sequence[str], sizes: Sequence[str]) -> Lookup | None:
    kv = getattr(host.target, "token_to_kv_pool", None)
    pool = next((found for p in pools if (found := getattr(kv, p, None) if p else kv)), None)
    allocator: Any = getattr(host.scheduler, "token_to_kv_pool_allocator", None)
    size = next((n for s in sizes if isinstance(n := getattr(allocator, s, None), int)), None)
    buffers = getattr(pool, "k_buffer", None)
    if not buffers or size is None:
        return None
    return Lookup(
        f"the write of KV to the {name} pool", _file(pool), "out_cache_loc", ("index",),
        _rows(buffers[0]), 0, size + int(allocator.page_size) - 1,
        note="kv-writes checks every one of them" if name == "full" else "",
    )  # fmt: skip


def accepted(host: Host) -> Found:
    drafts = host.size("speculative_num_draft_tokens")
    steps = [step for step in host.unfinished if step.forward_mode != EXTEND]
    if not drafts or not steps:
        return
    rows = min(len(step.rids) for step in steps) * drafts
    yield Lookup(
        "the accepted tokens of a verify", targets.file("verify.accept"), "accept_index",
        ("index",), rows, 0, rows - 1,
    )  # fmt: skip


def penalties(host: Host) -> Found:
    names = ("frequency_penalty", "presence_penalty")
    asked = any(_asks(r, name, 0.0) for r in host.requests for name in names) or any(
        _asks(r, "repetition_penalty", 1.0) for r in host.requests
    )
    if host.requests:
        yield Lookup(
            "the penalties for repeated tokens", "sampling/penaltylib", "sampled token ids",
            ("gather",), host.vocabulary, 0, host.vocabulary - 1,
            never="" if asked else "no request asks for a penalty",
        )  # fmt: skip


def stop_tokens(host: Host) -> Found:
    """SGLang forbids them until a request has ``min_new_tokens``. A user may name any number."""
    asking = [r for r in host.requests if _asks(r, "min_new_tokens", 0)]
    if not host.requests:
        return
    ids = [
        int(n)
        for request in host.requests
        for n in getattr(request.sampling_params, "stop_token_ids", None) or ()
    ]
    size = host.vocabulary
    yield Lookup(
        "the stop tokens of min_new_tokens", "sampling/penaltylib/min_new_tokens.py",
        "stop_token_ids", ("gather",), size + 1 if size >= 0 else -1,
        min([0, *ids]), max([size, *ids]), exact=True,
        never="" if asking else "no request asks for min_new_tokens",
    )  # fmt: skip


def _asks(request: Any, name: str, default: float) -> bool:
    return bool(getattr(request.sampling_params, name, default) != default)


def _rows_in_use(host: Host) -> tuple[int, int]:
    """The smallest and the largest row of ``req_to_token``, (0, -1) if there is none."""
    rows = [row for step in host.unfinished for row in step.rows if row >= 0]
    return (min(rows), max(rows)) if rows else (0, -1)


def _modules(model: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The modules of a model that are called so, with a weight, outermost first."""
    if model is None:
        return
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == name and getattr(module, "weight", None) is not None:
            yield path, module


def _is_draft(runner: Any) -> bool:
    return bool(getattr(runner, "is_draft_worker", False))


def _rows(tensor: Any) -> int:
    return int(tensor.shape[0])


def _size(owner: Any, name: str) -> int:
    found = getattr(owner, name, 0)
    return found if isinstance(found, int) else 0


def _file(thing: Any) -> str:
    """The file that a thing's class is in, below ``sglang/srt``."""
    module = type(thing).__module__
    if module.startswith("sglang.srt."):
        return module.removeprefix("sglang.srt.").replace(".", "/") + ".py"
    return module
