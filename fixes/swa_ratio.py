"""Sets ``swa_full_tokens_ratio=0.15`` for a Gemma-4 with experts (seed PRs #2 and #7).

SGLang divides the KV memory by one ratio, which is 0.8 for every model: for 100 tokens of the full
pool the SWA pool has 80. A sliding layer only reads a window. So with a mixture of experts, which
leaves much memory for KV, long requests wait for the full pool while the SWA pool is half empty. A
dense Gemma-4 keeps 0.8: its weights leave less memory, and with 0.15 the seed saw the SWA pool run
out (PR #7).

0.15 is not right for every load; ``g4debug pools`` computes the ratio for yours.

A ratio that the user gave is always kept, even if it is 0.8. SGLang does not say whether the user
gave it, but it can be found out. Until ``ServerArgs`` is pickled for the scheduler, a default is
the same object as in the class, both with the command line (argparse passes its default on
unconverted) and with ``Engine(**kwargs)``. What a user writes is another object of equal value. So
the fix acts in the process that launches the server, before ``ServerArgs.check_server_args``. The
ratio of a ``ServerArgs`` that was unpickled counts as the user's and is kept. Passing
``ServerArgs.swa_full_tokens_ratio`` itself counts as the default. From 0.5.18 on the default is
None, which stands for 0.8.

From 0.5.14 on SGLang sizes the SWA pool by the number of requests and reads no ratio if the radix
cache is off and ``max_running_requests`` is given (sglang #28755). The fix then changes nothing.
"""

from __future__ import annotations

import ast
import logging
import textwrap
from typing import Any

from g4debug.fixes.base import Fix, before
from g4debug.fixes.source import exists, source

ID = "swa-ratio"
RATIO = 0.15
FIELD = "swa_full_tokens_ratio"
ARCHITECTURES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
_CONFIGURATORS = "sglang.srt.model_executor.pool_configurator"
_REQUEST_CAPS = (  # 0.5.21 renamed it
    f"{_CONFIGURATORS}.SWAChunkCapPoolConfigurator",
    f"{_CONFIGURATORS}.SWARequestCapPoolConfigurator",
)
_MODEL_DEFAULTS = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
_GEMMA4_DEFAULTS = (
    "sglang.srt.arg_groups.overrides._gemma4_overrides",
    "sglang.srt.arg_groups.model_overrides.gemma4",
)

logger = logging.getLogger("g4debug")


def before_check(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Runs before ``ServerArgs.check_server_args``, in the process that launches the server."""
    verdict = choose(server_args)
    if verdict is None:
        return
    ratio, why = verdict
    if ratio != in_force(server_args, FIELD):
        put(server_args, ratio)
        logger.info("g4debug: %s: setting %s to %s: %s", ID, FIELD, ratio, why)
    else:
        logger.info("g4debug: %s: keeping %s=%s: %s", ID, FIELD, ratio, why)


def in_force(server_args: Any, name: str) -> Any:
    """An argument as SGLang will read it. From 0.5.21 on ServerArgs stay as they were typed."""
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return getattr(server_args, name)
    return resolution_result(server_args, name)


def put(server_args: Any, ratio: float) -> None:
    """Let SGLang read this ratio."""
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        setattr(server_args, FIELD, ratio)
        return
    declare_resolution(server_args, f"g4debug {ID}", **{FIELD: ratio})


def _model_config(server_args: Any) -> Any:
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def choose(server_args: Any) -> tuple[float, str] | None:
    """The ratio for these ServerArgs, and the reason. None for a model that is no Gemma-4.

    It reads the model's config as SGLang does.
    """
    config = _model_config(server_args)
    if not set(config.hf_config.architectures or ()) & {*ARCHITECTURES}:
        return None
    ratio: float = in_force(server_args, FIELD)
    if not is_default(server_args):
        return ratio, "the user gave it"
    experts = getattr(config.hf_text_config, "num_experts", None) or 0
    if experts <= 0:
        return ratio, "this is a dense Gemma-4"
    if in_force(server_args, "disable_hybrid_swa_memory"):
        return ratio, "there is no SWA pool (disable_hybrid_swa_memory)"
    if sized_by_requests(server_args):
        return ratio, "SGLang does not read it: it sizes the SWA pool by max_running_requests"
    return RATIO, f"this Gemma-4 has {experts} experts; g4debug pools tells what your load needs"


def is_default(server_args: Any) -> bool:
    """True if nobody gave a ratio: the value is the same object as in the class."""
    typed = server_args.swa_full_tokens_ratio
    default: object = type(server_args).swa_full_tokens_ratio
    return typed is None or typed is default


def sized_by_requests(server_args: Any) -> bool:
    """True if SGLang (0.5.14 and later) sizes the SWA pool by the number of requests."""
    if (
        not in_force(server_args, "disable_radix_cache")
        or in_force(server_args, "max_running_requests") is None
        or in_force(server_args, "chunked_prefill_size") is None
    ):
        return False
    # The source is read: an import would load the pools into the process that launches the server.
    return any(exists(place) for place in _REQUEST_CAPS)


def still_broken() -> bool:
    """True if SGLang's defaults for Gemma-4 say nothing about the ratio."""
    known, texts = 0, []
    try:
        texts += gemma4_branches(source(_MODEL_DEFAULTS))
        known += 1
    except AttributeError:
        pass  # later releases have a model's defaults in another place
    for place in _GEMMA4_DEFAULTS:
        try:
            texts.append(source(place))
            known += 1
        except (ImportError, AttributeError):
            continue
    if not known:
        raise AttributeError(f"neither {_MODEL_DEFAULTS} nor {' nor '.join(_GEMMA4_DEFAULTS)}")
    return not any(FIELD in text for text in texts)


def gemma4_branches(function: str) -> list[str]:
    """The bodies of all ``if`` statements of a function's source that ask for Gemma-4."""
    return [
        "\n".join(ast.unparse(statement) for statement in node.body)
        for node in ast.walk(ast.parse(textwrap.dedent(function)))
        if isinstance(node, ast.If) and "Gemma4" in ast.unparse(node.test)
    ]


FIX = Fix(
    id=ID,
    title="a Gemma-4 with experts gets swa_full_tokens_ratio=0.15, unless you give a ratio",
    seed="PRs #2 and #7",
    upstream="none up to 0.5.23; #28755 sizes the SWA pool by requests if the radix cache is off",
    needs=">=0.5.12,<0.5.16 or ==0.5.23",
    still_broken=still_broken,
    hooks=(before("server_args.check", before_check),),
    purpose="performance",
)
