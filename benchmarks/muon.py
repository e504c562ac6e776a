"""Cost of a step of Muon, compared with its matrix products and with a step of AdamW.

    python benchmarks/muon.py                           # a few minutes on two cores; on the GPU if there is one
    python benchmarks/muon.py --sizes 160M 1B           # for a GPU
    python benchmarks/muon.py --precision bf16          # on a CPU, whose products in bf16 may be slow

Times four loops in turns, on the matrices of all layers of a Llama and on one device: a step of Muon, its Newton-Schulz products
alone, a step of torch.optim.Muon (in bf16), and a step of fused AdamW. With `--write`, the table goes to
benchmarks/results/muon/.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from loops import on_gpu, quartiles, take_turns
from sync_cost import SMALL, recipe_of
from table import RESULTS, Row, markdown, parser, show, write_page
from throughput import SIZES

if TYPE_CHECKING:
    import torch

    from llmtrain.plan.model_size import ModelSize

LOOPS = ("products", "Muon", "torch's Muon", "AdamW")
COLUMNS = (
    "model",
    "iterations in",
    "loop",
    "matrices",
    "ms a step",
    "quartiles",
    "of the products",
    "Gflop/s of products",
)
NOTES = """\
Medians over the turns; *of the products*: the median ratio within a turn. *Products*: of every matrix, five iterations of
three products, each of which reads the result of the one before, in matrices that were allocated before. *Muon* adds momentum,
norms, new matrices and the change of the parameters. torch's iterates in bf16."""


def loops_of(size: ModelSize, precision: str) -> dict[str, Callable[[], object]]:
    """Return, for each loop, a function that takes one step on the matrices of a model's layers and returns its seconds."""
    import torch

    from llmtrain.config import MuonSection
    from llmtrain.parallel.comms import Comms
    from llmtrain.parallel.muon import PRECISION, Muon, ShardedMatrix

    torch.manual_seed(0)
    device = "cuda" if on_gpu() else "cpu"
    shapes = [shape for _ in range(size.layers) for shape in size.layer_matrices]

    def parameters() -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for parameter in made:
            parameter.grad = torch.randn_like(parameter)
        return made

    section = MuonSection(precision=precision)
    ours = Muon([ShardedMatrix(p, p.shape) for p in parameters()], 1e-3, 0.1, section, Comms(None))
    torchs = torch.optim.Muon(parameters(), adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(parameters(), fused=True)
    # With orthogonal rows, the products neither grow nor vanish.
    inputs = [torch.nn.init.orthogonal_(torch.empty(sorted(shape), device=device)) for shape in shapes]
    inputs = [x.to(PRECISION[precision]) for x in inputs]
    buffers = {x.shape: (x @ x.T, x @ x.T, torch.empty_like(x), torch.empty_like(x)) for x in inputs}

    def products() -> None:
        for x in inputs:
            gram, update, result, spare = buffers[x.shape]
            for _ in range(section.iterations):
                torch.mm(x, x.T, out=gram)
                torch.mm(gram, gram, out=update)
                torch.mm(update, x, out=result)
                x, result, spare = result, spare, result

    steps = {"products": products, "Muon": ours.step, "torch's Muon": torchs.step, "AdamW": adamw.step}
    return {name: partial(_seconds, step) for name, step in steps.items()}


def _seconds(step: Callable[[], object]) -> float:
    import torch

    began = time.perf_counter()
    step()
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of every loop by turn, the number of matrices, and the operations of the products in one step."""
    from llmtrain.parallel.muon import orthogonalization_flops
    from llmtrain.plan.model_size import size_of

    size = size_of(recipe_of({"replicas": 1, "shard": 1, "size": task["size"], "override": []}, []))
    flops = size.layers * sum(orthogonalization_flops(*shape, 5) for shape in size.layer_matrices)
    turns = take_turns(loops_of(size, task["precision"]), task["turns"])
    return {"turns": turns, "matrices": size.layers * len(size.layer_matrices), "flops": flops}


def rows_of(name: str, precision: str, found: dict[str, Any]) -> list[Row]:
    """Return a model's rows of the table."""
    rows, products = [], found["turns"]["products"]
    for loop in LOOPS:
        series: Sequence[float] = found["turns"][loop]
        low, middle, high = quartiles([1e3 * seconds for seconds in series])
        ratio = statistics.median(own / alone for own, alone in zip(series, products, strict=True))
        rate = f"{found['flops'] / middle / 1e6:.1f}" if loop == "products" else ""
        dtype = {"torch's Muon": "bf16", "AdamW": ""}.get(loop, precision)
        rows.append(
            (
                name,
                dtype,
                loop,
                str(found["matrices"]),
                f"{middle:.1f}",
                f"{low:.1f} to {high:.1f}",
                f"{ratio:.2f}",
                rate,
            )
        )
    return rows


def main() -> None:
    """Measure one model after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", nargs="+", choices=(SMALL, *SIZES), default=[SMALL, "6M", "33M"], metavar="SIZE")
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16" if on_gpu() else "fp32")
    arguments.add_argument("--turns", type=int, default=21)
    options = arguments.parse_args()
    rows: list[Row] = []
    for name in options.sizes:
        found = measure({"size": name, "precision": options.precision, "turns": options.turns})
        rows += rows_of(name, options.precision, found)
    title = f"One step on {'a GPU' if on_gpu() else 'a CPU'}, {options.turns} turns"
    show(title, COLUMNS, rows, words=3)
    if options.write:
        write_page(
            RESULTS / "muon", "What a step of Muon costs", [f"{title}.", markdown(COLUMNS, rows, words=3), NOTES]
        )


if __name__ == "__main__":
    main()
