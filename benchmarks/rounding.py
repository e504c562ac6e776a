"""Cost of rounding a message, and what compiling saves of it.

    python benchmarks/rounding.py               # two minutes on two cores; on the GPU if there is one

Each wire format encodes and decodes messages of fp32 values, plain and compiled (`parallel.compile`), in turns with copies of
the values. On a CPU, one thread does so, as in each rank of a node. The messages take turns, too, so that their values come from
memory and not from a cache. With `--write`, the table goes to benchmarks/results/rounding/.
"""

from __future__ import annotations

import itertools
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
    "of a copy",
    "decode, ms",
    "its quartiles",
    "of a copy",
    "to compile, s",
)
ROWS = 4
"""Parts of a message, one per replica."""
MESSAGES = 8


def coded(kind: str, compiled: bool, messages: list[torch.Tensor]) -> tuple[dict[str, Callable[[], object]], float]:
    """Return functions that encode and decode the next message, ready to be timed, and the seconds of their first calls."""
    from llmtrain.parallel.wire_format import WireFormat

    wire = WireFormat(kind, compiled)
    began = time.perf_counter()
    payloads = [wire.encode(values) for values in messages]
    done(wire.decode(payloads[0], messages[0].dtype))
    first = time.perf_counter() - began
    values, payload = itertools.cycle(messages), itertools.cycle(payloads)
    return {
        "encode": lambda: done(wire.encode(next(values))),
        "decode": lambda: done(wire.decode(next(payload), messages[0].dtype)),
    }, first


def done(result: object) -> object:
    """Return a result after the device has computed it."""
    import torch

    if on_gpu():
        torch.cuda.synchronize()
    return result


def seconds_of(once: Callable[[], object], times: int) -> float:
    """Return the median seconds of `times` calls."""
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
            mine = seconds[f"{how} {work}"]
            low, middle, high = quartiles([1e3 * one for one in mine])
            ratio = statistics.median(a / b for a, b in zip(mine, seconds["copy"], strict=True))
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{ratio:.2f}"]
        rows.append((kind, how, *cells, "" if how == "plain" else f"{compiling:.1f}"))
    return rows


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return one format's seconds by turn, as `plain encode` and so on, and the seconds that compiling took."""
    import torch

    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    device = "cuda" if on_gpu() else "cpu"
    messages = [torch.randn(ROWS, task["values"] // ROWS, device=device) for _ in range(MESSAGES)]
    plain, _ = coded(task["kind"], False, messages)
    compiled, first = coded(task["kind"], True, messages)
    values = itertools.cycle(messages)
    works = {"copy": lambda: done(next(values).clone())}
    works |= {f"plain {name}": work for name, work in plain.items()}
    works |= {f"compiled {name}": work for name, work in compiled.items()}
    timed = {name: partial(seconds_of, work, task["times"]) for name, work in works.items()}
    return {"seconds": take_turns(timed, task["turns"]), "compiling": first}


def main() -> None:
    """Measure one format after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--values", type=int, default=2**22, help="in a message, a multiple of 512")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--turns", type=int, default=20)
    arguments.add_argument("--times", type=int, default=9, help="in a turn")
    options = arguments.parse_args()
    rows: list[Row] = []
    copies: list[float] = []
    for kind in KINDS:
        task = {name: getattr(options, name) for name in ("values", "threads", "turns", "times")}
        found = measure({"kind": kind, **task})
        rows += rows_of(kind, found["seconds"], found["compiling"])
        copies += found["seconds"]["copy"]
    low, middle, high = quartiles([1e3 * one for one in copies])
    title = (
        f"Rounding messages of {options.values:,} fp32 values, {options.turns} turns of {options.times} times. A copy takes "
        f"{middle:.2f} ms ({low:.2f} to {high:.2f})"
    )
    show(title, COLUMNS, rows, words=2)
    if options.write:
        notes = (
            "Medians over the turns. *Of a copy*: the median ratio within a turn to copying the values to a new tensor. Plain and "
            "compiled codes have the same bits (tests/unit/test_wire.py)."
        )
        write_page(RESULTS / "rounding", "What rounding costs", [f"{title}.", markdown(COLUMNS, rows, words=2), notes])


if __name__ == "__main__" and not is_asked(measure):
    main()
