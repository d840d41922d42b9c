"""Measures the guards of this checkout beside those of another one, on a GPU.

    python benchmarks/guard_time.py OTHER --out FOLDER [--rows 1,8,64] [--rounds 200]

OTHER is the folder of another checkout, for example an unpacked ``git archive 5e1d945``. Both are
loaded into one process, and get the same sound tables, lists of tokens and locations. For each
guard (page table, token lists, KV writes) and each batch it measures, in turns within each round:

* on the GPU: the time of one launch in the replay of a CUDA graph with 20 of them;
* on the host: the time of one launch outside of a CUDA graph, which is not waited for.

FOLDER gets ``guard_time.csv`` (medians, quartiles, and their ratios) and ``guard_registers.csv``
(what the compiled kernels need). A table of the ratios is printed last. No SGLang is needed.
``--device cpu`` runs it in Triton's interpreter (with ``TRITON_INTERPRET=1``), to try the script
itself: such times mean nothing.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import kernels, options, results
from measuring.servers import in_turns

LAUNCHES = 20  # in one graph, and in one measurement of the host
HERE = Path(__file__).resolve().parents[1]
PAGE = 64
# Where a checkout has each thing: the newest place first, then older checkouts' places.
PLACES = {
    "TrapBuffer": ("sanitizer.trap_buffer:TrapBuffer", "tracers.trap_buffer:TrapBuffer"),
    "Truth": ("sanitizer.reference_state:Truth", "tracers.truth:Truth"),
    "TokenLists": ("backends.handed_over:TokenLists", "tracers.page_table.token_check:TokenLists"),
    "shadows": ("ledger.shadow:",),
    "owners": ("ledger.owners:",),
    "page_guard": ("tracers.page_table.guard:",),
    "token_guard": ("tracers.page_table.token_guard:",),
    "writes": ("tracers.kv_writes.kernels:",),
    "Rows": ("tracers.kv_writes.check:Rows",),
    "Stamps": ("tracers.kv_writes.check:Stamps", "tracers.kv_writes.kernels:Stamps"),
}
MAILBOX = ("new_mailbox", "new_slot")  # of a trap buffer
Call = Callable[[], None]


def load(root: Path) -> SimpleNamespace:
    """The guards of a checkout. Its modules are g4debug's only while they are imported."""
    found, mine = {}, sys.modules
    for name in [m for m in mine if m.partition(".")[0] == "g4debug"]:
        del mine[name]
    sys.path.insert(0, str(root))
    try:
        for name, places in PLACES.items():
            found[name] = next((x for x in map(_thing, places) if x is not None), None)
            if found[name] is None:
                raise SystemExit(f"{root} has none of {', '.join(places)}")
        where = Path(str(mine["g4debug"].__file__)).parent
        assert where == root / "g4debug", f"{where} was imported, not {root}"
    finally:
        sys.path.remove(str(root))
    return SimpleNamespace(**found)


