"""What takes minutes on a healthy server: compiling, loading, a request to the server itself.

It is told from the functions that the main thread is in, and from the compilers that this process
has started. A frame that stays on the stack while compiled code *runs* is none of these: a kernel
that never ends would be taken for a compilation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

# Of a place as ``report.main_thread`` has it: ``triton/compiler/compiler.py:280 compile``. Some
# functions of that file are on the way of a launch, and may wait for the device.
_COMPILES = r"""
    triton/compiler/(?!compiler\.py)\S+:
  | triton/compiler/compiler\.py:\d+\ (?!_init_handles|run|runner|launch_metadata|__getitem__)
  | triton/backends/\S*compiler\.py:
  | triton/runtime/(?:build|cache|_async_compile)\.py:
  | triton/runtime/jit\.py:\d+\ (?:_do_compile|preload|warmup)$
  | triton/runtime/autotuner\.py:\d+\ (?:_bench|benchmark|check_disk_cache)$
  | torch/_dynamo/convert_frame\.py:
  | torch/_inductor/compile_fx\.py:\d+\ \w*(?:compile_fx|codegen)\w*$
  | torch/_inductor/(?:codecache|async_compile|cpp_builder|autotune_process|select_algorithm)\.py
      :\d+\ (?!__call__|run|call)
  | torch/_inductor/runtime/triton_heuristics\.py
      :\d+\ \w*(?:precompile|make_launcher|bench|autotune_to)
  | torch/utils/(?:cpp_extension|file_baton)\.py:
  | torch/cuda/_utils\.py:\d+\ _nvrtc_compile
  | tvm_ffi/cpp/
  | flashinfer/jit/
  | flashinfer/autotuner\.py:\d+\ _profile
  | deep_gemm/jit/compiler\.py:
  | deep_gemm/jit_kernels/tuner\.py:
  | sglang/srt/layers/deep_gemm_wrapper/compile_utils\.py:\d+\ \w*compile
  | tilelang/(?:engine|cache|autotuner)/
  | tilelang/jit/\S+:\d+\ \w*compile
  | cutlass/(?:base_dsl|cutlass_dsl)/compiler\.py:
"""
_OTHERS = {
    "capturing CUDA graphs": r"sglang/srt/\S*graph\S*:\d+\ _?capture\w*$",
    "loading weights": r"""
        sglang/srt/\S+:\d+\ (?:load_model|load_weights\w*|update_weights?_\w+)$
      | safetensors/
      | huggingface_hub/
    """,
    "importing a module": r"(?:importlib/)?<frozen\ importlib",
    "writing a profile": r"torch/(?:profiler|autograd)/profiler\.py:\d+\ (?:stop|export|__exit__)",
    "writing a dump of g4debug": r"g4debug/dumps/",
}
KNOWN = {
    what: re.compile(f"(?:{places})", re.VERBOSE)
    for what, places in {"compiling kernels": _COMPILES, **_OTHERS}.items()
}
INPUT = " process_input_requests"  # SGLang's function for all that comes to a scheduler
# What it calls for each request, which is over in a moment.
AT_ONCE = re.compile(
    r" (?:handle_(?:batch_)?(?:generate|embedding)_request|abort_request|open_session"
    r"|close_session|pause_generation|continue_generation|get_\w+|set_internal_state)$"
)
COMPILERS = {"nvcc", "cicc", "ptxas", "fatbinary", "ninja", "cc1plus", "c++", "g++", "gcc", "clang"}


def doing(places: Sequence[str]) -> str:
    """What the main thread is doing, and where; '' if it is nothing that may take minutes.

    places: its frames, outermost first, as :func:`report.main_thread` has them.
    """
    for place in reversed(places):
        for what, pattern in KNOWN.items():
            if pattern.match(place):
                return f"{what} in {place}"
    own = _own_request(places)
    if own:
        return f"carrying out a request to the server itself in {own}"
    compiler = next(_compilers(), "")
    return f"waiting for a compiler, as it seems: it has started {compiler}" if compiler else ""


def _own_request(places: Sequence[str]) -> str:
    """Where it carries out what was asked of the server itself: weights, a profile, a flush."""
    at = next((n for n, place in enumerate(places) if place.endswith(INPUT)), len(places))
    inside = places[at + 1 :]
    if any(AT_ONCE.search(place) for place in inside):
        return ""
    # SGLang's dispatcher calls the function of the request.
    return next((p for p in inside if not p.endswith(" __call__")), "")


def _compilers(pid: int | None = None, deep: int = 4) -> Iterator[str]:
    """The names of compilers that this process has started and that still run."""
    for child in _children(os.getpid() if pid is None else pid):
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:  # it has ended meanwhile
            continue
        if name in COMPILERS:
            yield name
        if deep:
            yield from _compilers(child, deep - 1)


def _children(pid: int) -> Iterator[int]:
    """[] also where the kernel does not tell."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, path.read_text().split())
        except (OSError, ValueError):
            continue
