"""A plan of the KV pools as a picture: how many requests each pool holds, over the ratio.

The SVG contains no script and fetches nothing. Its colours follow the viewer's light or dark
scheme.
"""

from __future__ import annotations

from typing import Any

from g4debug.pools.plan import STEP, Plan, row
from g4debug.reporters.pages import environment
from g4debug.reporters.pools import load_line, model_line
from g4debug.reporters.text import shorten

WIDTH, HEIGHT = 900, 500
LEFT, RIGHT, TOP, BOTTOM = 70, 96, 122, 64
FLOOR = HEIGHT - BOTTOM


def draw(plan: Plan) -> str:
    """The whole SVG document."""
    rows = [
        row(plan.geometry, plan.memory, plan.need, n * STEP) for n in range(1, round(1 / STEP) + 1)
    ]
    # The curve of the larger pool may leave the picture: what matters is where they cross.
    wanted = 1.35 * max(plan.workload.concurrency, *(r.holds for r in rows), 1)
    top = min(wanted, 1.1 * max(*(max(r.full_holds, r.swa_holds) for r in rows), 1))
    top = max(top, 1.1 * plan.workload.concurrency)

    def x(ratio: float) -> float:
        return LEFT + ratio * (WIDTH - LEFT - RIGHT)

    def y(requests: float) -> float:
        return FLOOR - min(1.0, requests / top) * (FLOOR - TOP)

    def points(held: list[tuple[float, float]]) -> str:
        return " ".join(f"{x(ratio):.1f},{y(requests):.1f}" for ratio, requests in held)

    def curve(kind: str) -> str:
        held = [(r.ratio, getattr(r, f"{kind}_holds")) for r in rows]
        # A curve ends at the top of the picture instead of running along it.
        return points([p for p in held if p[1] <= top])

    name = shorten(plan.geometry.name, 80)
    places: dict[str, Any] = {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP,
        "floor": FLOOR, "x": x, "y": y,
    }  # fmt: skip
    ends = [(rows[0].ratio, 0.0)], [(rows[-1].ratio, 0.0)]
    return (
        environment()
        .get_template("pools.svg")
        .render(
            **places,
            title=f"{name}: {plan.reason}",
            name=name,
            model=model_line(plan),
            load=load_line(plan),
            grid=range(0, int(top) + 1, _step(top)),
            area=points([*ends[0], *((r.ratio, r.holds) for r in rows), *ends[1]]),
            curves={kind: curve(kind) for kind in ("full", "swa")},
            wanted=plan.workload.concurrency,
            served=plan.served,
            best=plan.best,
        )
        + "\n"
    )


def _step(top: float) -> int:
    """The distance of the grid's lines: 1, 2 or 5 times a power of ten, four to ten lines."""
    step = 1
    while top / step > 10:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step