def _thing(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        loaded = importlib.import_module(f"g4debug.{module}")
    except ModuleNotFoundError:
        return None
    return getattr(loaded, name, None) if name else loaded


class Case:
    """The input of one forward: rows of ``tokens`` tokens, in random pages of ``page``."""

    def __init__(self, rows: int, tokens: int, device: torch.device, page: int = PAGE) -> None:
        columns = -(-tokens // page) + 1
        pages = rows * columns + 1
        own = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        table = own.view(rows, columns)
        places = (table[:, :, None] * page + torch.arange(page)).view(rows, -1)
        whole = torch.zeros(rows + 1, columns * page, dtype=torch.int32)
        whole[1:] = places.to(torch.int32)
        self.rows, self.tokens, self.pages, self.device = rows, tokens, pages, device
        self.page = page
        self.table = table.to(torch.int32).to(device)
        self.places, self.req_to_token = places.to(device), whole.to(device)
        self.first_tokens = whole[:, ::page].contiguous().to(device)
        self.requests = torch.arange(1, rows + 1, device=device)
        self.step = torch.full((1,), 7, device=device)

    def owners(self, tree: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """The owner of each page, and how much is lent in each row: nothing. In a checkout that
        knows no columns, an owner is only a row."""
        places = hasattr(tree.owners, "place")
        word = torch.int64 if places else torch.int32
        owners = torch.zeros(self.pages + 1, dtype=word)
        row, column = (torch.arange(n) for n in self.table.shape)
        whose = tree.owners.place(row[:, None] + 1, column) if places else row[:, None] + 1
        owners[self.table.long().cpu()] = whose.to(word)
        lent = torch.zeros(self.rows + 1, dtype=word, device=self.device)
        return owners.to(self.device), lent

    def truth(self, tree: SimpleNamespace, swa: bool, by_snapshot: bool) -> Any:
        """In the SWA pool each page has the same number as in the full one."""
        shadow = tree.shadows.new(self.pages, self.device)
        shadow[:-1] = torch.arange(self.pages) if swa else tree.shadows.HELD
        owners, protected = self.owners(tree)
        return tree.Truth(
            self.first_tokens if by_snapshot else self.req_to_token,
            self.requests,
            swa,
            shadow,
            owners=owners,
            protected=protected,
            apart=1 if by_snapshot else 0,
            step=self.step if by_snapshot else None,
            padding=1,
        )

    def page_table(self, tree: SimpleNamespace, trap: Any, swa: bool, by_snapshot: bool) -> Call:
        lengths = torch.full((self.rows,), self.tokens, dtype=torch.int32, device=self.device)
        truth, out = self.truth(tree, swa, by_snapshot), torch.zeros_like(self.table)
        window, mailbox = 511 if swa else -1, _mailbox(trap)

        def call() -> None:
            tree.page_guard.launch(
                self.table, out, lengths, None, trap, mailbox, self.pages, self.page, window, truth,
                False,
            )  # fmt: skip

        return call

    def lists(self, tree: SimpleNamespace, swa: bool = False) -> Any:
        """The TokenLists of a decode."""
        listed = min(self.tokens, 512) if swa else self.tokens
        return tree.TokenLists(
            self.places[:, self.tokens - listed : self.tokens].flatten().contiguous(),
            (torch.arange(self.rows + 1) * listed).to(torch.int32).to(self.device),
            torch.full((self.rows,), self.tokens, device=self.device),
            window=512 if swa else -1,
            splits=torch.full((self.rows,), 8, dtype=torch.int32, device=self.device),
            max_splits=16,
        )

    def token_lists(self, tree: SimpleNamespace, trap: Any, swa: bool, by_snapshot: bool) -> Call:
        lists, size = self.lists(tree, swa), self.pages * self.page
        truth, mailbox = self.truth(tree, swa, by_snapshot), _mailbox(trap)

        def call() -> None:
            tree.token_guard.launch(lists, trap, mailbox, size, self.page, truth)

        return call

    def kv_writes(self, tree: SimpleNamespace, trap: Any, swa: bool, by_snapshot: bool) -> Call:
        """The KV-write guard's launch for a verify with four tokens in each row."""
        loc = self.places[:, self.tokens : self.tokens + 4].flatten().contiguous()
        firsts = torch.full((self.rows,), self.tokens, device=self.device)
        rows = tree.Rows(self.rows, 4, firsts, per_row=4)
        stamps, out = tree.Stamps.new(self.pages * self.page, self.device), torch.empty_like(loc)
        truth, mailbox = self.truth(tree, swa, by_snapshot), _mailbox(trap)

        def call() -> None:
            tree.writes.launch(loc, out, stamps, trap, mailbox, self.page, rows, truth, False)

        return call


GUARDS = {"page table": Case.page_table, "token lists": Case.token_lists, "writes": Case.kv_writes}
POOLS = {"full, live": (False, False), "swa, snapshot": (True, True)}


def _mailbox(trap: Any) -> int:
    return int(next(getattr(trap, name) for name in MAILBOX if hasattr(trap, name))())


def graph_of(call: Call) -> Callable[[], float]:
    """Microseconds of one launch in a replay."""
    graph, _ = kernels.captured(lambda i: call(), LAUNCHES)
    clock = kernels.Clock()
    return lambda: clock.us(graph.replay) / LAUNCHES


def host_of(call: Call) -> Callable[[], float]:
    """Microseconds that the host needs for one launch."""

    def measured() -> float:
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        taken = time.perf_counter() - begin
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken * 1e6 / LAUNCHES

    return measured


def measured(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each way once in each round; another one is first each time."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _, order in in_turns(ways, rounds):
        for name in order:
            found[name].append(ways[name]())
    return found


def registers(trees: dict[str, SimpleNamespace]) -> list[dict[str, Any]]:
    """Registers and memory of each compiled kernel: the guards' launchers remember them."""
    found = []
    for name, tree in trees.items():
        for module in (tree.page_guard, tree.token_guard, tree.writes):
            for launcher in vars(module).values():
                for key, (made, _) in getattr(launcher, "_compiled", {}).items():
                    flags = " ".join(str(x) for x in key[1])
                    kernel = launcher.function.fn.__name__
                    at = {"kernel": kernel, "constants": flags, "checkout": name}
                    sizes = {"registers": made.n_regs, "spills": made.n_spills}
                    found.append({**at, **sizes, "shared_bytes": made.metadata.shared})
    return sorted(found, key=lambda row: (*row.values(),))


def main() -> None:
    parser = options.parser(__doc__, "cuda", rounds=200, out="")
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=8000)
    args = parser.parse_args()
    device = torch.device(args.device)
    trees = {"other": load(args.other.resolve()), "this": load(HERE)}
    on_gpu = device.type == "cuda"
    measures = {"gpu": graph_of, "host": host_of} if on_gpu else {"host": host_of}
    kind = torch.cuda.get_device_name(0) if on_gpu else "cpu"
    print(f"{kind}, torch {torch.__version__}")
    rows_of_times = []
    for rows in map(int, args.rows.split(",")):
        case = Case(rows, args.tokens, device)
        for guard, of in GUARDS.items():
            for pool, which in POOLS.items():
                traps = {name: tree.TrapBuffer(device, 64) for name, tree in trees.items()}
                calls = {name: of(case, tree, traps[name], *which) for name, tree in trees.items()}
                for call in (*calls.values(), *calls.values()):
                    call()  # compiled, and loaded by its launcher
                for where, measure in measures.items():
                    ways = {name: measure(call) for name, call in calls.items()}
                    measured(ways, 3)
                    at = {"guard": guard, "pool": pool, "rows": rows, "where": where}
                    rows_of_times.append(at | _summed(measured(ways, args.rounds)))
                    print(*rows_of_times[-1].values(), sep=",", flush=True)
                for name, trap in traps.items():
                    assert not trap.tripped, f"{name} calls {guard}, {pool} bad: {trap.take()}"
    args.out.mkdir(parents=True, exist_ok=True)
    results.write("", rows_of_times, kind, args.out / "guard_time.csv")
    results.write("", registers(trees), kind, args.out / "guard_registers.csv")
    _table(rows_of_times)


def _summed(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians, the median of the ratios within each round, and the widths between quartiles."""
    other, this = times["other"], times["this"]
    wide = [statistics.quantiles(t, n=4) if len(t) > 1 else (t[0], 0, t[0]) for t in (other, this)]
    found = {
        "other_us": statistics.median(other),
        "this_us": statistics.median(this),
        "ratio": statistics.median(b / a for a, b in zip(other, this, strict=True)),
        "other_iqr_us": wide[0][2] - wide[0][0],
        "this_iqr_us": wide[1][2] - wide[1][0],
    }
    return {name: round(value, 3) for name, value in found.items()}


def _table(rows: list[dict[str, Any]]) -> None:
    """Time of this checkout over the other's, for each batch."""
    batches = sorted({row["rows"] for row in rows})
    print(f"\n{'this / other':33}" + "".join(f"{f'batch {n}':>10}" for n in batches))
    ratios = {(r["where"], r["guard"], r["pool"], r["rows"]): r["ratio"] for r in rows}
    for where, guard, pool in dict.fromkeys(key[:3] for key in ratios):
        cells = (f"{ratios[where, guard, pool, n]:10.3f}" for n in batches)
        print(f"{where:5}{guard:13}{pool:15}" + "".join(cells))


if __name__ == "__main__":
    main()
