"""Driven by test_toys_engine.py: what transformers says of a toy's answers.

``drive_reference.py MODEL FILE``: the file holds a list of ``{"prompt": [...], "tokens": [...]}``.
Prints, for each, the tokens that transformers would not choose: their places, and by how much their
logit is below the largest.
"""

import json
import sys
from pathlib import Path

MARGIN = 1e-3  # two tokens whose logits differ by less are equally right


def main():
    import torch
    import transformers

    from g4debug.cpu import toys

    target = toys.load(sys.argv[1]).models()[0]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = []
    for found in json.loads(Path(sys.argv[2]).read_text()):
        prompt, answer = found["prompt"], found["tokens"]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        below = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
        wrong.append([(n, x) for n, x in enumerate(below.tolist()) if x > MARGIN])
    loading = {key: sorted(map(str, names)) for key, names in loading.items()}
    print("RESULT", json.dumps({"wrong": wrong, "loading": loading}), flush=True)


if __name__ == "__main__":
    main()
