"""The arithmetic behind docs/costs.md."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measuring import overhead

pytestmark = pytest.mark.once("the code is ours alone")


def rows(times, batch=1):
    """times: (round, variant) -> the time per token of each request."""
    return [
        {
            "round": of, "variant": variant, "batch": batch, "number": number,
            "sent_ms": 10.0 * number, "ttft_ms": 2 * tpot, "tpot_ms": tpot, "step_ms": 2 * tpot,
            "end_ms": 10.0 * number + 100 * tpot, "tokens": 10,
        }
        for (of, variant), found in times.items()
        for number, tpot in enumerate(found)
    ]  # fmt: skip


def test_percentile_is_a_value_that_was_measured():
    assert overhead.percentile(range(1, 101), 99) == 99
    assert overhead.percentile([3, 1, 2], 99) == 3
    assert overhead.percentile([7], 1) == 7
    with pytest.raises(ValueError, match="no values"):
        overhead.percentile([], 99)


def test_each_request_is_compared_with_itself():
    """The variant is 2 % slower at each request, while its medians lie further apart."""
    base = {0: 1.0, 1: 10.0, 2: 100.0}
    variant = {0: 1.02, 1: 10.2, 2: 102.0}
    assert overhead.median_of_pairs([(base, variant)]) == pytest.approx(0.02)
    without = {k: v for k, v in variant.items() if k != 0}
    assert overhead.median_of_pairs([(base, without)]) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="no request"):
        overhead.median_of_pairs([({0: 1.0}, {1: 1.0})])


def test_a_drift_between_rounds_is_no_overhead():
    found = overhead.compare(
        rows({("1", "off"): [5, 6], ("1", "armed"): [5, 6],
              ("2", "off"): [10, 12], ("2", "armed"): [10, 12]}),
        1, "off", "armed",
    )  # fmt: skip
    assert set(found) == set(overhead.METRICS)
    for figure in found.values():
        assert (figure.value, figure.low, figure.high, figure.rounds) == (0, 0, 0, 2)


def test_slower_is_positive_in_every_metric():
    found = overhead.compare(rows({("1", "off"): [10] * 9, ("1", "armed"): [11] * 9}), 1,
                              "off", "armed")  # fmt: skip
    assert found["time per token"].value == pytest.approx(0.1)
    assert found["first token"].value == pytest.approx(0.1)
    assert found["first token, p99"].value == pytest.approx(0.1)
    assert 0 < found["throughput"].value < 0.1 + 1e-9


def test_p99_is_of_all_rounds_together():
    """One slow request in 100 is the 99th percentile of the pool, and of no single round's."""
    quick, slow = [1.0] * 50, [1.0] * 48 + [5.0] * 2
    rounds = [(dict(enumerate(quick)), dict(enumerate(quick)))]
    rounds.append((dict(enumerate(quick)), dict(enumerate(slow))))
    assert overhead.pooled_p99(rounds) == pytest.approx(4.0)


def test_the_interval_holds_the_truth_and_shrinks_with_rounds():
    rng = random.Random(1)

    def measured(count):
        pairs = []
        for _ in range(count):
            machine = 1 + rng.gauss(0, 0.05)
            noise = 1.03 + rng.gauss(0, 0.01)
            pairs.append(({0: machine}, {0: machine * noise}))
        return overhead.figure(pairs, overhead.median_of_pairs)

    few, many = measured(4), measured(60)
    assert many.low <= 0.03 <= many.high
    assert many.high - many.low < few.high - few.low


def test_rounds_without_the_base_are_left_out():
    times = {("1", "off"): [1.0], ("1", "armed"): [2.0], ("2", "armed"): [9.0]}
    found = overhead.compare(rows(times), 1, "off", "armed")
    assert found["time per token"].rounds == 1
    assert found["time per token"].value == pytest.approx(1.0)
    assert overhead.compare(rows(times, batch=8), 1, "off", "armed") == {}


def test_a_figure_reads_as_percent():
    assert str(overhead.Figure(0.0149, -0.001, 0.03, 7)) == "+1.5% (-0.1% to +3.0%)"
    assert str(overhead.Figure(0.00149, -0.001, 0.003, 7)) == "+0.15% (-0.10% to +0.30%)"


def test_a_page_is_filled_between_its_marks():
    import tracer_overhead

    page = "a\n<!-- overhead -->\nold\n<!-- /overhead -->\nb\n"
    got = tracer_overhead.filled(page, ["1", "2"])
    assert got == "a\n<!-- overhead -->\n1\n2\n<!-- /overhead -->\nb\n"
    assert tracer_overhead.filled(got, ["old"]) == page
    with pytest.raises(ValueError, match="lacks the lines"):
        tracer_overhead.filled("a\n", ["1"])
