"""Driven by test_mm_encoder.py: a prompt with pictures, in the benchmark's process or in an engine.

``python drive_mm_encoder.py in_process|engine FOLDER``; both print the 20 best first tokens.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in ("benchmarks", "repro")]
IMAGES, SIDE, PATCHES, LENGTH, BEST = 3, 6, 45, 40, 20


def asked(mm_encoder):
    """The items, and the prompt's ids."""
    items = mm_encoder.pictures(IMAGES, SIDE, PATCHES, "cpu", seed=7)
    return items, mm_encoder.prompt(items, SIDE, LENGTH)


def in_process(mm_encoder, model):
    """Through the benchmark's own Scheduler, encoded as SGLang does it."""
    import torch

    prefill = mm_encoder.in_process.Prefill(mm_encoder.scheduler(model, "cpu", None))
    mm_encoder.Ways(prefill.scheduler.tp_worker.model_runner.model).take("alone")
    items, ids = asked(mm_encoder)
    with torch.no_grad():
        prefill.ask(mm_encoder.in_process.request(ids, items, mm_encoder.TOKENS["image_token_id"]))
        logprobs = prefill.run().log_softmax(-1)[0]
        token = prefill.end()
    best = logprobs.topk(BEST)
    return token, best.indices.tolist(), best.values.tolist()


def engine(mm_encoder, model):
    """Through all of an engine's processes; only cutting pictures up is left out."""
    import sglang
    from harness.arguments import as_named_here

    arguments = as_named_here(mm_encoder.arguments(model, "cpu", None))
    started = sglang.Engine(**arguments)
    items, ids = asked(mm_encoder)
    send = mm_encoder.in_process.request(ids, items, mm_encoder.TOKENS["image_token_id"]).mm_inputs
    manager = started.tokenizer_manager
    tokenized = manager._create_tokenized_object

    def with_pictures(*args, **kwargs):
        found = tokenized(*args, **kwargs)
        found.mm_inputs = send
        return found

    manager._create_tokenized_object = with_pictures
    output = started.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=BEST,
    )
    (best,) = output["meta_info"]["output_top_logprobs"]
    started.shutdown()
    return output["output_ids"][0], [x[1] for x in best], [x[0] for x in best]


def main(where, folder):
    import mm_encoder
    from workloads import multimodal

    from g4debug.cpu.geometry import TINY

    # An engine's tokenizer process wants to cut pictures up: all files of a model are there.
    tower = mm_encoder.TOWERS["tiny"]
    model = multimodal.write(TINY, True, Path(folder), device="cpu", tower=tower)
    token, best, logprobs = {"in_process": in_process, "engine": engine}[where](mm_encoder, model)
    print("RESULT", json.dumps({"token": token, "best": best, "logprobs": logprobs}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit(0)
