"""What people see, and the entry that explains it: the table behind TRIAGE.md.

The part on g4debug's own findings is made of the kinds' records (``findings/kinds.py``). In a text
``…`` stands for anything.

A pattern accuses. So a text that has more than one cause asks for more: a function in the same
traceback (``frames``), or a server on which the cause can be (``server``). If that is not there,
the pattern does not fit, and "not known" is a better answer than a wrong one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, cached_property

from g4debug.findings.kinds import KINDS, FindingKind, Place
from g4debug.triage.entry import by_title

HOLE = "…"


class Stage(IntEnum):
    """What a line is in the story of a server's end; smaller ones explain larger ones."""

    CAUSE = 0  # it says what is wrong
    SURFACED = 1  # an error was noticed here; its cause may lie elsewhere
    STANDS = 2  # the server lives, and serves nobody
    ENDED = 3  # a process was killed, or died outside of Python
    AFTER = 4  # it follows from another one's end
    SIGN = 5  # nothing ended: it is slow, refuses something, or says something about itself


_STAGES = {
    Place.CAUSE: Stage.CAUSE,
    Place.SURFACED: Stage.SURFACED,
    Place.STANDS: Stage.STANDS,
    Place.ENDED: Stage.ENDED,
    Place.AFTER: Stage.AFTER,
    Place.NOTHING: Stage.SIGN,
}


@dataclass(frozen=True)
class Pattern:
    """What a line says, and the entry that explains it.

    says: texts, one of which is in the line. where: where and when, for a reader of the index.
    entry: its number; 0 if no entry is about it, because g4debug has no part in it: then ``advice``
    says what it is and what helps. frames: one of these is in the same traceback. server: all of
    these words are known of the server (see ``server.Server.words``). also: entries that may be
    meant, too. explains: it is the cause of an error of the same process that was told before it.
    innermost: ``frames`` counts for the frame that raised, and for none above it. never: not if
    that frame has one of these. own: it begins a line of SGLang's own; whoever quotes it may quote
    a server that lives.
    """

    says: tuple[str, ...]
    where: str
    entry: int
    stage: Stage
    section: str = ""
    frames: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    also: tuple[int, ...] = ()
    advice: str = ""
    explains: bool = False
    innermost: bool = False
    never: tuple[str, ...] = ()
    own: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        says = "|".join(map(_regex, self.says))
        return re.compile(f"^(?:{says})" if self.own else says)

    @property
    def anybodys(self) -> bool:
        """Whether other software says it, too: CUDA's errors, NCCL's, and those of a machine."""
        if self in (PROBE, SIGTERM) or (self.section == KILLED and self.entry == 26):
            return False
        return self.section in (CUDA, KILLED, OTHER)

    @property
    def lasting(self) -> bool:
        """Whether the process cannot go on: CUDA's errors, its end, and SGLang's watchdog."""
        stands = self.stage == Stage.STANDS and self is not HEALTH
        return stands or self.explains or self.section in (CUDA, KILLED)


def _regex(text: str) -> str:
    """Pieces between holes in this order, near each other. An exception's name begins the line."""
    pieces = ".{0,300}?".join(map(re.escape, text.split(HOLE)))
    if text in FLAGS:
        pieces += r'(?!"?: *false)'
    if text in ANY_CASE:
        return f"(?i:{pieces})"
    if re.fullmatch(r"[A-Z]\w*(?:Error|Interrupt)|Killed", text):  # a bare one has no text
        return rf"^{text}:?\s*$"
    exception = re.match(r"[A-Z]\w*(?:Error|Exception)\b", text)
    return rf"(?:^|(?<=hit an exception: ))(?:[\w.]{{1,80}}\.)?{pieces}" if exception else pieces


CUDA = "The server died with a CUDA error"
PYTHON = "The server died with a Python exception"
LEAK = "SGLang's own leak check"
HANGS = "The server hangs"
SLOW = "It is slow, or few requests run"
START = "It does not start"
ITSELF = "What g4debug says of its own state"
WRONG = "Answers are wrong"
KILLED = "A process was killed, or another rank went first"
OTHER = "It is not a matter of g4debug"

_C, _S, _H, _E, _A, _N = Stage
_MTP = "FROZEN_KV_MTP"
_SPEC = ("frozen_kv_mtp_worker", "/eagle_", "eagle_worker")
_TREE = ("radix_cache.py", "unified_cache_components/")
# Libraries write these as they like: CUDA error, Cuda error, HIP error, failed with error.
FLAGS = ("OOMKilled",)  # docker prints it as a flag, too: false is none
ANY_CASE = ("an illegal memory access was encountered", "unspecified launch failure")
_BOUNDS = "IndexError: index … is out of bounds for dimension 0 with size …"

