"""The tensors that each part of a step hands to the next one, for comparing their values.

Each row says where a tensor's values are taken for the first time, right after they are made, and
where they must still be the same. Findings use the same names for the ends. The table in
docs/tracers.md is made of these rows.

W stands for the tokens of a verify, and *requests* for the rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reading:
    """The values of one tensor at one place.

    name: the tensor's, as SGLang has it. end: the place, in words. thing: the kind of value (a
    token, or the digest of a hidden state), if values are only compared and never printed.
    """

    key: str
    name: str
    end: str
    thing: str = ""

    @property
    def of_last_step(self) -> Reading:
        """The same, as a step reads it that follows."""
        return replace(self, end="the end of the request's last step")


@dataclass(frozen=True)
class HandedOn:
    """One tensor on its way.

    columns: how many numbers it has, in words. every: all servers hand it on, also those that do
    not speculate. later: the next step of the request takes it.
    """

    made: Reading
    taken: Reading
    columns: str
    dtype: str
    every: bool = False
    later: bool = False


TOKEN, STATE = "token", "hidden state"
_DRAFT, _TARGET = "the end of the draft", "the target's forward"
_SAMPLE, _KERNEL = "the end of the verify's sampling", "the verify's kernel"
_RESULT, _SEED = "the result of the verify", "the next draft input"
_STASH, _READ = "the stash into the FutureMap", "the draft"
_HOST, _OUTPUT = "the result on the host", "the request's output"

# The readings of a verify step, in their order.
INDICES = Reading("indices", "future_indices", "the draft")
LENS = Reading("lens", "seq_lens", "the draft")
BONUS = Reading("bonus", "bonus_tokens", _READ, thing=TOKEN)
HIDDEN = Reading("hidden", "hidden_states", _READ, thing=STATE)
TREE_TOKENS = Reading("tree tokens", "draft_tokens", "the draft's tree", thing=TOKEN)
DRAFTED = Reading("drafted", "draft_token", _DRAFT, thing=TOKEN)
POSITIONS = Reading("positions", "positions", _DRAFT)
TREE = (
    Reading("tree index", "retrieve_index", _DRAFT),
    Reading("tree child", "retrieve_next_token", _DRAFT),
    Reading("tree sibling", "retrieve_next_sibling", _DRAFT),
)
FED = Reading("fed", "input_ids", _TARGET, thing=TOKEN)
FED_POSITIONS = Reading("fed positions", "positions", _TARGET)
TARGET_HIDDEN = Reading(
    "target hidden", "hidden_states", "the end of the target's forward", thing=STATE
)
CANDIDATES = Reading("candidates", "draft_token", "the verify's sampling", thing=TOKEN)
WANTED = Reading("wanted", "target_predict", _KERNEL, thing=TOKEN)
KERNEL_TOKENS = Reading("kernel tokens", "predicts", _KERNEL, thing=TOKEN)
KERNEL_INDEX = Reading("kernel index", "accept_index", _KERNEL)
KERNEL_CORRECT = Reading("kernel correct", "accept_token_num", _KERNEL)
SAMPLE_TOKENS = Reading("sample tokens", "predict", _SAMPLE, thing=TOKEN)
SAMPLE_LENS = Reading("sample lens", "accept_lens", _SAMPLE)
SAMPLE_INDEX = Reading("sample index", "accept_index", _SAMPLE)
RESULT_TOKENS = Reading("result tokens", "next_token_ids", _RESULT, thing=TOKEN)
RESULT_LENS = Reading("result lens", "accept_lens", _RESULT)
RESULT_BONUS = Reading("result bonus", "bonus_tokens", _RESULT, thing=TOKEN)
RESULT_HIDDEN = Reading("result hidden", "hidden_states", _RESULT, thing=STATE)
NEW_LENS = Reading("new lens", "new_seq_lens", _RESULT)
LEFT_BONUS = Reading("left bonus", "bonus_tokens", _SEED, thing=TOKEN)
LEFT_HIDDEN = Reading("left hidden", "hidden_states", _SEED, thing=STATE)
STASHED = Reading("stashed", "bonus_tokens", _STASH, thing=TOKEN)
HOST_LENS = Reading("host lens", "accept_lens", _HOST)
HOST_TOKENS = Reading("host tokens", "next_token_ids", _HOST, thing=TOKEN)
KEPT = Reading("kept", "accepted tokens", "the end of the result's processing", thing=TOKEN)
OUTPUT = Reading("output", "output_ids", _OUTPUT, thing=TOKEN)
# The readings of any step that samples.
INPUT = Reading("input", "input_ids", _TARGET, thing=TOKEN)
SAMPLED = Reading("sampled", "next_token_ids", "the end of the sampling", thing=TOKEN)
FORWARDED = Reading("forwarded", "next_token_ids", "the result of the forward", thing=TOKEN)
SAMPLED_STASHED = Reading("stashed", "next_token_ids", _STASH, thing=TOKEN)

_ONE, _EACH, _PATH = "requests", "requests × W", "requests × (draft steps + 1)"
TABLE = (
    HandedOn(LEFT_BONUS, BONUS, _ONE, "int32 or int64", later=True),
    HandedOn(NEW_LENS, LENS, _ONE, "int64", later=True),
    HandedOn(LEFT_HIDDEN, HIDDEN, f"{_ONE} × hidden size", "the model's", later=True),
    HandedOn(BONUS, DRAFTED, "the first of W", "int64"),
    HandedOn(TREE_TOKENS, DRAFTED, _EACH, "int64"),
    HandedOn(LENS, POSITIONS, _EACH, "int64"),
    HandedOn(DRAFTED, FED, _EACH, "int64"),
    HandedOn(POSITIONS, FED_POSITIONS, _EACH, "int64"),
    HandedOn(DRAFTED, CANDIDATES, _EACH, "int64"),
    HandedOn(WANTED, KERNEL_TOKENS, _EACH, "int64, int32"),
    HandedOn(KERNEL_TOKENS, SAMPLE_TOKENS, _EACH, "int32"),
    HandedOn(KERNEL_CORRECT, SAMPLE_LENS, _ONE, "int32"),
    HandedOn(KERNEL_INDEX, SAMPLE_INDEX, _PATH, "int32"),
    HandedOn(SAMPLE_TOKENS, RESULT_TOKENS, _EACH, "int32"),
    HandedOn(SAMPLE_LENS, RESULT_LENS, _ONE, "int32"),
    HandedOn(RESULT_TOKENS, RESULT_BONUS, _ONE, "int32"),
    HandedOn(RESULT_LENS, NEW_LENS, _ONE, "int32, int64"),
    HandedOn(RESULT_BONUS, LEFT_BONUS, _ONE, "int32"),
    HandedOn(TARGET_HIDDEN, RESULT_HIDDEN, f"{_EACH} × hidden size", "the model's"),
    HandedOn(RESULT_HIDDEN, LEFT_HIDDEN, f"{_EACH} × hidden size", "the model's"),
    HandedOn(LEFT_BONUS, STASHED, _ONE, "int32"),
    HandedOn(RESULT_LENS, HOST_LENS, _ONE, "int32"),
    HandedOn(RESULT_TOKENS, HOST_TOKENS, _EACH, "int32"),
    HandedOn(HOST_TOKENS, KEPT, "the accepted ones of W", "a list"),
    HandedOn(KEPT, OUTPUT, "the accepted ones of W", "a list"),
    HandedOn(SAMPLED, FORWARDED, _ONE, "int64", every=True),
    HandedOn(FORWARDED, SAMPLED_STASHED, _ONE, "int64", every=True),
    HandedOn(SAMPLED, OUTPUT, _ONE, "int64", every=True),
    HandedOn(SAMPLED, INPUT, _ONE, "int64", every=True, later=True),
)


def markdown() -> list[str]:
    """The table of docs/tracers.md."""
    lines = ["| from | to | numbers | type |", "|---|---|---|---|"]
    for row in TABLE:
        mark = " *" if row.every else ""
        to = f"{row.taken.end}{' of the next step' if row.later else ''}: `{row.taken.name}`"
        cells = (f"{row.made.end}: `{row.made.name}`{mark}", to, row.columns, row.dtype)
        lines.append(f"| {' | '.join(cells)} |")
    return lines
