"""A plugin for SGLang: no row of a prefill enters the KV-shared layers. Its answers are wrong.

yoco-fast-prefill cannot save the time that remains: the layers before them and everything else take
it. The plugin also sets seeded weights.
"""


def register() -> None:
    from g4debug.fixes.paths.yoco_fast_prefill import plan as yoco_plan
    from served import seeded_weights

    yoco_plan.rows_read = lambda forward_batch, facts: [0] * len(facts.goes_on)
    seeded_weights.register()
