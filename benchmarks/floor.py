"""The least time that a decode step of FROZEN_KV_MTP can take: its bytes and its arithmetic.

    python benchmarks/floor.py [--model E4B] [--context 500] [--bandwidth 4.3] [--rate 780]
        [--batches 1,8,64]

A step is one verify of the target and the draft's steps behind it. In the floor each weight that a
pass needs is read once a pass, the KV of each layer that owns some is read once a pass, for all
layers that share it, and each multiplication is done at the rate of a large matrix product. A pass
takes at least the longer of the two, because reading and multiplying may overlap; passes follow one
another. Activations, norms, writes of KV and launches count as nothing.

--bandwidth is in TB/s and --rate in TFLOP/s. The defaults were read on a H200: a copy from device
to device, counting bytes read and written, and a matrix product in bfloat16 of 8192 x 8192 x 8192.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from measuring import models, options

from g4debug.cpu.geometry import Geometry
from g4debug.cpu.server import MTP

BYTES = 2  # of a number in bfloat16
VERIFY, DRAFT = "verify", "a step of the draft"


@dataclass(frozen=True)
class Part:
    """What a pass has to read and to multiply. flops: multiplications and additions."""

    passed: str
    what: str
    bytes: int
    flops: int


def projections(g: Geometry, layer: int) -> int:
    """The numbers in the matrices of a layer of the target that a decode multiplies with.

    A layer that shares KV has matrices for K and V in the checkpoint, and needs none.
    """
    width, dim = g.hidden, g.dim(layer)
    owned = 2 * g.kv_heads * dim * width if g.kv_owner(layer) == layer else 0
    return 2 * g.heads * dim * width + owned + 3 * width * g.intermediate + 2 * width * g.ple


def of_target(g: Geometry) -> int:
    """The numbers in all matrices that a verify multiplies with."""
    layers = sum(projections(g, layer) for layer in range(g.layers))
    return layers + g.layers * g.ple * g.hidden + g.vocab * g.hidden


def of_draft(g: Geometry) -> int:
    """The same of a step of the draft, but for its head.

    It has no K and V of its own: it reads the target's.
    """
    width = g.assistant_hidden
    layers = sum(
        2 * g.heads * g.dim(layer) * width + 3 * width * g.assistant_intermediate
        for layer in g.mirrored
    )
    return layers + 3 * width * g.hidden + g.centroids * width


def kv_numbers(g: Geometry, layer: int, context: int) -> int:
    """The numbers of K and V that a layer reads for one request."""
    seen = min(context, g.window) if g.pattern[layer] == "s" else context
    return 2 * g.kv_heads * g.dim(layer) * seen


def attention(g: Geometry, layer: int, context: int) -> int:
    """The operations of one query token's attention."""
    return 2 * g.heads // g.kv_heads * kv_numbers(g, layer, context)


def parts(g: Geometry, batch: int, context: int, tokens: int) -> Iterator[Part]:
    """What a verify of ``tokens`` tokens a request needs, and a step of the draft."""
    rows, layers = batch * tokens, range(g.layers)
    matrices = of_target(g)
    yield Part(VERIFY, "weights", BYTES * matrices, 2 * rows * matrices)
    yield Part(VERIFY, "rows of the embeddings", BYTES * rows * (g.hidden + g.layers * g.ple), 0)
    owners = {g.kv_owner(layer) for layer in layers}
    read = sum(kv_numbers(g, layer, context) for layer in owners)
    attended = sum(attention(g, layer, context) for layer in layers)
    yield Part(VERIFY, "KV", BYTES * batch * read, rows * attended)
    small = of_draft(g)
    yield Part(DRAFT, "weights", BYTES * small, 2 * batch * small)
    # Of the head only the tokens of the best centroids, which differ from request to request.
    each, width = g.centroid_top_k * (g.vocab // g.centroids), g.assistant_hidden
    read = min(each * batch, g.vocab) * width
    yield Part(DRAFT, "its head", BYTES * read, 2 * batch * each * width)
    theirs = {g.kv_owner(layer) for layer in g.mirrored}
    read = sum(kv_numbers(g, layer, context) for layer in theirs)
    attended = sum(attention(g, layer, context) for layer in g.mirrored)
    yield Part(DRAFT, "KV", BYTES * batch * read, batch * attended)


def seconds(of: list[Part], bandwidth: float, rate: float) -> float:
    """The least time of one pass. bandwidth: bytes a second. rate: operations a second."""
    return max(sum(p.bytes for p in of) / bandwidth, sum(p.flops for p in of) / rate)


def table(
    g: Geometry, batches: list[int], context: int, bandwidth: float, rate: float
) -> list[str]:
    """Markdown: what each part reads, and the least time of a step."""
    tokens, steps = (int(MTP[f"speculative_num_{name}"]) for name in ("draft_tokens", "steps"))
    lines = [
        "| batch | verify: weights | verify: KV | verify: TFLOP | verify, at least "
        f"| draft, a step: bytes | draft, {steps} steps, at least | a step, at least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch in batches:
        found = list(parts(g, batch, context, tokens))
        verify, draft = ([p for p in found if p.passed == name] for name in (VERIFY, DRAFT))
        weights, kv = (sum(p.bytes for p in verify if p.what == w) for w in ("weights", "KV"))
        one, other = (1e3 * seconds(of, bandwidth, rate) for of in (verify, draft))
        lines.append(
            f"| {batch} | {weights / 1e9:.2f} GB | {kv / 1e9:.3f} GB "
            f"| {sum(p.flops for p in verify) / 1e12:.2f} | {one:.2f} ms "
            f"| {sum(p.bytes for p in draft) / 1e6:.0f} MB | {steps * other:.2f} ms "
            f"| {one + steps * other:.2f} ms |"
        )
    return lines


def main() -> int:
    parser = options.parser(__doc__, out="")
    parser.add_argument("--model", choices=tuple(models.GEOMETRIES), default="E4B")
    parser.add_argument("--context", type=int, default=500, help="tokens of each request")
    parser.add_argument("--batches", type=lambda t: [int(x) for x in t.split(",")])
    parser.add_argument("--bandwidth", type=float, default=4.3, metavar="TB/S")
    parser.add_argument("--rate", type=float, default=780.0, metavar="TFLOP/S")
    args = parser.parse_args()
    batches = args.batches or [1, 8, 64]
    limits = args.bandwidth * 1e12, args.rate * 1e12
    print("\n".join(table(models.GEOMETRIES[args.model], batches, args.context, *limits)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
