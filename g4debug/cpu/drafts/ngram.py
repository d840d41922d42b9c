"""NGRAM: the tokens that followed the same words before are the draft. There is no model."""

from g4debug.cpu.toy import Draft

DRAFT = Draft(
    "ngram",
    "NGRAM: what followed the same tokens before, without a model",
    # One path, because page_size is more than 1.
    {"speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1},
    targets=("llama", "gpt-oss"),
)
