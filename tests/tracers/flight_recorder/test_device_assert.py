"""Device-side asserts: CUDA's lines, the lookup that failed, and claims that are never made."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from g4debug.cli import main
from g4debug.dumps import reading
from g4debug.findings.record import DeviceAssert, Lookup, Step
from g4debug.findings.steps import Recorder
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import (
    core_autopsy,
    device_asserts,
    embedding_lookups,
    lookups,
)
from g4debug.tracers.flight_recorder import report as finding
from g4debug.tracers.flight_recorder.assert_evidence import Asserted
from g4debug.tracers.flight_recorder.stderr_capture import Printed
from g4debug.tracers.flight_recorder.tracer import FlightRecorder
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap

TORCH = "/pytorch/aten/src/ATen/native/cuda/"
BELOW = (
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
TRIGGERED = f"CUDA error: device-side assert triggered\n{BELOW}"
ILLEGAL = f"CUDA error: an illegal memory access was encountered\n{BELOW}"


def line(place: str, expression: str, block: str = "3,0,0", thread: str = "64,0,0") -> str:
    return f"{place}: block: [{block}], thread: [{thread}] Assertion `{expression}` failed.\n"


SELECT = line(f"{TORCH}Indexing.cu:1141: indexSelectLargeIndex", "srcIndex < srcSelectDimSize")
GATHERED = line(
    f"{TORCH}IndexKernelUtils.cu:16: vectorized_gather_kernel",
    'ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"',
)
INDEXED = line(
    f"{TORCH}IndexKernel.cu:93: operator()",
    'index >= -sizes[i] && index < sizes[i] && "index out of bounds"',
)
SCATTERED = line(
    f"{TORCH}ScatterGatherKernel.cu:163: operator()",
    'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"',
)
TRITON = line("unknown:0: unknown", "index out of bounds: 0 <= tmp4 < 256")
NO_INDEX = line(
    f"{TORCH}TensorCompare.cu:109: _assert_async_cuda_kernel",
    "probability tensor contains either `inf`, `nan` or element < 0",
)


@pytest.fixture(autouse=True)
def _no_core_dump_comes(monkeypatch):
    """There is no CUDA that would write one, so nobody waits for it."""
    monkeypatch.setattr(core_autopsy, "APPEARS", 0.05)


# --- what CUDA printed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expression", "place", "sorts", "bound"),
    [
        (SELECT, "srcIndex < srcSelectDimSize", "Indexing.cu:1141 indexSelectLargeIndex",
         ("embedding",), -1),
        (GATHERED, "ind >=0 && ind < ind_dim_size && \"vectorized gather kernel index out of "
         "bounds\"", "IndexKernelUtils.cu:16 vectorized_gather_kernel",
         ("embedding", "index", "gather"), -1),
        (INDEXED, 'index >= -sizes[i] && index < sizes[i] && "index out of bounds"',
         "IndexKernel.cu:93 operator()", ("index",), -1),
        # A large index_select is a gather in newer PyTorch.
        (SCATTERED, 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"',
         "ScatterGatherKernel.cu:163 operator()", ("embedding", "gather"), -1),
        (TRITON, "index out of bounds: 0 <= tmp4 < 256", "unknown:0",
         ("embedding", "index", "gather"), 256),
        (NO_INDEX, "probability tensor contains either `inf`, `nan` or element < 0",
         "TensorCompare.cu:109 _assert_async_cuda_kernel", (), -1),
        (line("/x/IndexKernel.cu:60: lambda ->auto::operator()(int)->auto", "index < n"),
         "index < n", "IndexKernel.cu:60 lambda ->auto::operator()(int)->auto", ("index",), -1),
        (line(r"C:\b\aten\src\ATen\native\cuda\Indexing.cu:91", "dstIndex < dstAddDimSize"),
         "dstIndex < dstAddDimSize", "Indexing.cu:91", (), -1),
        # Windows names no kernel.
        (line(f"{TORCH}Indexing.cu:1141", "srcIndex < srcSelectDimSize"),
         "srcIndex < srcSelectDimSize", "Indexing.cu:1141", ("embedding",), -1),
        # Behind what a log's collector puts in front of each line.
        (f"2026-11-22T01:02:03Z stderr F {SELECT}", "srcIndex < srcSelectDimSize",
         "Indexing.cu:1141 indexSelectLargeIndex", ("embedding",), -1),
        (f"14633:{SELECT}", "srcIndex < srcSelectDimSize",
         "Indexing.cu:1141 indexSelectLargeIndex", ("embedding",), -1),
    ],
)  # fmt: skip
def test_a_line_of_cuda_is_read(text, expression, place, sorts, bound):
    (found,) = device_asserts.parse(f"before\n{text}behind\n")
    assert found.expression == expression
    assert device_asserts.place(found) == place
    assert device_asserts.sorts(found) == sorts
    assert device_asserts.bound(found) == bound
    assert (found.block, found.thread, found.count) == ("3,0,0", "64,0,0", 1)


def test_thousands_of_threads_are_one_line_and_the_first_is_kept():
    many = [
        line(f"{TORCH}Indexing.cu:7: indexSelectSmallIndex", "a < b", f"{b},0,0", f"{t},0,0")
        for b in range(40)
        for t in range(128)
    ]
    first, second = device_asserts.parse("".join(many) + SELECT)
    assert (first.count, first.block, first.thread) == (40 * 128, "0,0,0", "0,0,0")
    assert second.count == 1
    assert first.file == "ATen/native/cuda/Indexing.cu"
    assert len(
        device_asserts.parse("".join(SELECT.replace("1141", str(n)) for n in range(99)))
    ) == (device_asserts.MOST)


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("/pytorch/aten/src/ATen/native/cuda/Indexing.cu", "ATen/native/cuda/Indexing.cu"),
        ("/sglang/.venv/lib/site-packages/flashinfer/a.cuh", "flashinfer/a.cuh"),
        ("/me/a.cu", "a.cu"),
    ],
)
def test_a_file_has_no_path_of_the_machine(path, file):
    (found,) = device_asserts.parse(line(f"{path}:7: kernel", "a < b"))
    assert found.file == file


@pytest.mark.parametrize(
    "text",
    [
        "",
        "AssertionError: Assertion `x` failed",
        "x" * 3_000_000,
        "a:1: " * 200_000,
        ("block: [0,0,0], thread: [0,0,0] " + "Assertion `") * 20_000,
    ],
    ids=["nothing", "python", "one-word", "colons", "halves"],
)
def test_what_is_no_such_line_is_none_and_takes_no_time(text):
    assert device_asserts.parse(text) == ()


def test_no_folder_of_a_person_is_kept():
    (found,) = device_asserts.parse(line("/data/jane/kernels/mine.cu:3: f", "i < n"))
    assert found.file == "mine.cu"


CHILD = """
import os, sys
sys.path[:0] = {path!r}
from g4debug.tracers.flight_recorder import device_asserts
from g4debug.tracers.flight_recorder.stderr_capture import Printed
os.write(2, b"before: " + {line!r}.replace(b"1141", b"1"))
printed = Printed()
os.write(2, {line!r} * 3)
found = device_asserts.parse(printed.wait_for(device_asserts.any_in))
print([(x.line, x.count) for x in found], printed.why, flush=True)
os.write(2, b"the last words")
os._exit(3)
"""


def child(**streams) -> subprocess.CompletedProcess[bytes]:
    code = CHILD.format(path=sys.path, line=SELECT.encode())
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=100, **streams)


def test_what_c_code_wrote_to_a_file_is_read_back(tmp_path):
    """From where the process was armed on; and the file has every byte, the last words too."""
    for name, mode in (("new", "wb"), ("appended", "ab")):
        log = tmp_path / name
        log.write_bytes(b"an older log\n" + INDEXED.encode())
        with log.open(mode) as sink:
            ran = child(stdout=subprocess.PIPE, stderr=sink)
        assert ran.returncode == 3
        assert ran.stdout.split(b"\n")[0] == b"[(1141, 3)] "
        assert log.read_bytes().endswith(SELECT.encode() * 3 + b"the last words")


def test_stdout_may_be_in_the_same_file(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as sink:
        child(stdout=sink, stderr=subprocess.STDOUT)
    assert b"[(1141, 3)]" in log.read_bytes()


def test_a_pipe_is_left_alone_and_named():
    ran = child(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stdout.strip() == b"[] stderr is a pipe"
    assert ran.stderr.endswith(b"the last words")


def test_a_log_that_was_cut_off_is_read_from_its_beginning(tmp_path, monkeypatch):
    log = tmp_path / "log"
    with log.open("ab") as sink:
        kept = os.dup(2)
        os.dup2(sink.fileno(), 2)
        try:
            os.write(2, b"x" * 4096)
            printed = Printed()
            os.truncate(log, 0)
            os.write(2, SELECT.encode())
            text = printed.text()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert [x.line for x in device_asserts.parse(text)] == [1141]


# --- which lookup it was ------------------------------------------------------------------------

SHARD = Lookup("the draft's embedding", "a.py", "ids", ("embedding",), 256, 0, 511)
WHOLE = Lookup("the target's embedding", "b.py", "ids", ("embedding",), 512, 0, 511)
PROMPT = dataclasses.replace(WHOLE, name="the prompt", low=4, high=500, exact=True)
ROWS = Lookup("req_to_token", "c.py", "rows", ("index",), 9, 1, 8)
MASKED = Lookup("masked", "d.py", "ids", ("embedding",), 3, 0, 511, never="ids are masked")
DARK = Lookup("dark", "e.py", "ids", ("gather",), 512)


def verdicts(*some: Lookup, text: str = "") -> dict[str, str]:
    judged = lookups.judge(some, device_asserts.parse(text))
    return {x.name: x.verdict for x in judged}


def test_only_what_does_not_fit_is_accused():
    judged = lookups.judge((WHOLE, ROWS, SHARD, MASKED, DARK), device_asserts.parse(SELECT))
    assert [(x.name, x.verdict) for x in judged] == [
        ("the draft's embedding", "could"),
        ("the target's embedding", "not known"),
        ("req_to_token", "cannot"),
        ("masked", "cannot"),
        ("dark", "cannot"),
    ]
    assert judged[0].why == "ids 0 to 511 do not fit 256 rows"
    assert judged[1].why == "ids 0 to 511 would fit 512 rows, but the device made them"
    assert judged[2].why == (
        "Indexing.cu:1141 indexSelectLargeIndex is an embedding or index_select, "
        "and this is tensor[index]"
    )
    assert lookups.sentence(judged) == (
        "Of the lookups in LOOKUPS, only the draft's embedding (a.py) has indices that do not fit "
        "its table: ids 0 to 511 do not fit 256 rows."
    )


def test_nobody_is_accused_where_two_could_have_been():
    judged = lookups.judge((SHARD, dataclasses.replace(SHARD, name="another")), ())
    assert lookups.sentence(judged).startswith("Which lookup it was is not known: the indices of 2")


def test_what_should_fit_is_neither_accused_nor_cleared():
    assert verdicts(WHOLE, DARK) == dict.fromkeys([WHOLE.name, "dark"], "not known")
    assert "not known" in lookups.sentence(lookups.judge((WHOLE, DARK), ()))


def test_what_the_host_made_and_fits_is_cleared():
    assert verdicts(PROMPT) == {"the prompt": "cannot"}
    (judged,) = lookups.judge((PROMPT,), ())
    assert judged.why == "ids 4 to 500 fit 512 rows"
    assert verdicts(dataclasses.replace(PROMPT, high=512)) == {"the prompt": "could"}
    assert verdicts(dataclasses.replace(PROMPT, low=-1)) == {"the prompt": "could"}


def test_an_assertion_that_names_the_size_clears_the_tables_of_another_size():
    assert verdicts(SHARD, WHOLE, text=TRITON) == {SHARD.name: "could", WHOLE.name: "cannot"}
    # One that may be of any sort clears nobody by its sort.
    assert verdicts(ROWS, text=GATHERED) == {"req_to_token": "not known"}


def test_one_of_several_assertions_is_enough_to_be_under_suspicion():
    assert verdicts(SHARD, ROWS, text=SELECT + INDEXED) == {
        SHARD.name: "could",
        "req_to_token": "not known",
    }


def test_an_assertion_that_is_about_no_index_accuses_no_lookup():
    found = device_asserts.parse(NO_INDEX)
    said = Asserted(found, lookups.judge((SHARD, WHOLE), found))
    assert {x.verdict for x in said.judged} == {"cannot"}
    assert said.cause().startswith("The assertion is not about the index of a lookup")
    assert said.headline().startswith("an assertion failed in a kernel (device-side assert `prob")


# --- what is known of SGLang's tables -----------------------------------------------------------


class Gemma4Assistant(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.target_embed_weight = torch.zeros(rows, 4)


class Gemma4Target(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(512, 4)
        self.model.embed_tokens_per_layer = torch.nn.Embedding(128, 4)


class Runner:
    def __init__(self, model: torch.nn.Module, draft: bool) -> None:
        self.model, self.is_draft_worker = model, draft
        self.model_config = SimpleNamespace(vocab_size=512)


class Batch:
    def __init__(self, *reqs: SimpleNamespace) -> None:
        self.reqs = list(reqs)


def request(ids, output=(), image=None, **sampling) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=list(ids),
        output_ids=list(output),
        multimodal_inputs=image,
        sampling_params=SimpleNamespace(stop_token_ids=None, **sampling),
    )


class Rig:
    """A scheduler with known tables: two models, three steps, and its requests."""

    def __init__(self, draft_rows: int = 512, tp: int = 1, *modes: str) -> None:
        self.runners = Runner(Gemma4Target(), False), Runner(Gemma4Assistant(draft_rows), True)
        self.seen = embedding_lookups.Seen()
        for runner in self.runners:
            self.seen.runner(runner)
        self.batch = Batch(request([5, 9, 400]), request([7, 2], output=[500]))
        self.seen.batch(None, self.batch)
        args = SimpleNamespace(tp_size=tp, speculative_num_draft_tokens=4)
        self.scheduler = SimpleNamespace(server_args=args)
        self.steps = [
            Step(n, mode, ("a", "b"), (30, 40), rows=(3, 1))
            for n, mode in enumerate(modes or ("EXTEND", "DECODE", "DECODE"), 1)
        ]

    def found(self, finished: int = 1, rank: int = -1) -> dict[str, Lookup]:
        host = embedding_lookups.Host(self.scheduler, self.seen, self.steps, finished, rank)
        return {x.name: x for x in lookups.judge(embedding_lookups.lookups(host), ())}


def test_the_draft_that_was_given_one_ranks_part_of_the_vocabulary_is_named():
    found = Rig(256, 2).found(rank=0)["the draft's token embedding"]
    assert (found.rows, found.low, found.high, found.verdict) == (256, 0, 511, "could")
    assert found.why == (
        "token ids 0 to 511 do not fit 256 rows; it was given the part of the vocabulary of TP "
        "rank 0 of 2, not the whole; the vocabulary has 512 tokens, and the draft gets ids of all "
        "of them"
    )


def test_a_draft_with_the_whole_table_is_not_accused():
    rig = Rig(512, 2)
    found = rig.found()
    assert found["the draft's token embedding"].verdict == "not known"
    assert not any(x.verdict == "could" for x in found.values())


def test_at_start_there_is_a_draft_and_no_step_yet():
    """The graphs of the draft are captured before the first step."""
    rig = Rig(256, 2)
    rig.steps, rig.batch.reqs = [], []
    found = rig.found(finished=0)
    assert found["the draft's token embedding"].verdict == "could"
    assert [x.name for x in found.values() if x.verdict == "could"] == [
        "the draft's token embedding"
    ]


def test_prompts_are_exact_only_while_nothing_but_prefills_is_under_way():
    rig = Rig(512, 1, "EXTEND", "EXTEND")
    prompt = rig.found()["the target's token embedding"]
    assert (prompt.low, prompt.high, prompt.exact, prompt.verdict) == (2, 500, True, "cannot")
    decode = Rig().found()["the target's token embedding"]
    assert (decode.low, decode.high, decode.exact, decode.verdict) == (0, 511, False, "not known")
    # A step that was not recorded may have been a decode.
    rig.steps = rig.steps[1:]
    assert rig.found(finished=0)["the target's token embedding"].verdict == "not known"


def test_a_prompt_with_an_id_that_no_row_has_is_accused():
    rig = Rig()
    rig.batch.reqs.append(request([1, 600]))
    found = rig.found()["the target's token embedding"]
    assert (found.high, found.verdict) == (600, "could")


def test_an_image_puts_no_hash_into_the_range():
    rig = Rig(512, 1, "EXTEND", "EXTEND")
    rig.batch.reqs.append(request([1, 1 << 40], image=object()))
    found = rig.found()["the target's token embedding"]
    assert (found.high, found.exact, found.verdict) == (511, False, "not known")


def test_the_per_layer_table_is_masked_by_gemma_4():
    found = Rig().found()["the per-layer embedding"]
    assert (found.rows, found.verdict) == (128, "cannot")


def test_a_stop_token_beyond_the_vocabulary_is_accused_only_if_it_is_used():
    rig = Rig()
    rig.batch.reqs[0].sampling_params.stop_token_ids = {3, 10_000}
    name = "the stop tokens of min_new_tokens"
    assert rig.found()[name].verdict == "cannot"
    rig.batch.reqs[0].sampling_params.min_new_tokens = 5
    assert (rig.found()[name].verdict, rig.found()[name].high) == ("could", 10_000)


def test_positions_of_a_verify_reach_beyond_the_length():
    rig = Rig()
    rig.runners[0].model.rotary = torch.nn.Module()
    rig.runners[0].model.rotary.cos_sin_cache = torch.zeros(43, 8)
    assert (rig.found()["the rotary embedding"].high) == 43
    assert rig.found()["the rotary embedding"].verdict == "could"
    rig.runners[0].model.rotary.cos_sin_cache = torch.zeros(44, 8)
    assert rig.found()["the rotary embedding"].verdict == "not known"
    prefills = Rig(512, 1, "EXTEND", "EXTEND")
    prefills.runners[0].model.rotary = rig.runners[0].model.rotary
    found = prefills.found()["the rotary embedding"]
    assert (found.high, found.verdict) == (39, "cannot")


def test_a_table_that_cannot_be_read_is_named():
    rig = Rig()
    rig.scheduler.req_to_token_pool = object()
    found = rig.found()["the lookup rows of requests"]
    assert found.verdict == "not known"
    assert "could not be read: AttributeError" in found.why


def test_of_the_tokens_only_the_range_is_told():
    rig = Rig()
    rig.batch.reqs = [request([77, 3131, 2, 4242], output=[3333])]
    told = str(rig.found())
    assert "4242" in told
    assert not any(token in told for token in ("77", "3131", "3333"))


def test_no_model_is_kept_alive():
    rig = Rig()
    seen = rig.seen
    rig.runners = rig.batch = None
    assert seen.runners == []
    assert seen.requests(None) == []


def test_no_tensor_is_read(monkeypatch):
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "max", "min", "__len__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a: 1 / 0)
    rig = Rig(256, 2)
    rig.scheduler.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(9, 64))
    found = rig.found()
    assert not any("could not be read" in x.why for x in found.values())
    assert (found["req_to_token"].rows, found["req_to_token"].low) == (9, 1)


# --- the finding and its dump -------------------------------------------------------------------


@pytest.fixture
def dead(tmp_path, monkeypatch):
    """Let the flight recorder meet an error; ``text`` is what it reads back from stderr."""

    def dead(error: str, text: str = "", why: str = "", rig: Rig | None = None):
        settings = Settings(debug=True, debug_dir=tmp_path / "dumps")
        recorder = Recorder(4)
        context = Context(
            "flight-recorder", Hooks(), settings, recorder, Trap(settings, Describer(recorder))
        )
        tracer = FlightRecorder(context)
        monkeypatch.setattr(tracer.printed, "text", lambda: text)
        monkeypatch.setattr(tracer.printed, "why", why or "it is a test")
        if rig is not None:
            recorder.attach(rig.scheduler)
            tracer.seen = rig.seen
        try:
            raise RuntimeError(error)
        except RuntimeError:
            tracer.on_loop_exception()
        (path,) = (tmp_path / "dumps").glob("*")
        return path

    return dead


def test_the_dump_says_what_was_printed_and_which_lookup_it_was(dead):
    path = dead(TRIGGERED, SELECT * 512, rig=Rig(256, 2))
    record = reading.read(path)
    f = record.finding
    assert (f.check, f.kind) == ("flight-recorder", "device-assert")
    assert f.headline == (
        "g4debug: flight-recorder in the event loop, before its first step: an index was out of "
        "range in a kernel (device-side assert `srcIndex < srcSelectDimSize`, Indexing.cu:1141 "
        "indexSelectLargeIndex)"
    )
    surfaced, printed = f.got.split("\n")
    assert "only where it surfaced" in surfaced
    assert printed == (
        "512 threads printed: `srcIndex < srcSelectDimSize` (Indexing.cu:1141 "
        "indexSelectLargeIndex). Other ranks print to the same file, so some of it may be theirs"
    )
    assert f.cause.startswith("Of the lookups in LOOKUPS, only the draft's token embedding (")
    assert f.reference == "TRIAGE.md, 'Device-side assert triggered'"
    assert record.asserts == (
        DeviceAssert(
            "srcIndex < srcSelectDimSize",
            "ATen/native/cuda/Indexing.cu",
            1141,
            "indexSelectLargeIndex",
            "3,0,0",
            "64,0,0",
            512,
        ),
    )
    assert record.lookups[0].verdict == "could"


@pytest.mark.parametrize(
    ("error", "text", "kind"),
    [
        (TRIGGERED, "", "device-assert"),
        ("Triton Error [CUDA]: device-side assert triggered", "", "device-assert"),
        ("CUDA_ERROR_ASSERT: device-side assert", "", "device-assert"),
        # These words are below every error of PyTorch's.
        (ILLEGAL, SELECT, "cuda-error"),
        (ILLEGAL, "", "cuda-error"),
        # cuBLAS meets the dead device and does not know why it is dead.
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x", SELECT, "device-assert"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x", "", "cuda-error"),
        ("NCCL error: unhandled cuda error", SELECT, "device-assert"),
        ("device-side assert triggered, says a user's prompt", SELECT, "exception"),
    ],
)
def test_what_a_device_assert_is(dead, error, text, kind):
    assert reading.read(dead(error, text)).finding.kind == kind


def test_another_ranks_assertion_is_not_taken_for_ours(dead):
    """NCCL fails here, and the file has what the other rank printed."""
    assert (
        reading.read(dead("NCCL error: unhandled cuda error", SELECT, rig=Rig(256, 2))).finding.kind
        == "cuda-error"
    )


def test_without_the_text_it_says_why_and_where_the_text_is(dead, tmp_path, capsys):
    path = dead(TRIGGERED, why="stderr is a pipe", rig=Rig(256, 2))
    record = reading.read(path)
    assert record.finding.headline.endswith(
        ": an assertion failed in a kernel (device-side assert)"
    )
    assert record.finding.got.endswith(
        "is not here, because stderr is a pipe. The server's log may have it: "
        "g4debug show <dump> --log <the log>"
    )
    assert record.asserts == ()
    log = tmp_path / "server.log"
    log.write_text(f"INFO started\n{SELECT * 5}Traceback …\n")
    assert main(["show", str(path), "--log", str(log), "--width", "120"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "an index was out of range in a kernel (device-side assert `srcIndex <" in shown
    assert "5 threads printed:" in shown
    assert "is not here" not in shown
    assert "ASSERTS" in shown
    assert "Other ranks print to the same file" in shown
    assert main(["report", str(path), "--log", str(log), "-o", str(tmp_path / "x.html")]) == 0
    page = (tmp_path / "x.html").read_text()
    assert "5 threads printed:" in page
    assert "ASSERTS" in page
    assert main(["show", str(path), str(path), "--log", str(log)]) == 2
    assert "--log belongs to one dump" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("nothing\n", TRIGGERED, "no line of it reads"),
        (SELECT, ILLEGAL, "--log is for a dump of a device-side assert"),
    ],
)
def test_a_log_that_does_not_fit_is_refused(dead, tmp_path, capsys, text, error, said):
    path = dead(error, why="stderr is a pipe")
    log = tmp_path / "server.log"
    log.write_text(text)
    assert main(["show", str(path), "--log", str(log)]) == 2
    assert said in capsys.readouterr().err


def test_a_log_that_is_not_there_is_refused(dead, tmp_path, capsys):
    path = dead(TRIGGERED, why="stderr is a pipe")
    assert main(["show", str(path), "--log", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_finding_before_it_stays_the_first_suspect(dead):
    error = RuntimeError(TRIGGERED)
    settings = SimpleNamespace(mode="log", hang_seconds=60)
    trap = SimpleNamespace(reported=["g4debug: page 99"], doubted={})
    context = SimpleNamespace(settings=settings, trap=trap, recorder=Recorder(4))
    found = device_asserts.parse(SELECT)
    said = Asserted(found, lookups.judge((SHARD,), found))
    made = finding.of_exception(error, "scheduler.run_batch", context, True, lambda cuda: [], said)
    first, second = made.cause.split("\n")
    assert first == "this finding did not stop the server (log mode): g4debug: page 99"
    assert second == said.cause()