LEAKS = (
    "req_to_token_pool memory leak detected!",
    "token_to_kv_pool_allocator memory leak detected!",
    "pool memory leak detected!",
    "pool-bytes memory leak detected!",
)
FREED = ("KV double free: sub-pool …", "KV page use-after-free: …")
HEALTH = Pattern(
    (
        "Health check failed. Server couldn't get a response",
        "Signal SIGTERM received while health check failed",
    ),
    "twice, and no batch between: the server stands",
    8,
    _H,
    HANGS,
)
NETWORK = Pattern(
    (
        "ncclSystemError",
        "NCCL error: unhandled system error",
        "nvshmem setup connections failed",
        "nvshmem initialization failed",
        "DistStoreError: Timed out after … waiting for clients",
        "DistNetworkError: The client socket has timed out",
        "NCCL WARN NET/IB…Got completion",
        "NCCL WARN NET/IB…async fatal event",
        "NCCL WARN NET/IB…port error",
        "Error while creating shared memory segment",
    ),
    "",
    0,
    _A,
    OTHER,
    advice="NCCL or NVSHMEM lost a peer, the network failed, or /dev/shm is too small. For that, "
    "--shm-size or --ipc=host. A rank of another machine may have died first: see its log.",
)
SIGTERM = Pattern(
    (
        "SIGTERM received. signum=",
        "Gracefully exiting... Remaining number of requests",
        "SIGTERM received on node_rank",
    ),
    "",
    0,
    _A,
    OTHER,
    advice="Somebody asked the server to end (SIGTERM). It may be an operator, a probe or a "
    "scale-down.",
)
TAKEN = Pattern(
    ("Address already in use", "address already in use"),
    "",
    0,
    _E,
    OTHER,
    advice="The port is taken, often by an older server. End it, or take another --port.",
)
GRACE = replace(
    SIGTERM,
    advice="The server was asked to end (SIGTERM), and killed (-9) when the grace period was over. "
    "It may be an operator, a probe or a scale-down. If its requests need longer, lengthen the "
    "grace period.",
)

RETRACTS = Pattern(
    ("KV cache pool is full. Retract requests.",), "Gemma-4", 2, _N, SLOW, server=("gemma-4",)
)
# Of figures, and of no text: ``load.Load`` follows them.
UNEVEN = Pattern(
    ("Decode batch, …full token usage: …swa token usage: …#queue-req: …",),
    "for a minute the usages of the two pools are far apart, and requests wait",
    2,
    _N,
    SLOW,
)
IDLE_QUEUE = Pattern(
    ("Decode batch, …#running-req: 0,…#queue-req: …",),
    "for a minute nothing runs, and requests wait",
    8,
    _N,
    HANGS,
    also=(2,),
)

# What a shell or a container's manager says of the whole server. SGLang, too, ends itself with -9
# when a child has failed: behind that they say nothing.
OUTSIDE = (
    Pattern(
        (
            "Killed",
            "exited with code 137",
            "Main process exited, code=killed, status=11/SEGV",
            "exited with code 139",
            "exited with code 134",
            ": line …Killed …sglang",
            ": line …Killed …python",
            "Segmentation fault …(core dumped)",
            "Bus error …(core dumped)",
            "Aborted …(core dumped)",
            "Exit Code: …137",
            "Exit Code: …139",
            "Exit Code: …134",
            *(f"{name}: {code}" for name in ("exitCode", '"ExitCode"') for code in (137, 139, 134)),
            "Main process exited, code=killed, status=9/KILL",
            "Main process exited, code=dumped, status=11/SEGV",
            "Main process exited, code=dumped, status=6/ABRT",
            "exited on signal 9 (Killed)",
            "exited on signal 11 (Segmentation fault)",
            "(terminated by SIGKILL; not expected)",
            "(terminated by SIGSEGV; not expected)",
            "(terminated by SIGABRT; not expected)",
        ),
        "a shell's or docker's word",
        26,
        _E,
        KILLED,
    ),
)
CLUSTER = Pattern(
    (
        # Without a reason Slurm says it of a step that has failed, too.
        "CANCELLED AT … DUE TO TIME LIMIT",
        "CANCELLED AT … DUE TO PREEMPTION",
        "The node was low on resource: ",
    ),
    "",
    0,
    _A,
    OTHER,
    advice="Slurm or Kubernetes ended it. Its time was over, another job went first, or its node "
    "had too little memory or disk.",
)
ROUTER = Pattern(
    ("No available workers (",),
    "",
    0,
    _A,
    OTHER,
    advice="No server answers the router. See the servers' own logs, and their health checks.",
)
PROBE = Pattern(
    ("failed liveness probe, will be restarted", "failed startup probe, will be restarted"),
    "",
    0,
    _A,
    OTHER,
    advice="Kubernetes ended the container. Its probe got no answer in time. If batches "
    "had stopped before, it is a hang (entry 8); else give the probe more time.",
)

