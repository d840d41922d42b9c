"""Driven by test_lossy_ledger.py: rounds of mixed requests on a healthy server, as JSON."""

import json
import sys

from harness.engine import flush
from harness.mixed import engine as arguments
from harness.mixed import requests


def main():
    import sglang

    rounds, count, seed = (int(x) for x in sys.argv[1:4])
    engine = sglang.Engine(**arguments(max_total_tokens=1024))
    served = 0
    try:
        for turn in range(rounds):
            batch = requests(count, seed + turn, longest=200, output=(2, 20))
            outputs = engine.generate(
                input_ids=[list(r.prompt) for r in batch],
                rid=[r.rid for r in batch],
                sampling_params=[
                    {"temperature": 0, "max_new_tokens": r.output, "ignore_eos": True}
                    for r in batch
                ],
            )
            assert [len(o["output_ids"]) for o in outputs] == [r.output for r in batch]
            served += len(outputs)
            flush(engine)
        print("RESULT", json.dumps(served), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
    sys.exit(0)
