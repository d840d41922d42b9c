"""Make real CUDA core dumps: one crash in a process of its own for each case.

``python tests/gpu/make_cores.py [DIRECTORY]`` writes ``cores.tar`` into the directory (default:
``$OUT``): for each case ``NAME.core.xz`` and ``NAME.json``. The JSON has what was broken and
where each buffer was. Needs one GPU, Triton, SGLang and FlashInfer; takes about two minutes.
The reader of core dumps (``g4debug/autopsy``) is tested against what this leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,"
    "skip_local_memory,skip_constbank_memory,skip_abort"
)
SECONDS = 140  # for all cases
BYTES = 14 << 20  # of the tar file
PAGE, HEADS, QUERY_HEADS, BATCH, LENGTH = 64, 2, 8, 8, 300
POOLS: dict[str, Any] = {
    "full": {"layers": [5, 11], "pages": 1024, "dim": 256},
    "swa": {"layers": [0, 1, 2, 3], "pages": 373, "dim": 256},
}
COLUMNS = -(-LENGTH // PAGE)
FOREIGN = """extern "C" __global__ void foreign_scatter(float* out, int gib) {
    out[((long long)gib << 28) + blockIdx.x * 64 + threadIdx.x] = 1.0f;
}"""

# What a case breaks: the values it tries in turn until one crashes; at: row, column, layer.
LARGER_POOL = [375, 384, 480, 600, 1000, 1000 * 64]
NEGATIVE = [-1, -64, -4096, -(1 << 20), -(1 << 28)]
CASES: dict[str, dict[str, Any]] = {
    "decode-larger-pool": {"run": "decode", "pages": LARGER_POOL, "at": (5, 3, 2)},
    "decode-graph": {"run": "decode", "graph": True, "pages": LARGER_POOL, "at": (2, 1, 1)},
    "decode-negative": {"run": "decode", "tokens": NEGATIVE, "at": (0, 2, 0)},
    "decode-uninitialised": {"run": "decode", "tokens": [0x7FFFFFFF], "at": (7, 4, 3)},
    "extend-larger-pool": {"run": "extend", "pages": LARGER_POOL, "at": (1, 2, 2)},
    "embedding": {"run": "embedding", "tokens": [262_208]},
    "indexing": {"run": "indexing", "tokens": [-70_000]},
    "foreign": {"run": "foreign"},
    "xqa-larger-pool": {"run": "xqa", "pages": LARGER_POOL, "at": (3, 2, 2)},
    "xqa-ten-million": {"run": "xqa", "pages": [10_000_000], "at": (0, 4, 1)},
    "xqa-uninitialised": {"run": "xqa", "pages": [0x7FFFFFFF], "at": (4, 1, 0)},
}


class Crash:
    """One case: its buffers, the values that it tries, and what it leaves."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.case = name, folder, CASES[name]
        self.row, self.column, self.layer = self.case.get("at", (0, 0, 0))
        self.said: dict[str, Any] = {
            "case": name,
            **self.case,
            "page_size": PAGE,
            "silent": [],
            "buffers": [],
        }
        self.kv: dict[tuple[str, int], tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One process at a time crashes, so that a core dump has one context."""
        with (self.folder / "turn").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self.wait_for_core()

    def wait_for_core(self) -> None:
        """The core dump is whole when its size stays; without one it gives up after 6 s."""
        core, size = self.folder / f"{self.name}.core", -1
        for tries in range(100):
            now = core.stat().st_size if core.exists() else -1
            if (now > 0 and now == size) or ("value" not in self.said) or (now < 0 and tries == 20):
                break
            size = now
            time.sleep(0.3)
        self.said["core_bytes"] = now

    def pools(self) -> None:
        import torch

        for pool, shape in POOLS.items():
            for layer in shape["layers"]:
                size = (shape["pages"] * PAGE, HEADS, shape["dim"])
                pair = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
                self.kv[pool, layer] = pair[0], pair[1]
                for which, buffer in zip("kv", pair, strict=True):
                    self.buffer(
                        f"{pool}.{layer}.{which}",
                        buffer,
                        pool=pool,
                        layer=layer,
                        kv=which,
                        pages=shape["pages"],
                        page_bytes=PAGE * HEADS * shape["dim"] * 2,
                    )

    def buffer(self, name: str, tensor: Any, **more: Any) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.said["buffers"].append(
            {
                "name": name,
                "address": tensor.data_ptr(),
                "nbytes": nbytes,
                "dtype": str(tensor.dtype),
                **more,
            }
        )

    def buffers(self, **tensors: Any) -> None:
        for name, tensor in tensors.items():
            self.buffer(name, tensor)

    def lists(self, length: int, rows: int) -> Any:
        """Token indices of each row, [rows, length] int64 on the CPU; the small pool has them."""
        import torch

        pages = torch.arange(1, 1 + rows * COLUMNS).reshape(rows, COLUMNS)
        self.said["table"] = pages.tolist()
        return (
            (pages[:, :, None] * PAGE + torch.arange(PAGE))
            .reshape(rows, -1)[:, :length]
            .contiguous()
        )

    def values(self) -> Iterator[int]:
        """Each value to try; the last one that was given is the one that crashed."""
        for value in self.case.get("pages") or self.case.get("tokens") or [0]:
            self.said["value"] = value
            yield value
            self.said["silent"].append(value)

    def broken(self, tokens: Any, value: int) -> Any:
        """The rows' token indices with one page, or one token, made bad."""
        import torch

        row, at = self.row, self.column * PAGE
        bad = tokens.clone()
        if "pages" in self.case:
            end = min(at + PAGE, bad.shape[1])
            bad[row, at:end] = value * PAGE + torch.arange(end - at)
            first = value * PAGE
        else:
            bad[row, at + 5] = first = value
            self.said["position"] = at + 5
        for b in self.said["buffers"]:
            if b.get("pool") == "swa" and b["layer"] == self.layer:
                token_bytes = b["page_bytes"] // PAGE
                self.said[f"expected_{b['kv']}"] = b["address"] + first * token_bytes
        return bad

    def note(self) -> None:
        """What the caching allocator has, and the JSON as it stands: written before the crash."""
        import torch

        self.said["segments"] = [
            {
                "address": s["address"], "nbytes": s["total_size"], "type": s["segment_type"],
                "pool": list(s.get("segment_pool_id", ())), "allocated": s["allocated_size"],
            }
            for s in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        ]  # fmt: skip
        self.said["device"], self.said["torch"] = torch.cuda.get_device_name(), torch.__version__
        self.save()

    def save(self) -> None:
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.said))

    def decode(self) -> None:
        import torch
        from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

        with self.turn():
            self.pools()
            k, v = self.kv["swa", self.layer]
            tokens = self.lists(LENGTH, BATCH)
            indices = tokens.reshape(-1).cuda()
            indptr = torch.arange(0, BATCH * LENGTH + 1, LENGTH, dtype=torch.int32).cuda()
            q = torch.empty(BATCH, QUERY_HEADS, 256, device="cuda", dtype=torch.bfloat16)
            out, splits = torch.empty_like(q), torch.full((BATCH,), 2, dtype=torch.int32).cuda()
            logits = torch.empty(BATCH, QUERY_HEADS, 2, 256, device="cuda")
            lse = torch.empty(BATCH, QUERY_HEADS, 2, device="cuda")
            self.buffers(kv_indices=indices, kv_indptr=indptr, q=q, out=out)

            def attend() -> None:
                decode_attention_fwd(
                    q, k, v, out, indptr, indices, logits, lse, splits, 2, 0.06, 1.0, 1.0
                )

            attend()
            torch.cuda.synchronize()
            run: Callable[[], None] = attend
            if self.case.get("graph"):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    attend()
                run = graph.replay
            for value in self.values():
                indices.copy_(self.broken(tokens, value).reshape(-1))
                self.note()
                run()
                torch.cuda.synchronize()

    def extend(self) -> None:
        import torch

        with self.turn():
            from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

            rows, new = 3, 40
            self.pools()
            k, v = self.kv["swa", self.layer]
            tokens = self.lists(LENGTH, rows)
            indices = tokens.reshape(-1).cuda()
            kv_indptr = torch.arange(0, rows * LENGTH + 1, LENGTH, dtype=torch.int32).cuda()
            qo_indptr = torch.arange(0, rows * new + 1, new, dtype=torch.int32).cuda()
            q = torch.empty(rows * new, QUERY_HEADS, 256, device="cuda", dtype=torch.bfloat16)
            k_new = torch.empty(rows * new, HEADS, 256, device="cuda", dtype=torch.bfloat16)
            v_new, out = torch.empty_like(k_new), torch.empty_like(q)
            self.buffers(kv_indices=indices, kv_indptr=kv_indptr, qo_indptr=qo_indptr, q=q)

            def attend() -> None:
                rest = (qo_indptr, kv_indptr, indices, None, True, None, new, 1.0, 1.0, 0.06)
                extend_attention_fwd(q, k_new, v_new, out, k, v, *rest)

            attend()
            torch.cuda.synchronize()
            for value in self.values():
                indices.copy_(self.broken(tokens, value).reshape(-1))
                self.note()
                attend()
                torch.cuda.synchronize()

    def xqa(self) -> None:
        import flashinfer
        import torch

        built, first = self.folder / "xqa-built", self.name == "xqa-larger-pool"
        while not first and not built.exists():
            time.sleep(0.2)
        with contextlib.ExitStack() as stack:
            if not first:  # the first one compiles the kernel, and does not keep the others waiting
                stack.enter_context(self.turn())
            self.pools()
            k, v = (
                buffer.view(-1, PAGE, HEADS, 256).permute(0, 2, 1, 3)
                for buffer in self.kv["swa", self.layer]
            )
            tokens = self.lists(LENGTH, BATCH)
            table = (tokens[:, ::PAGE] // PAGE).to(torch.int32).contiguous().cuda()
            lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32).cuda()
            q = torch.empty(BATCH, QUERY_HEADS, 256, device="cuda", dtype=torch.bfloat16)
            workspace = torch.zeros(64 << 20, dtype=torch.uint8).cuda()
            self.buffers(page_table=table, lengths=lengths, q=q, workspace=workspace)

            def attend() -> None:
                flashinfer.decode.trtllm_batch_decode_with_kv_cache(
                    query=q,
                    kv_cache=(k, v),
                    workspace_buffer=workspace,
                    block_tables=table,
                    seq_lens=lengths,
                    max_seq_len=512,
                    bmm1_scale=0.06,
                    bmm2_scale=1.0,
                    window_left=511,
                )

            attend()
            torch.cuda.synchronize()
            if first:
                built.touch()
                stack.enter_context(self.turn())
            for value in self.values():
                self.broken(tokens, value)  # for the addresses that are expected
                bad = (tokens[:, ::PAGE] // PAGE).to(torch.int32)
                bad[self.row, self.column] = value
                table.copy_(bad)
                self.note()
                attend()
                torch.cuda.synchronize()

    def embedding(self) -> None:
        import torch

        with self.turn():
            weight = torch.empty(4096, 256, device="cuda", dtype=torch.bfloat16)
            self.buffer("embedding", weight)
            for value in self.values():
                tokens = torch.tensor([5, 9, value, 11]).cuda()
                self.buffer("tokens", tokens)
                self.note()
                torch.nn.functional.embedding(tokens, weight)
                torch.cuda.synchronize()

    def indexing(self) -> None:
        import torch

        with self.turn():
            self.pools()
            k, _ = self.kv["swa", 0]
            new = torch.empty(4, HEADS, 256, device="cuda", dtype=torch.bfloat16)
            for value in self.values():
                where = torch.tensor([5, 9, value, 11]).cuda()
                self.buffer("out_cache_loc", where)
                self.note()
                k[where] = new
                torch.cuda.synchronize()

    def foreign(self) -> None:
        """A kernel without debug information writes far behind a small buffer."""
        import torch

        with self.turn():
            self.pools()
            kernel = torch.cuda._compile_kernel(FOREIGN, "foreign_scatter")
            out = torch.empty(4096, device="cuda")
            self.buffer("out", out)
            for _ in self.values():
                self.said["expected"] = out.data_ptr() + (64 << 30)
                self.note()
                kernel(grid=(4, 1, 1), block=(64, 1, 1), args=[out, 64])
                torch.cuda.synchronize()

    def leave(self) -> None:
        """Ask cuda-gdb what it sees in the core dump, and compress it."""
        core = self.folder / f"{self.name}.core"
        if (size := self.said.get("core_bytes", -1)) > 0:
            self.said["cuda_gdb"] = cuda_gdb(core)
            packed = lzma.compress(core.read_bytes(), preset=9 if size < 64 << 20 else 3)
            (self.folder / f"{self.name}.core.xz").write_bytes(packed)
            core.unlink()
        self.save()


def cuda_gdb(core: Path) -> str:
    """What NVIDIA's debugger says of the core dump: the truth that the reader is compared with."""
    if not (
        program := shutil.which("cuda-gdb") or shutil.which("cuda-gdb", path="/usr/local/cuda/bin")
    ):
        return "no cuda-gdb here"
    asked = ["info cuda kernels", "info cuda exception", "info cuda lanes", "bt"]
    asked += ["print/x $errorpc", "x/3i $errorpc", "info registers"]
    commands = [w for a in [f"target cudacore {core}", *asked] for w in ("-ex", a)]
    words = [program, "-batch", "-nx", *commands]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "cuda-gdb took more than 30 s"
    return (done.stdout + done.stderr)[-12_000:]


def one(name: str, folder: Path) -> None:
    crash = Crash(name, folder)
    started = time.monotonic()
    try:
        getattr(crash, crash.case["run"])()
        crash.said["died"] = "no value crashed"
    except Exception as error:
        crash.said["died"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        if name == "xqa-larger-pool":
            (folder / "xqa-built").touch()
    crash.said["seconds"] = round(time.monotonic() - started, 1)
    crash.leave()
    os._exit(0)  # the context is dead, and tearing it down may hang


def main(folder: Path) -> None:
    until = time.monotonic() + SECONDS
    work = folder / "work"
    work.mkdir(parents=True)
    children = {}
    for name in CASES:
        environment = os.environ | {
            "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
            "CUDA_COREDUMP_GENERATION_FLAGS": FLAGS,
            "CUDA_COREDUMP_FILE": str(work / f"{name}.core"),
        }
        with (work / f"{name}.log").open("w") as log:
            children[name] = subprocess.Popen(
                [sys.executable, __file__, str(work), name],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    for child in children.values():
        try:
            child.wait(max(1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
    left, lines = BYTES, []
    header = f"{'case':22} {'value':>12} {'core bytes':>11} {'xz bytes':>10} {'s':>6}  result"
    with tarfile.open(folder / "cores.tar", "w") as tar:
        for name in CASES:
            core, story, words = (work / f"{name}{end}" for end in (".core.xz", ".json", ".log"))
            said = json.loads(story.read_text()) if story.exists() else {}
            packed = core.stat().st_size if core.exists() else 0
            kept = 0 < packed <= left
            if kept:
                tar.add(core, core.name)
                left -= packed
            for text in (story, words):
                if text.exists() and text.stat().st_size < 1 << 20:
                    tar.add(text, text.name)
            result = "sent" if kept else "too large" if packed else "no core"
            if not packed:
                result += ": " + words.read_text()[-160:].replace("\n", " ")
            size, seconds = said.get("core_bytes", -1), said.get("seconds")
            lines.append(
                f"{name:22} {said.get('value')!s:>12} {size:>11,} {packed:>10,} {seconds!s:>6}"
                f"  {result}; {said.get('died', 'unfinished')[:60]!r}"
            )
    shutil.rmtree(work)
    print(header, *lines, sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        one(sys.argv[2], Path(sys.argv[1]))
    main(Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["OUT"]))
