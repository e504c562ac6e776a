"""What does rounding a message cost, and what does compiling it save?

    python benchmarks/rounding.py               # two minutes on two cores; on the GPU if there is one

Each wire format encodes and decodes one message of fp32 values, plain and compiled (`parallel.compile`), in turns; on a CPU
with one thread, as each of a node's ranks has. With `--write` the table goes to benchmarks/results/rounding/.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from loops import is_asked, on_gpu, quartiles, take_turns
from table import RESULTS, Row, markdown, parser, show, write_page

if TYPE_CHECKING:
    import torch

KINDS = ("bf16", "int8", "int4", "fp4", "2bit")
COLUMNS = (
    "wire",
    "",
    "encode, ms",
    "its quartiles",
    "of plain",
    "decode, ms",
    "its quartiles",
    "of plain",
    "to compile, s",
)
ROWS = 4
"""Parts of a message: one for each replica."""


def coded(kind: str, compiled: bool, values: torch.Tensor) -> tuple[dict[str, Callable[[], object]], float]:
    """Return functions that encode and decode `values`, ready to be timed, and the seconds of their first calls."""
    import torch

    from llmtrain.parallel.wire_format import WireFormat

    wire = WireFormat(kind, compiled)

    def done(work: Callable[[], torch.Tensor]) -> torch.Tensor:
        result = work()
        if on_gpu():
            torch.cuda.synchronize()
        return result

    began = time.perf_counter()
    payload = done(lambda: wire.encode(values))
    done(lambda: wire.decode(payload, values.dtype))
    first = time.perf_counter() - began
    work = {"encode": lambda: wire.encode(values), "decode": lambda: wire.decode(payload, values.dtype)}
    return {name: partial(done, one) for name, one in work.items()}, first


def seconds_of(once: Callable[[], object], times: int) -> float:
    """Return the median seconds of one call."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        once()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def rows_of(kind: str, seconds: dict[str, list[float]], compiling: float) -> list[Row]:
    """Return the two rows of a wire format. `seconds` has the seconds of each turn, by "plain encode" and so on."""
    rows = []
    for how in ("plain", "compiled"):
        cells: list[str] = []
        for work in ("encode", "decode"):
            mine, plain = seconds[f"{how} {work}"], seconds[f"plain {work}"]
            low, middle, high = quartiles([1e3 * one for one in mine])
            ratio = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}", "" if how == "plain" else f"{ratio:.2f}"]
        rows.append((kind, how, *cells, "" if how == "plain" else f"{compiling:.1f}"))
    return rows


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return one format's seconds by turn, as `plain encode` and so on, and the seconds that compiling took."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = torch.randn(ROWS, task["values"] // ROWS, device="cuda" if on_gpu() else "cpu")
    plain, _ = coded(task["kind"], False, values)
    compiled, first = coded(task["kind"], True, values)
    both = {f"plain {name}": work for name, work in plain.items()}
    both |= {f"compiled {name}": work for name, work in compiled.items()}
    timed = {name: partial(seconds_of, work, task["times"]) for name, work in both.items()}
    return {"seconds": take_turns(timed, task["turns"]), "compiling": first}


def main() -> None:
    """Measure one format after another, print the table, and write the page if asked to."""
    arguments = parser(__doc__)
    arguments.add_argument("--values", type=int, default=2**21, help="in a message, a multiple of 512")
    arguments.add_argument("--turns", type=int, default=9)
    arguments.add_argument("--times", type=int, default=9, help="in a turn")
    options = arguments.parse_args()
    rows: list[Row] = []
    for kind in KINDS:
        task = {"values": options.values, "turns": options.turns, "times": options.times}
        found = measure({"kind": kind, **task})
        rows += rows_of(kind, found["seconds"], found["compiling"])
    title = f"Rounding {options.values:,} fp32 values, {options.turns} turns of {options.times} times"
    show(title, COLUMNS, rows, words=2)
    if options.write:
        notes = "Medians over the turns. *Of plain*: the median ratio within a turn. The bits are the same (tests/unit/test_wire.py)."
        write_page(RESULTS / "rounding", "What rounding costs", [f"{title}.", markdown(COLUMNS, rows, words=2), notes])


if __name__ == "__main__" and not is_asked(measure):
    main()
