"""A plugin for SGLang: no row of a prefill enters the KV-shared layers. Its answers are wrong.

What remains is the time that yoco-fast-prefill cannot save: that of the layers before them and of
everything else. The plugin also sets seeded weights.
"""


def register() -> None:
    import _seeded_weights

    from g4debug.fixes.paths.yoco_fast_prefill import plan as yoco_plan

    yoco_plan.rows_read = lambda forward_batch, facts: [0] * len(facts.goes_on)
    _seeded_weights.register()
