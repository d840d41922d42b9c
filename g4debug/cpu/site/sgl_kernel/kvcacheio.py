"""The names for copying KV between host and device that SGLang always imports.

None of them works without CUDA: calling one raises an error. They are for hierarchical caching,
which is off on the CPU engine.
"""

from collections.abc import Callable

NAMES = (
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf",
    "transfer_kv_all_layer_lf_ph",
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_direct",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf",
    "transfer_kv_per_layer_ph_lf",
)


def _missing(name: str) -> Callable[..., None]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.kvcacheio.{name} needs CUDA and has no CPU stand-in. "
            "Run without hierarchical caching."
        )

    fail.__name__ = name
    return fail


globals().update({name: _missing(name) for name in NAMES})
