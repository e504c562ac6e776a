"""Cost of the head and its loss, forward and backward.

    python benchmarks/loss.py               # six minutes on two cores; on the GPU if there is one

Measures cross-entropy over all logits at once, llmtrain's in chunks, plain and compiled (`parallel.compile`), and liger-kernel's
(`parallel.loss_kernel=liger`) if it is installed and there is a GPU. They take turns on the same inputs. With `--write`, the table
goes to benchmarks/results/loss/.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from loops import is_asked, on_gpu, quartiles, take_turns
from peaks import allocator_peak
from table import RESULTS, Row, markdown, parser, show, write_page

if TYPE_CHECKING:
    import torch

ALL_AT_ONCE, PLAIN, COMPILED, LIGER = "all at once", "chunked", "chunked, compiled", "liger"
COLUMNS = (
    "loss",
    "",
    "tokens",
    "hidden",
    "vocabulary",
    "ms",
    "quartiles",
    "of all at once",
    "peak, MB",
    "first time, s",
)
WORDS = 2
CASES = (("fp32", 4096, 512, 8192), ("bf16", 4096, 512, 8192), ("fp32", 2048, 768, 50304))
"""(Precision, tokens, hidden size, vocabulary) of each case on a CPU: the 33M model of throughput.py, and GPT-Neo 125M."""
CASES_ON_GPU = (("bf16", 16384, 2048, 50304), ("bf16", 8192, 4096, 128256))
"""The same on a GPU: the 1B model of throughput.py, and Llama 3 8B."""
NOTES = """\
Medians over the turns; *of all at once*: the median ratio within a turn. *Peak*: the most that torch's allocator had handed out
at a time beyond what came in. *First time*: compiling is in it. That loss and gradients agree: `tests/unit/test_loss.py`."""


def losses(chunk: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Return the losses that can be measured on this machine, by name: functions from (hidden, weight, bias, labels) to a scalar."""
    import torch.nn.functional as F

    from llmtrain.loss import IGNORE_INDEX, summed_loss

    def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, bias: None, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    found = {ALL_AT_ONCE: all_at_once, PLAIN: summed_loss("torch", chunk, False)}
    found[COMPILED] = summed_loss("torch", chunk, True)
    if on_gpu() and importlib.util.find_spec("liger_kernel"):
        found[LIGER] = summed_loss("liger", chunk, False)
    return found


def measure(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, for one case, each loss's seconds by turn, the seconds of its first call, and its peak memory in bytes."""
    import torch

    from llmtrain.parallel.wrapping import COMPUTE

    precision, tokens, width, vocabulary = task["case"]
    device, dtype = "cuda" if on_gpu() else "cpu", COMPUTE[precision]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def once(loss: Callable[..., torch.Tensor]) -> float:
        began = time.perf_counter()
        torch.autograd.grad(loss(hidden, weight, None, labels), (hidden, weight))
        if on_gpu():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    measured = losses(task["chunk"])
    first = {name: once(loss) for name, loss in measured.items()}
    peaks = {name: _peak(partial(once, loss)) for name, loss in measured.items()}
    work = {
        name: lambda loss=loss: statistics.median(once(loss) for _ in range(task["times"]))
        for name, loss in measured.items()
    }
    seconds = take_turns(work, task["turns"])
    return {name: {"seconds": seconds[name], "first": first[name], "peak": peaks[name]} for name in measured}


def rows_of(case: tuple[str, int, int, int], found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the rows of one case."""
    precision, tokens, width, vocabulary = case
    rows = []
    for name, one in found.items():
        low, middle, high = quartiles([1e3 * seconds for seconds in one["seconds"]])
        ratio = statistics.median(a / b for a, b in zip(one["seconds"], found[ALL_AT_ONCE]["seconds"], strict=True))
        sizes = (f"{tokens:,}", f"{width:,}", f"{vocabulary:,}")
        compared = "" if name == ALL_AT_ONCE else f"{ratio:.2f}"
        cells = (
            f"{middle:.1f}",
            f"{low:.1f} to {high:.1f}",
            compared,
            f"{one['peak'] / 1e6:,.0f}",
            f"{one['first']:.1f}",
        )
        rows.append((name, precision, *sizes, *cells))
    return rows


def _peak(work: Callable[[], object]) -> int:
    import torch

    if not on_gpu():
        return allocator_peak(work)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Measure one case after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--chunk", type=int, default=1024, help="parallel.loss_chunk")
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--times", type=int, default=3, help="in a turn")
    options = arguments.parse_args()
    rows: list[Row] = []
    for case in CASES_ON_GPU if on_gpu() else CASES:
        common = {"chunk": options.chunk, "turns": options.turns, "times": options.times}
        rows += rows_of(case, measure({"case": case, **common}))
    where = "a GPU" if on_gpu() else "a CPU"
    title = f"Head and loss on {where}, chunks of {options.chunk}, {options.turns} turns of {options.times} times"
    show(title, COLUMNS, rows, words=WORDS)
    if options.write:
        write_page(RESULTS / "loss", "What the loss costs", [f"{title}.", markdown(COLUMNS, rows, words=WORDS), NOTES])


if __name__ == "__main__" and not is_asked(measure):
    main()