PATTERNS: tuple[Pattern, ...] = (
    # --- CUDA ---
    Pattern(
        ("CUDA error: an illegal memory access was encountered", "cudaErrorIllegalAddress"),
        "Gemma-4, `trtllm_mha`, MTP, a source build of May 2026",
        1,
        _S,
        CUDA,
        server=("gemma-4", "trtllm_mha", "mtp", "may have entry 1"),
        also=(7,),
    ),
    Pattern(
        ("fmhaSm100fKernel_…SlidingOrChunkedCausal",),
        "the kernel that faulted, on a B200",
        1,
        _S,
        CUDA,
        server=("gemma-4", "trtllm_mha", "mtp", "may have entry 1"),
        also=(7,),
    ),
    Pattern(
        ("Triton Error [CUDA]: an illegal memory access was encountered",),
        "`--enforce-piecewise-cuda-graph`, a model with per-layer inputs",
        6,
        _S,
        CUDA,
        server=("gemma-4", "piecewise enforced"),
        also=(7,),
    ),
    Pattern(
        ("Capture frozen-KV MTP cuda graph failed: CUDA error",),
        "a text-only Gemma-4 with MTP and `--tp-size 2` or more, at start",
        22,
        _S,
        CUDA,
        server=("mtp", "tp", "may have entry 22"),
        also=(23,),
    ),
    Pattern(
        (
            "Assertion `probability tensor contains …",
            "Assertion `NaN detected!…",
            "Assertion `Inf detected!…",
            "Assertion `Detected NaN",
        ),
        "behind `block: […], thread: […]`: NaN or Inf in the logits",
        15,
        _C,
        CUDA,
        frames=("block: [",),
        also=(23,),
        explains=True,
    ),
    Pattern(
        ("Assertion `index …",),
        "the same, SGLang's own probe",
        23,
        _C,
        CUDA,
        frames=("block: [",),
        also=(21, 22),
        explains=True,
    ),
    Pattern(
        ("Assertion `…` failed.", "Assertion `…' failed."),
        "behind `block: […], thread: […]`",
        23,
        _C,
        CUDA,
        frames=("block: [",),
        also=(22,),
        explains=True,
    ),
    Pattern(
        ("device-side assert triggered", "cudaErrorAssert"),
        "at start, or while serving",
        23,
        _S,
        CUDA,
        also=(22,),
    ),
    Pattern(
        (
            *ANY_CASE,
            "CUDA error: misaligned address",
            "Triton Error [CUDA]: misaligned address",
            "cudaErrorIllegalAddress",
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "CUDA error: an illegal instruction was encountered",
            "CUBLAS_STATUS_EXECUTION_FAILED",
            "CUBLAS_STATUS_INTERNAL_ERROR",
            "CUDNN_STATUS_EXECUTION_FAILED",
            "cudaErrorLaunchFailure",
            "cudaErrorMisalignedAddress",
            "CUDA_ERROR_LAUNCH_FAILED",
            "CUDA_ERROR_MISALIGNED_ADDRESS",
            "NVRM: Xid …: 31,",
            "NVRM: Xid …: 13,",
            "Memory access fault by GPU node-…",
            "aborting with error : HSA_STATUS_ERROR_EXCEPTION",
            "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
            "CUDA Driver Error 700",
            "Failed to initialize the TMA descriptor 700",
        ),
        "any other error of a kernel",
        7,
        _S,
        CUDA,
    ),
    # --- Python ---
    Pattern(
        ("AttributeError: 'FrozenKVMTPVerifyInput' object has no attribute 'merge_batch'",),
        "Gemma-4 with an assistant",
        3,
        _C,
        PYTHON,
    ),
    Pattern(
        ("ValueError: length of new_indices: … this should not happen",),
        "`filter_batch`",
        3,
        _C,
        PYTHON,
    ),
    Pattern(
        ("IndexError: list index out of range",),
        "in `_get_key_buffer`",
        11,
        _C,
        PYTHON,
        frames=("_get_key_buffer",),
    ),
    Pattern(
        (_BOUNDS,),
        "in the speculative worker: more tokens accepted than drafted",
        14,
        _C,
        PYTHON,
        frames=_SPEC,
        innermost=True,
        never=(", in load_token_map",),
    ),
    Pattern(
        (_BOUNDS,),
        "in the KV pools: an index that no pool has",
        18,
        _C,
        PYTHON,
        frames=("mem_cache/memory_pool", "mem_cache/swa_memory_pool", "mem_cache/allocator"),
        never=(", in write",),  # the table of requests: it is a request's number that is too high
    ),
    Pattern(
        ("IndexError: index out of range in self",),
        "in `gemma4_mtp.py`, `--tp-size 2` or more",
        22,
        _C,
        PYTHON,
        frames=("gemma4_mtp.py",),
    ),
    Pattern(
        ("AssertionError: old_prefix_len=…, new_indices=…",),
        "`cache_unfinished_req` of the prefix cache (#25091)",
        25,
        _C,
        PYTHON,
    ),
    Pattern(
        (
            "AssertionError: node is in use…",
            "AssertionError: inc_lock_swa on swa_tombstone node",
            "AssertionError: dec_lock_ref on …",
            "AssertionError: … release hit …lock_ref=0 on node",
            "AssertionError: dec_swa_lock_only on …",
            "AssertionError: tombstone …lock_ref should always be 0",
            "AssertionError: x_lru should not be locked when idle",
            "AssertionError: Incorrect LRU list, ",
            "AssertionError: parent does not have child key",
            "AssertionError: leaf node has children",
            "AssertionError: … not in lru list",
            "AssertionError: … already in lru list",
            "AssertionError: Deleting a unexpected non-tombstone leaf node",
            "AssertionError: Cannot tombstone a leaf node",
            "AssertionError: duplicate swa tombstone node",
            "AssertionError: root node is not evictable",
            "AssertionError: node … is not a D-leaf",
            "AssertionError: node … is not an H-leaf",
            "AssertionError: new_prefix_len=…, new_indices=…",  # the line below old_prefix_len's
        ),
        "a lock or a node of the prefix cache (#28161)",
        25,
        _C,
        PYTHON,
    ),
    Pattern(
        ("AssertionError",),
        "below `assert cd.lock_ref == 0`: the same",
        25,
        _C,
        PYTHON,
        frames=("assert cd.lock_ref == 0",),
    ),
    Pattern(
        ("AssertionError",),
        "without a text, innermost frame in the prefix cache",
        25,
        _C,
        PYTHON,
        frames=_TREE,
        innermost=True,
    ),
    Pattern(
        (
            "AssertionError: Committed KV cache already freed",
            "AssertionError: Overallocated KV cache already freed",
            "AssertionError: segment at … shares a page with the one ending at",
            *(f"ValueError: {text}" for text in FREED),
            "AssertionError: MultiEndedAllocator(…).free: virtual id(s)",
        ),
        "a request's KV is given back twice",
        18,
        _C,
        PYTHON,
    ),
    Pattern(
        ("AssertionError: KV cache is full!",),
        "`disaggregation/decode.py` (#29662)",
        10,
        _C,
        PYTHON,
    ),
    Pattern(
        ("AssertionError",),
        "without a text, innermost frame in the speculative worker",
        14,
        _C,
        PYTHON,
        frames=_SPEC,
        innermost=True,
    ),
    Pattern(
        ("RuntimeError: Sizes of tensors must match except in dimension …",),
        "in the speculative worker",
        14,
        _C,
        PYTHON,
        frames=_SPEC,
        innermost=True,
    ),
    Pattern(
        ("RuntimeError: cannot reshape tensor of 0 elements",),
        "rotary embedding, in a prefill (#24252)",
        25,
        _C,
        PYTHON,
        frames=("rotary_embedding",),
    ),
    Pattern(
        ("RuntimeError: output with shape [1] doesn't match the broadcast shape",),
        "0.5.14, FROZEN_KV_MTP without CUDA graphs (#29616)",
        14,
        _C,
        PYTHON,
        frames=("frozen_kv_mtp",),
    ),
    Pattern(
        ("TypeError: FrozenKVMTPWorkerV2.… 'pp_proxy_tensors'",),
        "0.5.23 with `--disable-overlap-schedule`",
        0,
        _C,
        PYTHON,
        advice="SGLang's own bug (upstream #40155): leave overlap scheduling on",
    ),
    Pattern(
        ("RuntimeError: shape mismatch: value tensor of shape …",),
        "EAGLE forced with a Gemma-4 assistant",
        5,
        _C,
        PYTHON,
        server=("eagle forced",),
    ),
    Pattern(
        (
            "Prefill out of memory. Try to lower your",
            "Decode out of memory. Try to lower your",
        ),
        "no room in a KV pool: are pages lost, or is one pool too small (2)?",
        10,
        _C,
        PYTHON,
        also=(2,),
    ),
    Pattern(
        ("RuntimeError: probability tensor contains either",),
        "NaN in the logits",
        15,
        _C,
        PYTHON,
        also=(23,),
    ),
    # --- SGLang's own leak check ---
    Pattern(
        tuple(f"ValueError: {text}" for text in LEAKS),
        "when the server is idle",
        10,
        _C,
        LEAK,
    ),
    Pattern(LEAKS, "a warning: the server lives", 10, _N, LEAK, own=True),
    Pattern(FREED, "a warning: the server lives", 18, _N, LEAK, own=True),
    Pattern(
        ("Full Pool Mem Leak Detected!", "SWA Pool Mem Leak Detected!"),
        "while busy, with `SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY`",
        10,
        _C,
        LEAK,
    ),
    # --- hangs ---
    Pattern(
        ("watchdog timeout (self.watchdog_timeout=…, self.soft=True",),
        "the soft one: the server lives",
        8,
        _N,
        HANGS,
    ),
    Pattern(
        (
            "watchdog timeout (self.watchdog_timeout=…",
            "watchdog timeout (watchdog_timeout=…",
            "Scheduler watchdog timeout",
            "Watchdog timeout (self.watchdog_timeout=…",  # of older releases
        ),
        "SGLang kills the server after 300 s",
        8,
        _H,
        HANGS,
    ),
    HEALTH,
    Pattern(
        (
            "Out of memory even after retracting",
            "retract_decode: aborted last",
            "retract_decode: aborted request …: Retract",
        ),
        "a client gets HTTP 500, the server lives",
        8,
        _N,
        HANGS,
        also=(2,),
    ),
    # --- who went first ---
    Pattern(
        (
            "Subprocess … crashed with exit code -9",
            "Fatal Python error: Aborted",
            "Subprocess … crashed with exit code -11",
            "Subprocess … crashed with exit code -6",
            "scheduler died during initialization (exit code: -",
            "Exit code: -9",
            "Exit code: -11",
            "Exit code: -6",
            "Fatal Python error: Segmentation fault",
            "Fatal Python error: Bus error",
            "Scheduler or DataParallelController … terminated with -9",
            "Scheduler or DataParallelController … terminated with -11",
            "Scheduler or DataParallelController … terminated with -6",
            "Child process unexpectedly failed with exitcode=9.",
            "Child process unexpectedly failed with exitcode=11.",
            "Child process unexpectedly failed with exitcode=139.",
            "Child process unexpectedly failed with exitcode=134.",
            "Caught signal 11 (Segmentation fault",
            "Caught signal 7 (Bus error",
            "*** SIGSEGV received at",
            "*** SIGBUS received at",
            "*** SIGABRT received at",
            "killed due to memory pressure (OOM)",
            "Task was killed due to the node running low on memory",
        ),
        "no traceback; -6 and -11, too",
        26,
        _E,
        KILLED,
    ),
    Pattern(
        (
            "oom-kill:constraint=",
            "Memory cgroup out of memory: Killed process",
            "Out of memory: Killed process",
            "OOMKilled",
            "has been killed by the OOM killer",
            "slurmstepd: error: Detected …oom_kill event",
            "srun: error: …Out Of Memory",
        ),
        "the kernel's or the container's word",
        26,
        _E,
        KILLED,
    ),
    *OUTSIDE,
    Pattern(
        (
            "Sleeping 5 seconds before crash diagnostics",
            "Waiting 60.0 seconds for CUDA coredumps before exiting",
        ),
        "0.5.23: a rank has failed; the end takes a minute",
        24,
        _A,
        KILLED,
    ),
    Pattern(
        ("NCCL error…invalid usage", "ncclInvalidUsage", "Duplicate GPU detected : rank"),
        "",
        0,
        _C,
        OTHER,
        advice="NCCL was asked for what it cannot do. Most often two ranks have one GPU: see "
        "CUDA_VISIBLE_DEVICES, --base-gpu-id and what else runs there.",
    ),
    NETWORK,  # some of its texts begin like those of a peer that is gone
    Pattern(
        (
            "Connection closed by peer",
            "NCCL error",
            "ncclRemoteError",
            "Connection reset by peer",
            "ncclInternalError",
            "unhandled cuda error",
            "Watchdog caught collective operation timeout",
            "DistBackendError: ",
            "heartbeat monitor",
            "Process group watchdog thread terminated",
            "watchdog got stuck for … without making progress",
            "Terminating the process after attempting to dump debug info",
            "failed to recv, got 0 bytes",
            "Broken pipe [",
            "recvValue failed",
            "Timed out waiting …ms for … operation to complete",
            "detected by watchdog at work",
            "sendBytes failed on SocketImpl",
            'Failed to check the "should dump" flag on TCPStore',
            "DistStoreError: wait timeout after …ms, keys: ",
            "reached monitoredBarrier, but received errors",
            "could finish the model loading, but there are other ranks",
            "DeepEP error: timeout",
            "DeepEP error: CPU recv timeout",
        ),
        "below another rank's exception, `--tp-size 2` or more",
        24,
        _A,
        KILLED,
        frames=(
            *("nccl", "NCCL", "gloo", "c10d", "ProcessGroup", "TCPStore", "torch/distributed"),
            *("onitoredBarrier", "DeepEP", "didn't finish loading"),
        ),
    ),
    # --- slow ---
    RETRACTS,
    Pattern(("g4debug: spec-batch-guards: in … got …",), "once, as a warning", 3, _N, SLOW),
    Pattern(
        (
            "NaN detected in …; values were sanitized before sampling",
            "Detected errors during sampling! NaN in the logits",
        ),
        "once, as a warning",
        15,
        _N,
        WRONG,
        own=True,
    ),
    Pattern(
        ("Bidirectional attention for image tokens requires",),
        "answers on images are worse",
        27,
        _N,
        WRONG,
    ),
    Pattern(
        (
            "Decode transfer failed for request",
            "Decode handshake failed for request",
            "Prefill transfer failed for request",
            "Prefill bootstrap failed for request",
            "Losing connection with prefill instance",
        ),
        "",
        0,
        _N,
        OTHER,
        advice="The other server of the pair did not answer. See its log. One request failed.",
    ),
    ROUTER,
    # --- start ---
    Pattern(
        ("TypeError: 'NoneType' object is not subscriptable",),
        "below `key = key[:real_num_tokens]`; E2B, E4B",
        4,
        _C,
        START,
        frames=("key = key[:real_num_tokens]",),
    ),
    Pattern(
        ("ValueError: invalid or duplicate attention layer_id",),
        "at start; E2B, E4B",
        4,
        _C,
        START,
    ),
    Pattern(
        ("TypeError: 'NoneType' object is not subscriptable",),
        "in `select_last_verified_seed`",
        13,
        _C,
        START,
        frames=("select_last_verified_seed",),
    ),
    Pattern(
        ("AttributeError: 'Gemma4AssistantForCausalLM' object has no attribute 'pp_group'",),
        "a source build",
        13,
        _C,
        START,
    ),
    Pattern(
        ("this assistant cannot be served by EAGLE",), "`SGLANG_GEMMA4_FORCE_EAGLE=1`", 5, _C, START
    ),
    Pattern(("SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM=1 is refused",), "", 6, _C, START),
    Pattern(
        ("g4debug: not armed: …", "g4debug: could not be armed: …", "g4debug: G4DEBUG_FAULTS: …"),
        "and the process ends",
        20,
        _C,
        START,
    ),
    Pattern(
        (
            "hides from the tracer page-table what it looks for",
            "was never run with …, so a finding could",
            "contradict each other: both switch fix",
        ),
        "and the process ends",
        20,
        _C,
        START,
    ),
    # --- itself ---
    Pattern(
        (
            "g4debug: hooks do not run any more",
            "g4debug: … is off: …",
            "g4debug: … is limited",
            "g4debug: this is not reported, because …",
        ),
        "at start, or while serving",
        20,
        _N,
        ITSELF,
    ),
    # --- not ours ---
    Pattern(
        (
            "CUDA out of memory. Tried to allocate",
            "HIP out of memory. Tried to allocate",
            "NPU out of memory. Tried to allocate",
            "CUDA error: out of memory",
            "Triton Error [CUDA]: out of memory",
            "HIP error: out of memory",
            "Cuda failure 'out of memory'",
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied",
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied",
            "CUBLAS_STATUS_ALLOC_FAILED",
        ),
        "",
        0,
        _C,
        OTHER,
        advice="The GPU's memory is full: weights, graphs or activations, not KV pages. "
        "Lower --mem-fraction-static, --cuda-graph-max-bs or --chunked-prefill-size; look with "
        "nvidia-smi whether another process holds memory.",
    ),
    Pattern(
        ("Not enough memory. Please try to increase",),
        "",
        0,
        _C,
        OTHER,
        advice="The weights leave no room for KV. Raise --mem-fraction-static, or use more GPUs.",
    ),
    Pattern(
        (
            "NVRM: Xid …: 79,",
            "GPU has fallen off the bus",
            "rror: uncorrectable ECC error encountered",
            "NVRM: Xid …: 48,",
            "NVRM: Xid …: 94,",
            "NVRM: Xid …: 95,",
            "NVRM: Xid …: 119,",
            "NVRM: Xid …: 74,",
            "NVRM: Xid …: 64,",
            "NVRM: Xid …: 120,",
            "NVRM: Xid …: 140,",
            "cudaErrorECCUncorrectable",
            "uncorrectable NVLink error detected",
            "cudaErrorNvlinkUncorrectable",
            "SXid …, Fatal,",
            "NVRM: Xid …: 145,… Fatal ",
        ),
        "",
        0,
        _C,
        OTHER,
        explains=True,
        advice="The GPU, its memory or its link failed. Drain the machine; nvidia-smi -q -d ECC "
        "and dmesg have the rest. No software of the server can do this.",
    ),
    replace(
        TAKEN,
        says=(
            "error while attempting to bind on address",
            "ValueError: … is not available in … seconds. ",
            "RuntimeError: engine_info_bootstrap_port … is already in use",
        ),
        stage=_C,
    ),
    TAKEN,
    Pattern(
        ("No space left on device", "OSError: [Errno 122] Disk quota exceeded"),
        "",
        0,
        _E,
        OTHER,
        advice="A disk or /dev/shm is full.",
    ),
    Pattern(
        ("PermissionError: [Errno 13] ", "OSError: [Errno 30] Read-only file system"),
        "",
        0,
        _E,
        OTHER,
        advice="The user may not read or write there. Mount a folder that can be written, or name "
        "one: HF_HOME for models, TRITON_CACHE_DIR and FLASHINFER_WORKSPACE_BASE for kernels.",
    ),
    Pattern(
        (
            "OSError: [Errno 24] Too many open files",
            "ZMQError: Too many open files",
            "RuntimeError: can't start new thread",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            "OSError: [Errno 12] Cannot allocate memory",
        ),
        "",
        0,
        _E,
        OTHER,
        advice="A limit of the machine is reached. Files: ulimit -n. Threads and processes: "
        "ulimit -u, and the container's pids limit. Memory: its cgroup.",
    ),
    Pattern(
        (
            "no kernel image is available for execution",
            "CUDA driver version is insufficient",
            "system not yet initialized",
            "ptxas fatal",
            "nvcc fatal",
            "cudaErrorInsufficientDriver",
            "CUDA error: invalid device ordinal",
            "error: invalid device function",
            "Found no NVIDIA driver on your system",
            "The NVIDIA driver on your system is too old",
            "CUDA error: the provided PTX was compiled with an unsupported toolchain",
            "cudaErrorUnsupportedPtxVersion",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            "RuntimeError: Unexpected error from cudaGetDeviceCount()",
            "OSError: libcuda.so.1: cannot open shared object file",
            "CUDA-capable device(s) is/are busy or unavailable",
            "RuntimeError: No accelerator (CUDA, ",
            "NotImplementedError: Could not run 'sgl_kernel::…' with arguments from the 'CUDA'",
        ),
        "",
        0,
        _C,
        OTHER,
        advice="Driver, GPU and this build's CUDA do not fit, or the GPU is not ready, not free, "
        "or not in the container. Nothing was computed yet.",
    ),
    Pattern(
        (
            "Ninja build failed",
            "ninja: build stopped: ",
            "Could not find nvcc",
            "NVCC compilation failed",
        ),
        "",
        0,
        _E,
        OTHER,
        advice="A kernel could not be compiled here. nvcc, a header of CUDA or ninja is missing, "
        "or they do not fit together: the compiler's lines say which.",
    ),
    Pattern(
        (
            "bytes available in AlignedAllocator",
            "Failed to allocate memory for … in AlignedAllocator",
        ),
        "",
        0,
        _C,
        OTHER,
        advice="FlashInfer's workspace is too small. Raise SGLANG_FLASHINFER_WORKSPACE_SIZE "
        "(bytes), or lower --chunked-prefill-size and --max-running-requests.",
    ),
    Pattern(
        ("out of resource: shared memory",),
        "",
        0,
        _C,
        OTHER,
        advice="This GPU has too little shared memory for a Triton kernel. Take another "
        "attention backend, or another release of Triton.",
    ),
    Pattern(
        (
            "RepositoryNotFoundError: ",
            "is not a local folder and is not a valid model identifier",
            "RuntimeError: Cannot find any model weights with",
            "RuntimeError: PytorchStreamReader failed",
            "FileNotFoundError: …No such file or directory: ….safetensors'",
            "ValueError: Tokenizer class … does not exist or is not currently imported",
            "GatedRepoError: ",
            "SafetensorError: ",
            "LocalEntryNotFoundError: ",
            "does not appear to have a file named",
            "couldn't connect to 'https://huggingface.co'",
            "HfHubHTTPError: ",
            "You are trying to access a gated repo",
            "rror: …host='huggingface.co'",
            "OSError: Can't load tokenizer for",
            "ValueError: Unrecognized model in",
            "did not match any variant of untagged enum",
        ),
        "",
        0,
        _E,
        OTHER,
        advice="The model was not found, is damaged, or cannot be read. Or it needs "
        "newer transformers or tokenizers.",
    ),
    Pattern(
        (
            "ModuleNotFoundError: ",
            "ImportError: ",
            "Exception: … is less than the minimum required version",
        ),
        "",
        0,
        _E,
        OTHER,
        advice="A package is missing, or two do not fit together. g4debug doctor looks at the "
        "environment.",
    ),
    Pattern(
        (
            "unrecognized arguments: ",
            "launch_server.py: error: ",
            "ValueError: Model architectures … are not supported for now",
            "but Transformers does not recognize this architecture",
        ),
        "",
        0,
        _E,
        OTHER,
        advice="This release does not know an argument, or the model. If it should know the model, "
        "a line 'Ignore import error when loading' above says why not.",
    ),
    Pattern(
        ("ValueError: Not enough host memory available",),
        "",
        0,
        _C,
        OTHER,
        advice="The host's memory does not hold HiCache. Lower --hicache-size or --hicache-ratio.",
    ),
    Pattern(
        (
            "nixlBackendError: NIXL_ERR_",
            "RuntimeError: Mooncake memory registration failed",
            "RuntimeError: Mooncake Transfer Engine initialization failed",
            "RuntimeError: Failed to register buffer to Mooncake Store",
        ),
        "",
        0,
        _E,
        OTHER,
        advice="Mooncake or NIXL cannot use the network. Look at the lines above it, "
        "--disaggregation-ib-device, ulimit -l, the module nvidia_peermem, and for a second UCX.",
    ),
    PROBE,
    SIGTERM,
    CLUSTER,
    Pattern(
        ("KeyboardInterrupt",),
        "",
        0,
        _A,
        OTHER,
        advice="Somebody pressed Ctrl-C.",
    ),
)

