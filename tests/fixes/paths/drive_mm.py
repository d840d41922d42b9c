"""Driven by test_mm_engine.py, in a process of its own: pictures, films and text, MTP on.

A seeded multimodal TINY with a tiny vision tower, which says of itself that it was trained with
bidirectional attention to images. SGLang's own processor cuts pictures up, and
pads all of them to the same number of patches; what comes cut up already keeps its own.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "repro"))
OUTPUT = 12
PATCH, POOL = 4, 3  # pixels, patches: of a side
TOWER = {"num_hidden_layers": 2, "patch_size": PATCH, "position_embedding_size": 256}


def pictures(*sizes):
    """PIL images of these (width, height), noise of four levels."""
    import numpy
    from PIL import Image

    rng = numpy.random.default_rng(sum(w * h for w, h in sizes))
    return [Image.fromarray(rng.integers(0, 4, (h, w, 3), "uint8") * 85) for w, h in sizes]


def cut_up(*sizes):
    """The same of (width, height) in patches: what a processor makes of them, and their tokens."""
    import torch

    generator = torch.Generator().manual_seed(len(sizes))
    pixels, positions = [], []
    for width, height in sizes:
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        pixels.append(torch.rand(1, width * height, 3 * PATCH**2, generator=generator))
        positions.append(torch.stack([x.reshape(-1), y.reshape(-1)], dim=-1)[None])
    return pixels, positions, [w * h // POOL**2 for w, h in sizes]


def seeing_both_ways(model):
    """Write into the config of a multimodal model how it was trained, as the bigger ones have it.

    SGLang does not read it; it asks for a mask in any case.
    """
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "vision"
    (model / "config.json").write_text(json.dumps(config))


def main(folder):
    import sglang
    import torch
    from harness.tracers import shown
    from workloads import multimodal

    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.server import server_arguments

    rng = random.Random(4)

    def words(n):
        return " ".join(f"w{rng.randrange(multimodal.FIRST_WORD, 512)}" for _ in range(n))

    def about(images, n):
        """A prompt of words around each of the images."""
        return " ".join([f"{words(n)} <|image|>" for _ in images] + [words(n)])

    pixels, positions, counts = cut_up((6, 6), (12, 9), (9, 12), (6, 6))
    done = {"format": "processor_output", "pixel_values": pixels, "image_position_ids": positions}
    text = " ".join(f"{words(4)} <|image>{'<|image|>' * n}<image|>" for n in counts)
    pixels, positions, counts = cut_up((9, 6), (9, 6), (9, 6))
    frames = {
        "format": "processor_output",
        "pixel_values_videos": torch.stack(pixels, dim=1),
        "video_position_ids": torch.stack(positions, dim=1),
    }
    film = f"{words(6)} {'<|video|>' * sum(counts)} {words(6)}"
    wide, tall, square = (96, 24), (20, 90), (48, 48)
    three, five = pictures(wide, square, tall), pictures(tall, square, wide, square, (64, 32))
    other = pictures((48, 49), square)
    shared = f"{words(20)} <|image|> <|image|> {words(1)}"
    # (text, images, videos)
    rounds = {
        "cut up already": [(f"{text} {words(3)}", [done], None), (film, None, [frames])],
        "pictures beside text": [
            (about(three, 7), three, None),
            (words(90), None, None),
            (about(five, 3), five, None),
            (about(five[:1], 5), five[:1], None),
            (words(1), None, None),
        ],
        "the same words, other pictures": [(shared, x, None) for x in (five[:2], other)],
    }
    folder = Path(folder)
    model = multimodal.write(TINY, kv_shared=True, folder=folder, device="cpu", tower=TOWER)
    seeing_both_ways(model)
    arguments = server_arguments(
        (model, folder / "text" / "assistant"),
        mm_attention_backend="triton_attn",
        log_level="info",
    )
    engine = sglang.Engine(**arguments)
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    for name, requests in rounds.items():
        texts, images, videos = zip(*requests, strict=True)
        outputs = engine.generate(
            prompt=list(texts),
            image_data=list(images),
            video_data=list(videos),
            sampling_params=sampling,
            return_logprob=True,
        )
        line = {
            "round": name,
            "tokens": [o["output_ids"] for o in outputs],
            "prompts": [o["meta_info"]["prompt_tokens"] for o in outputs],
            "verifies": [o["meta_info"]["spec_verify_ct"] for o in outputs],
            "logprobs": [[x[0] for x in o["meta_info"]["output_token_logprobs"]] for o in outputs],
        }
        print("RESULT", json.dumps(line), flush=True)
    print("WARNED", json.dumps([status["warnings"] for status in shown().values()]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.exit(0)
