"""A plan of the KV pools as a picture: how many requests each pool holds, over the ratio.

The SVG contains no script and fetches nothing. Its colours follow the viewer's light or dark
scheme.
"""

from __future__ import annotations

from html import escape

from g4debug.pools.plan import STEP, Plan, Row, row
from g4debug.reporters.pools import load_line, model_line
from g4debug.reporters.text import shorten

WIDTH, HEIGHT = 900, 500
LEFT, RIGHT, TOP, BOTTOM = 70, 96, 122, 64
STYLE = """
  :root { --ink: #1f2328; --soft: #59636e; --grid: #d1d9e0; --paper: #ffffff;
          --full: #0969da; --swa: #bc4c00; --best: #1a7f37; }
  @media (prefers-color-scheme: dark) {
    :root { --ink: #f0f6fc; --soft: #9198a1; --grid: #3d444d; --paper: #0d1117;
            --full: #58a6ff; --swa: #f0883e; --best: #3fb950; } }
  text { font: 13px system-ui, sans-serif; fill: var(--ink); }
  .soft { fill: var(--soft); font-size: 12px; } .title { font-size: 16px; font-weight: 600; }
  .grid { stroke: var(--grid); stroke-width: 1; }
  .full { stroke: var(--full); } .swa { stroke: var(--swa); }
  .full, .swa { fill: none; stroke-width: 2.5; }
  .holds { fill: var(--best); opacity: 0.14; }
  .best { stroke: var(--best); stroke-width: 2; } .mark { stroke: var(--soft); }
  .mark, .want { stroke-width: 1.5; stroke-dasharray: 5 4; } .want { stroke: var(--ink); }
  .t-full { fill: var(--full); font-weight: 600; } .t-swa { fill: var(--swa); font-weight: 600; }
  .t-best { fill: var(--best); font-weight: 600; }
"""


def draw(plan: Plan) -> str:
    """The whole SVG document."""
    rows = [
        row(plan.geometry, plan.memory, plan.need, n * STEP) for n in range(1, round(1 / STEP) + 1)
    ]
    chart = _Chart(plan, rows)
    body = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>',
        text(LEFT, 28, shorten(plan.geometry.name, 80), "title"),
        text(LEFT, 50, model_line(plan), "soft"),
        text(LEFT, 70, load_line(plan), "soft"),
        *chart.grid(),
        *chart.curves(),
        *chart.marks(),
        text(LEFT, HEIGHT - 16, "swa_full_tokens_ratio", "soft"),
        *_legend(HEIGHT - 16),
    ]
    summary = escape(f"{shorten(plan.geometry.name, 80)}: {plan.reason}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img"><title>{summary}</title>'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


class _Chart:
    def __init__(self, plan: Plan, rows: list[Row]) -> None:
        self.plan, self.rows = plan, rows
        # The curve of the larger pool may leave the picture: what matters is where they cross.
        wanted = 1.35 * max(plan.workload.concurrency, *(r.holds for r in rows), 1)
        self.top = min(wanted, 1.1 * max(*(max(r.full_holds, r.swa_holds) for r in rows), 1))
        self.top = max(self.top, 1.1 * plan.workload.concurrency)

    def x(self, ratio: float) -> float:
        return LEFT + ratio * (WIDTH - LEFT - RIGHT)

    def y(self, requests: float) -> float:
        share = min(1.0, requests / self.top)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> list[str]:
        parts = []
        step = _step(self.top)
        for n in range(0, int(self.top) + 1, step):
            parts.append(_line(LEFT, self.y(n), WIDTH - RIGHT, self.y(n), "grid"))
            parts.append(text(LEFT - 10, self.y(n) + 4, str(n), "soft", "end"))
        for tenth in range(0, 11, 2):
            at = self.x(tenth / 10)
            parts.append(text(at, HEIGHT - BOTTOM + 20, f"{tenth / 10:g}", "soft", "middle"))
        parts.append(text(14, TOP - 12, "requests at a time", "soft"))
        return parts

    def curves(self) -> list[str]:
        floor = HEIGHT - BOTTOM
        area = [(self.x(r.ratio), self.y(r.holds)) for r in self.rows]
        area = [(area[0][0], floor), *area, (area[-1][0], floor)]
        parts = [f'<polygon class="holds" points="{_points(area)}"/>']
        for kind in ("full", "swa"):
            held = [(r.ratio, getattr(r, f"{kind}_holds")) for r in self.rows]
            # A curve ends at the top of the picture instead of running along it.
            first = [p for p in held if p[1] <= self.top]
            line = _points([(self.x(a), self.y(b)) for a, b in first])
            parts.append(f'<polyline class="{kind}" points="{line}"/>')
        return parts

    def marks(self) -> list[str]:
        plan, floor = self.plan, HEIGHT - BOTTOM
        wanted = plan.workload.concurrency
        parts = [_line(LEFT, self.y(wanted), WIDTH - RIGHT, self.y(wanted), "want")]
        parts.append(text(WIDTH - RIGHT + 6, self.y(wanted) + 4, f"{wanted} wanted", ""))
        served, best = plan.served, plan.best
        if served.ratio != best.ratio:
            at = self.x(served.ratio)
            parts.append(_line(at, TOP, at, floor, "mark"))
            label = f"serves with {served.ratio:g}: {served.holds}"
            parts.append(_beside(at, TOP - 6 if best.holds else TOP + 10, label, "soft"))
        if best.holds:
            at = self.x(best.ratio)
            parts.append(_line(at, TOP, at, floor, "best"))
            parts.append(_beside(at, TOP + 14, f"best {best.ratio:g}: {best.holds}", "t-best"))
        return parts


def _legend(y: float) -> list[str]:
    parts = []
    for x, css, label in ((520, "full", "full pool holds"), (670, "swa", "SWA pool holds")):
        parts.append(_line(x, y - 4, x + 24, y - 4, css))
        parts.append(text(x + 30, y, label, f"t-{css}"))
    return parts


def _step(top: float) -> int:
    """The distance of the grid's lines: 1, 2 or 5 times a power of ten, four to ten lines."""
    step = 1
    while top / step > 10:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def _beside(x: float, y: float, words: str, css: str) -> str:
    """A label beside a vertical line, on the side that has room for it."""
    return text(x + 6, y, words, css) if x < WIDTH * 0.7 else text(x - 6, y, words, css, "end")


def text(x: float, y: float, words: str, css: str, anchor: str = "start") -> str:
    """A line of text at (x, y). css: its class in STYLE."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