# What has no text in a log: rows of the index only. (what you see, entries), under WRONG or SLOW.
SEEN: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    HANGS: (
        ("`/health` answers 200, the GPU idles, one prompt waits for ever", (8,)),
        ("requests get no answer, the processes live", (8,)),
    ),
    WRONG: (
        ("long answers go wrong in the middle; many requests share a prefix", (9,)),
        ("0.5.14 to 0.5.17: wrong now and then, and right with page-table armed", (9,)),
        ("wrong when prompt and answer are longer than the sliding window", (19,)),
        ("tokens are repeated or missing, or differ from those without MTP", (14,)),
        ("a text-only Gemma-4 with MTP and `--tp-size 2` or more", (22,)),
        ("NaN in the logits, or wrong answers without a shared prefix", (15,)),
        ("every tracer is armed and silent; often one GPU, `head_dim` or batch size", (27,)),
        ("none of the above: some answers are wrong, under load", (17, 18, 21)),
        ("decode on triton: tokens beyond the window differ from a prefill", (16,)),
        ("hidden states captured from Gemma-4 differ from a reference", (12,)),
        ("answers depend on who asked before; gone with `--disable-radix-cache`", (25,)),
    ),
    SLOW: (
        ("`full token usage` and `swa token usage` are far apart, `#queue-req` high", (2,)),
        ("`#queue-req` grows over hours, a restart helps", (10,)),
        ("`accept len` is low: MTP with FROZEN_KV_MTP, nothing crashes", (1, 14)),
        ("`accept len` is low: MTP with `--tp-size 2` or more", (22,)),
        ("`accept len` is low: an EAGLE3 or DFLASH draft for Gemma-4", (12,)),
        ("`accept len` is low: `SGLANG_GEMMA4_FORCE_EAGLE=1`", (5,)),
        ("a multimodal Gemma-4 prefills without CUDA graphs", (6,)),
        ("`--speculative-algorithm EAGLE` runs as FROZEN_KV_MTP", (5,)),
    ),
    START: (("BF16 experts on SM100 get `flashinfer_trtllm`, in a source build", (13,)),),
}


