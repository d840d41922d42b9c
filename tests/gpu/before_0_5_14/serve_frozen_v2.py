"""Driven by test_frozen_kv_mtp_v2_gpu.py, in a process of its own: ``... RESULT.json``.

E4B's geometry with seeded weights on split backends. First requests one at a time, then many of
different lengths that share prefixes, in pools that not all of them fit into. At last those once
more in the opposite order, which makes other batches of them.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "repro"))


def main():
    import sglang
    from harness.engine import flush
    from harness.mixed import on_gpu

    rng = random.Random(7)

    def tokens(n):
        return [2, *(rng.randrange(4, 500) for _ in range(n - 1))]

    engine = sglang.Engine(
        **on_gpu(
            max_running_requests=24,
            max_total_tokens=16384,
            disable_overlap_schedule=False,
            log_level="info",
        )
    )

    def answers(outputs):
        metas = [o["meta_info"] for o in outputs]
        given = sum(len(o["output_ids"]) for o in outputs)
        # A request of one token is done after its prefill: SGLang says nothing of verifies.
        verifies = [m.get("spec_verify_ct", 0) for m in metas]
        return {
            "tokens": [o["output_ids"] for o in outputs],
            "verifies": verifies,
            # The first token of each is the prefill's.
            "accept_length": (given - len(outputs)) / max(1, sum(verifies)),
        }

    def greedy(n):
        return {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}

    shared = tokens(700)
    prompts = [tokens(60), tokens(900), shared + tokens(30), shared + tokens(90), tokens(1300)]
    alone = [
        engine.generate(input_ids=p, sampling_params=greedy(n))
        for p, n in zip(prompts, (120, 64, 200, 1, 40), strict=True)
    ]
    wanted = []
    for _ in range(96):
        prefix = shared[: rng.randrange(10, 700)] if rng.random() < 0.5 else []
        wanted.append((prefix + tokens(rng.randrange(5, 500)), rng.randint(2, 90)))

    def together(order):
        return engine.generate(
            input_ids=[p for p, _ in order], sampling_params=[greedy(n) for _, n in order]
        )

    many = together(wanted)
    flush(engine)
    turned = together(wanted[::-1])[::-1]
    overlap = not engine.server_args.disable_overlap_schedule
    found = {"alone": answers(alone), "many": answers(many), "turned": answers(turned)}
    print({part: x["accept_length"] for part, x in found.items()}, "overlap:", overlap)
    Path(sys.argv[1]).write_text(json.dumps(found | {"overlap": overlap}))
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
