"""The history suite: SGLang's own bugs against every tool. The cases are in ``cases/``."""