def texts(kind: FindingKind) -> tuple[str, ...]:
    """What the log line of a finding says: the spans of code of ``kind.says``."""
    return tuple(re.findall(r"`([^`]+)`", kind.says))


@cache
def _by_check() -> dict[str, tuple[tuple[re.Pattern[str], int, FindingKind], ...]]:
    """Check -> the texts of its kinds, and how much of each is literal; the most literal first."""
    found = {}
    for check, kinds in KINDS.items():
        rows = [
            (re.compile(".*?".join(map(re.escape, t.split(HOLE)))), len(t.replace(HOLE, "")), k)
            for k in kinds.values()
            for t in texts(k)
        ]
        found[check] = tuple(sorted(rows, key=lambda row: -row[1]))
    return found


FINDING = re.compile(
    r"g4debug: (?P<check>"
    + "|".join(map(re.escape, KINDS))
    + r")(?: in [^:]{1,120}| at idle| while busy)?: "
)


# Above a finding that an exception names: SGLang may have raised it anew, with words of its own.
_RAISED = re.compile(r"(?:[\w.]{0,100}(?:Error|Exception): (?:[\w .-]{1,80}: )?)?")


def kind_of(line: str, quoted: bool = True) -> FindingKind | None:
    """The kind of the finding that a log line tells; None if it tells none.

    quoted: wherever it stands in the line. Else only where g4debug itself can have written it: at
    the beginning, or behind the name of an exception.
    """
    found = FINDING.search(line)
    if found is None:
        return None
    if not quoted and not _RAISED.fullmatch(line, 0, found.start()):
        return None
    headline = line[found.start() + len("g4debug: ") :]
    for regex, _, kind in _by_check()[found["check"]]:
        if regex.search(headline):
            return kind
    return None


@cache
def of_kind(kind: FindingKind) -> Pattern:
    """The pattern of a kind of finding, from its record."""
    return Pattern(
        texts(kind), f"`{kind.check}: {kind.name}`", by_title()[kind.entry], _STAGES[kind.place]
    )


def of_finding(kind: FindingKind, line: str) -> Pattern:
    """The same for a finding in a line: who freed the page may name another entry."""
    pattern, entry = of_kind(kind), by_title()[kind.entry_for(line)]
    return pattern if entry == pattern.entry else of_entry(pattern, entry)


def of_entry(pattern: Pattern, entry: int) -> Pattern:
    """The same pattern where another entry explains it."""
    return replace(pattern, entry=entry, also=(pattern.entry,))
