"""Peak memory of training, compared with the prediction of `llmtrain recipe show`.

    python benchmarks/memory.py --write

Each row trains a Llama of 33 M parameters for two steps in processes of its own. Rows differ in engine, precision, recomputation
and number of micro-batches per step. Ranks have emulated GPUs (tests/emulated_gpu), whose allocator counts every byte, whichever
thread frees it. Compiled layers run on one CPU rank, because torch.compile has no kernels for an emulated GPU; there, torch's
profiler counts. Nothing is timed, so other programs may run at the same time. All rows take about half an hour on two cores.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from loops import RowFailed, ask, is_asked, opened, timed
from peaks import allocator_peak
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page
from throughput import CHECKPOINTING, SIZES, is_possible, recipe_of, step_of

MESHES = (("fsdp2", 1), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 1), ("zero3", 2))
"""(Engine, number of ranks per replica) of the rows."""
COMPILED = (("fsdp2", 1), ("zero1", 1), ("zero2", 1))
ARITHMETIC = (("fp32", 1), ("fp32", 2), ("bf16", 2))
"""(Precision, number of micro-batches per step) of the rows."""
STEPS = 2
COLUMNS = ("engine", "ranks", "precision", "recomputed", "micro-batches", "peak, MB", "predicted, MB", "off by")
RECOMPUTED = {"no": "nothing", "yes": "layers", "selective": "selective"}
NOTES = """\
*Peak*: the most bytes that the allocator had handed out to the tensors of one rank at a time, from before the model was built
until the end of the second step. *Predicted*: the estimate of `llmtrain recipe show` for that mesh. *Recomputed*:
`parallel.activation_checkpointing`. *Engine*: with one rank, `fsdp2` is the engine for replicas of one device; `compiled` is
`parallel.compile`, on a CPU without emulated GPUs, where torch's profiler counts. Recipes that the checks refuse have no row. An
emulated GPU runs the CPU's kernels: what kernels of CUDA need for themselves is not in these figures."""


def tasks(engines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the task of each row that has one of `engines` and a recipe that the checks accept."""
    cases = itertools.chain(itertools.product([False], MESHES), itertools.product([True], COMPILED))
    for (compiled, (engine, ranks)), checkpoint, (precision, micro_batches) in itertools.product(
        cases, CHECKPOINTING, ARITHMETIC
    ):
        task = {"engine": engine, "shard": ranks, "compile": compiled, "precision": precision, "checkpoint": checkpoint}
        task |= {"micro_batches": micro_batches, "size": "33M", "override": []}
        if engine in engines and is_possible(task):
            yield task


def measure(task: dict[str, Any]) -> dict[str, Any] | None:
    """Train, and return the peak bytes of the main rank and their prediction. Return None on other ranks."""
    from llmtrain.plan.memory import estimate
    from llmtrain.plan.model_size import size_of
    from llmtrain.train.devices import peak_memory_bytes
    from tests.inside_torch import fuse_attention

    recipe = recipe_of(task, SIZES[task["size"]])
    with opened(recipe, 1, task["shard"]) as (mesh, prepared, scratch):

        def train() -> None:
            timed(step_of(task["engine"], recipe, mesh, prepared, scratch, "run"), STEPS, mesh)

        on_gpu = mesh.device.type == "cuda"
        if on_gpu:
            fuse_attention()
        if on_gpu:
            train()
            peak = peak_memory_bytes(mesh.device)
        else:
            peak = allocator_peak(train)
        if not mesh.is_main:
            return None
        size = size_of(recipe, prepared.vocab_size)
        predicted = estimate(recipe, size, 1, task["shard"]).device_total  # no checkpoint is written
        return {"peak": peak, "predicted": predicted}


def row(task: Mapping[str, Any], found: Mapping[str, Any]) -> Row:
    """Return a row of the table."""
    return (
        *_setting(task),
        f"{found['peak'] / 1e6:,.0f}",
        f"{found['predicted'] / 1e6:,.0f}",
        f"{100 * (found['predicted'] / found['peak'] - 1):+.1f} %",
    )


def failed_row(task: Mapping[str, Any], why: RowFailed) -> Row:
    """Return a row without figures, in which the reason takes the place of the first figure."""
    return (*_setting(task), why.reason, "", "")


def _setting(task: Mapping[str, Any]) -> Row:
    return (
        task["engine"] + (", compiled" if task["compile"] else ""),
        str(task["shard"]),
        task["precision"],
        RECOMPUTED[task["checkpoint"]],
        str(task["micro_batches"]),
    )


def emulation() -> dict[str, str]:
    """Return the environment variables of a process with emulated GPUs, and compile the emulation if necessary.

    Raises SystemExit if GPUs cannot be emulated here."""
    sys.path.insert(0, str(ROOT))
    from tests.emulated_gpu.as_cuda import environment
    from tests.emulated_gpu.build import build, why_not

    if reason := why_not():
        sys.exit(f"memory.py: GPUs cannot be emulated: {reason}")
    return environment(build())


def main() -> None:
    """Measure one row after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    engines = list(dict.fromkeys(engine for engine, _ in MESHES))
    arguments.add_argument("--engines", nargs="+", choices=engines, default=engines)
    options = arguments.parse_args()
    emulated, rows, failed = emulation(), [], 0
    for task in tasks(options.engines):
        with tempfile.TemporaryDirectory() as cache:
            on_cpu = {"TORCHINDUCTOR_CACHE_DIR": cache, "KINETO_LOG_LEVEL": "5"}
            try:
                found = ask(__file__, task["shard"], task, on_cpu if task["compile"] else emulated)
            except RowFailed as why:  # continue with the other rows
                print(why, file=sys.stderr)
                rows.append(failed_row(task, why))
                failed += 1
                continue
        rows.append(row(task, found))
        print(" | ".join(rows[-1]), file=sys.stderr)
    if failed == len(rows):
        sys.exit("memory.py: no row could be measured")
    title = f"Llama of 33 M parameters, 4 sequences of 256 tokens per micro-batch, {STEPS} synchronous steps of one replica."
    show(title, COLUMNS, rows, words=1)
    if options.write:
        write_page(RESULTS / "memory", "Peak memory beside its prediction", [title, markdown(COLUMNS, rows), NOTES])


if __name__ == "__main__" and not is_asked(measure):
    main()
