"""Driven by test_pool_leak_engine.py: a disaggregated decode server that reserves pages ahead.

SGLang's own "fake" transfer backend stands for the prefill server. Many more requests come than may
run, so that rows and pages are reserved for requests that no batch has seen.
"""

import inspect
import json
import sys

from harness.mixed import engine as arguments
from harness.mixed import requests

# FROZEN_KV_MTP cannot run there: SGLang 0.5.12.post1 gives the worker an EagleDraftInput.
WITHOUT_MTP = {
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
}
# Newer releases keep what a retracted request had in a pool of the host, pinned by CUDA's runtime.
BACKUP = {"disaggregation_decode_retraction_backup": "cpu_tensor"}


def main():
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    backup = {name: value for name, value in BACKUP.items() if name in known}
    engine = sglang.Engine(
        **arguments(
            disaggregation_mode="decode",
            disaggregation_transfer_backend="fake",
            max_total_tokens=4096,
            **WITHOUT_MTP,
            **backup,
        )
    )
    try:
        batch = requests(24, 6, longest=200, output=(2, 20))
        outputs = engine.generate(
            input_ids=[list(r.prompt) for r in batch],
            rid=[r.rid for r in batch],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": r.output, "ignore_eos": True} for r in batch
            ],
            bootstrap_host=["2.2.2.2"] * len(batch),  # SGLang's FAKE_BOOTSTRAP_HOST
            bootstrap_port=[None] * len(batch),
            bootstrap_room=list(range(len(batch))),
        )
        got = [len(o["output_ids"]) for o in outputs]
        print("RESULT", json.dumps([got, [r.output for r in batch]]), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
