"""An SGLang plugin of the engine test: a scheduler ends itself at a place of the test's choice.

KILL_BY is the number of a signal, ``exit`` for ``os._exit(3)``, or ``memory`` to take all there is.
KILL_AT is ``start`` (while the model is loaded), ``forward`` (in a step), ``write`` (in the middle
of a record of the black box), ``idle``, ``server`` (in a step, the server's first process instead)
or ``never``. KILL_STEP is the step, KILL_RANK the rank or ``both``; a rank is tensor-parallel, or
with ``dp`` in front data-parallel.
"""

import os
import signal
import threading
import time


def end() -> None:
    how = os.environ["KILL_BY"]
    print(f"THE SCHEDULER {os.getpid()} ENDS AT {time.time_ns()}", flush=True)
    if how == "exit":
        os._exit(3)
    if how == "memory":
        kept = []
        while True:
            kept.append(b"x" * (64 << 20))
    os.kill(os.getpid(), int(how))
    signal.pause()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from g4debug import plugin
    from g4debug.findings import black_box

    at, when = os.environ["KILL_AT"], int(os.environ.get("KILL_STEP", "5"))

    def recorder():
        return plugin.in_force.recorder

    def due() -> bool:
        rank = os.environ.get("KILL_RANK", "0")
        ranks = recorder().ranks
        mine = rank in ("both", f"dp{ranks.dp}") or str(ranks.tp) == rank or ranks.tp < 0
        return mine and recorder().step >= when

    def forward(attend, *args, **kwargs):
        if at == "forward" and due():
            end()
        if at == "server" and due():
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return attend(*args, **kwargs)

    def load(original, *args, **kwargs):
        result = original(*args, **kwargs)
        if at == "start":
            end()
        return result

    def later():
        def wait() -> None:
            before = -1
            while recorder().step < when or recorder().step != before:
                before = recorder().step
                time.sleep(2)
            end()

        threading.Thread(target=wait, daemon=True).start()

    class Torn:
        """Writes the number that marks a record as whole, but not that of the last one."""

        def __init__(self, numbers):
            self.numbers = numbers

        def __setitem__(self, at, number):
            if number and at != black_box._MARKS_AT >> 3 and due():
                end()
            self.numbers[at] = number

    if at == "write":
        lie_in = black_box.BlackBox._lie_in

        def torn(box, memory):
            lie_in(box, memory)
            box._numbers = Torn(box._numbers)

        black_box.BlackBox._lie_in = torn
    backend = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
    for phase in ("forward_decode", "forward_extend"):
        HookRegistry.register(f"{backend}.{phase}", forward, HookType.AROUND)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", load, HookType.AROUND)
    if at == "idle":
        loop = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
        started = []

        def first(scheduler, *args, **kwargs):
            if not started:
                started.append(later())

        HookRegistry.register(loop, first, HookType.BEFORE)
