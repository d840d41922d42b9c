"""Driven by test_layer_paths_engine.py: GEOMETRY in a process of its own, on the CPU engine."""

import json
import random
import sys
from pathlib import Path

LENGTHS = (70, 1, 33)
OUTPUT = 12


def main(name, folder):
    import sglang

    from g4debug.cpu import geometry
    from g4debug.cpu.models import tiny_models, write
    from g4debug.cpu.server import server_arguments

    rng = random.Random(5)
    prompts = [[2, *(rng.randrange(4, 512) for _ in range(n - 1))] for n in LENGTHS]
    tiny = name == "tiny"
    models = tiny_models() if tiny else write(geometry.TINY_MOE, Path(folder) / "moe")
    arguments = server_arguments(models, mtp=tiny, log_level="info", skip_tokenizer_init=True)
    engine = sglang.Engine(**arguments)
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    answer = [
        {
            "tokens": o["output_ids"],
            "logprobs": [x[0] for x in o["meta_info"]["output_token_logprobs"]],
        }
        for o in outputs
    ]
    print("RESULT", json.dumps(answer), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit(0)
