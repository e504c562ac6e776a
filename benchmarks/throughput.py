"""Speed and memory of one replica's training, compared with a bare loop and with the predictions.

    python benchmarks/throughput.py                               # small models on a CPU; 33M alone: ten minutes on two cores
    python benchmarks/throughput.py --sizes 160M 1B 7B-layers     # one GPU
    python benchmarks/throughput.py --sizes 1B --shard 8          # eight

Each row runs in a process of its own, or in `--shard` processes: an engine of llmtrain, a bare FSDP2 loop, or torchtitan's trainer
if it is installed, with and without torch.compile and activation checkpointing. Combinations that the recipe checks refuse (ZeRO
stage 3 with compile) have no row. The predictions are those of `llmtrain recipe show`. With `--write`, the table goes to
benchmarks/results/throughput/.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loops import (
    ENDLESS,
    RECIPE,
    RowFailed,
    ask,
    bare_loop,
    build,
    is_asked,
    on_gpu,
    opened,
    plain_loop,
    quartiles,
    timed,
)
from peaks import allocator_peak, forget_peak, peak_resident, reserved, resident
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page
from titan import MODULE as TITAN
from titan import is_installed, titan_loop
from titan_model import is_installed as has_titan_model
from titan_model import titan_model_loop

if TYPE_CHECKING:
    from llmtrain.config import Recipe
    from llmtrain.data.dataset import TokenDataset
    from llmtrain.parallel.mesh import Mesh

BARE, TITAN_MODEL = "bare loop", "torchtitan's model"
FLOAT8, GATHERED = "bare loop, float8", "bare loop, kept gathered"
PLAIN = "plain loop"
FSDP2 = ["parallel.engine=fsdp2"]
ENGINES = {
    **dict.fromkeys((BARE, TITAN, TITAN_MODEL, FLOAT8, GATHERED, PLAIN, "fsdp2"), FSDP2),
    "zero1": ["parallel.engine=zero", "parallel.zero_stage=1"],
    "zero2": ["parallel.engine=zero", "parallel.zero_stage=2"],
    "zero3": ["parallel.engine=zero", "parallel.zero_stage=3"],
}


def _llama(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, length: int, batch: int) -> list[str]:
    config = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }
    changes = [f"model.config.{key}={value}" for key, value in config.items()]
    return [*changes, f"train.sequence_length={length}", f"train.micro_batch={batch}"]


SIZES = {
    "6M": _llama(256, 688, 6, 4, 2048, 256, 4),
    "33M": _llama(512, 1376, 8, 8, 8192, 256, 4),
    "160M": _llama(768, 2048, 12, 12, 50304, 1024, 16),
    "1B": _llama(2048, 5632, 16, 16, 50304, 4096, 4),
    "1B-2048": _llama(2048, 5632, 16, 16, 50304, 2048, 8),
    "7B-layers": _llama(4096, 11008, 4, 32, 50304, 4096, 8),
}
"""Llamas with their sequence lengths and micro-batches. The last one has four layers of the size of a 7 B model's."""
TINY = _llama(32, 64, 2, 2, 2048, 32, 2)
"""Tiny model that is trained first on a CPU, so that the measured memory does not include code that is loaded once."""
CHECKPOINTING = {"no": "false", "yes": "true", "selective": "selective"}
COLUMNS = (
    "model",
    "loop",
    "with",
    "tokens/s",
    "quartiles",
    "of bare",
    "predicted/s",
    "MFU",
    "first step, s",
    "peak, MB",
    "predicted, MB",
    "off by",
    "resident, MB",
)
WORDS = 3
OTHERS = (BARE, TITAN, TITAN_MODEL, FLOAT8, GATHERED, PLAIN)
"""Engines for which nothing is predicted."""
NOTES = """\
One replica, so that a step is a local one. *With*: `parallel.compile` and `parallel.activation_checkpointing`
(`true` or `selective`); what the recipe checks refuse, or a loop lacks, has no row. *Tokens/s*: of all ranks, the median over the
turns. *Of bare*: relative to a hand-written FSDP2 loop over
the same model, compiled and checkpointed alike (`bare_loop` in `benchmarks/loops.py`). *torchtitan*: its own trainer, model, loss and
optimizer in the same sizes, on the same batches (`benchmarks/titan.py`); what it recomputes selectively is its own choice, too.
*torchtitan's model*: that of release 0.2.2 alone, in the bare loop (`benchmarks/titan_model.py`). *float8*: the layers' products
scaled by rows (torchao). *Kept gathered*: parameters are not resharded between forward and backward.
With one rank, `fsdp2` is our engine for one device, which shards nothing, while the bare loop and torchtitan's model run FSDP2 with one
rank. *plain loop*: transformers' model and loss without FSDP2, neither compiled nor checkpointed. Timed steps write no log lines.
All these ran one after another, so a machine whose speed wanders shows here; `benchmarks/step_overhead.py`, where loops take
turns, says it more exactly. *Predicted/s*: tokens a second by `llmtrain recipe show`: the rate of a large matrix product, timed in
the same process, times one measured constant (`TRAINING_EFFICIENCY` in `llmtrain/plan/time_estimate.py`); it knows nothing of
compiling. *MFU*: of the vendor's dense bf16 peak, where it is known.
*First step*: compiling is in it.

*Peak*: the most bytes that torch's allocator had handed out at a time, from before the model was built: on a GPU its own count,
until the last step, on a CPU as torch's profiler counts them, until the third step, in a second build of the same loop whose time
does not count (and only of one rank: the profiler does not see what gloo's threads free). *Predicted* is the estimate of `llmtrain
recipe show` for that mesh, which leaves out what torch.compile saves. *Resident* (CPU): the growth of the process's peak resident memory
(VmHWM) since before the model was built, a small model having been trained before. It also holds what the C library keeps of
freed memory, buffers of kernels and of gloo, and code that was loaded on the way; it lacks pages that were allocated and never
touched."""


def recipe_of(task: Mapping[str, Any], model: Sequence[str]) -> Recipe:
    """Return the recipe of one row, with the overrides of its model."""
    from llmtrain.recipe_loader import load_recipe

    micro_batch = int(model[-1].partition("=")[2])
    return load_recipe(
        ROOT / RECIPE,
        [
            *model,
            *ENDLESS,
            "sync.method=synchronous",
            "parallel.replicas=1",
            f"parallel.shards={task['shard']}",
            f"parallel.precision={task['precision']}",
            f"parallel.compile={str(task['compile']).lower()}",
            f"parallel.activation_checkpointing={CHECKPOINTING[task['checkpoint']]}",
            f"train.global_batch={micro_batch * task['shard'] * task.get('micro_batches', 1)}",
            *ENGINES[task["engine"]],
            *task["override"],
        ],
    )


def measure(task: dict[str, Any]) -> dict[str, Any] | None:
    """Return one row's figures on the main rank, and None on others. With `quick`, a CPU's peak is not measured."""
    from llmtrain.plan.memory import estimate
    from llmtrain.plan.model_size import size_of
    from llmtrain.plan.time_estimate import HardwareRates, estimate_time, rate_here
    from llmtrain.train.devices import peak_flops, peak_memory_bytes

    recipe = recipe_of(task, SIZES[task["size"]])
    with opened(recipe, 1, task["shard"]) as (mesh, prepared, scratch):

        def started(one: Recipe, name: str) -> Callable[[], object]:
            return step_of(task["engine"], one, mesh, prepared, scratch, name)

        if mesh.device.type == "cpu":
            timed(started(recipe_of(task, TINY), "tiny"), 2, mesh)
        gc.collect()
        forget_peak()
        before = resident() if mesh.device.type == "cpu" else None
        step = started(recipe, "timed")
        first = timed(step, 1, mesh)
        timed(step, 1, mesh)
        seconds = [timed(step, task["steps"], mesh) / task["steps"] for _ in range(task["turns"])]
        grown = None if before is None else peak_resident() - before
        reached, taken = peak_memory_bytes(mesh.device), reserved()
        rate = rate_here(recipe)
        if mesh.device.type == "cuda":
            peak = reached
        elif task["shard"] > 1 or task.get("quick"):
            peak = None
        else:
            del step
            gc.collect()
            peak = allocator_peak(lambda: timed(started(recipe, "counted"), 3, mesh))
        if not mesh.is_main:
            return None
        size = size_of(recipe, prepared.vocab_size)
        is_ours = task["engine"] not in OTHERS
        return {
            "tokens": recipe.train.tokens_per_step,
            "seconds": seconds,
            "predicted_seconds": estimate_time(recipe, size, 1, task["shard"], HardwareRates(rate, mbit=1.0)).step,
            "first": first,
            "flops": size.flops_per_token,
            "peak_flops": peak_flops(mesh.device),
            "ranks": task["shard"],
            "peak": peak,
            "reserved": taken,
            "predicted": estimate(recipe, size, 1, task["shard"]).device_total if is_ours else None,
            "grown": grown,
            "parameters": size.parameters,
        }


def step_of(
    engine: str, recipe: Recipe, mesh: Mesh, prepared: TokenDataset, scratch: str, name: str
) -> Callable[[], object]:
    """Build the loop of an engine, and return a function that takes one step of it."""
    if engine not in OTHERS:
        return build(recipe, mesh, prepared, scratch, name).train_step
    from llmtrain.data.batch_shape import BatchShape
    from llmtrain.data.loader import Loader, PrefetchLoader

    shape = BatchShape.of(recipe, shard_rank=mesh.shard_comms.rank, shards=mesh.shard_comms.size)
    loader = Loader(prepared.tokens("train"), shape)
    batches = PrefetchLoader(
        loader, recipe.run.timeout_seconds, pin=mesh.device.type == "cuda"
    ).next  # as the trainer has them
    if engine == PLAIN:
        return plain_loop(recipe, mesh, prepared.vocab_size, batches)
    if engine == TITAN:
        return titan_loop(recipe, prepared.vocab_size, batches)
    if engine == TITAN_MODEL:
        return titan_model_loop(recipe, mesh, prepared.vocab_size, batches)
    return bare_loop(
        recipe, mesh, prepared.vocab_size, batches, in_float8=engine == FLOAT8, resharded=engine != GATHERED
    )


def is_possible(task: Mapping[str, Any]) -> bool:
    """Return whether a row can be measured: its loop has these settings, and the recipe checks accept its recipe."""
    from llmtrain.errors import RecipeError
    from llmtrain.recipe_check import check

    if task["engine"] in (TITAN_MODEL, PLAIN) and task["checkpoint"] != "no":
        return False
    if task["engine"] == PLAIN and task["shard"] > 1:
        return False
    try:
        check(recipe_of(task, SIZES[task["size"]]), None)
    except RecipeError:
        return False
    return True


def row(task: Mapping[str, Any], found: Mapping[str, Any], bare: Mapping[str, Any] | None) -> Row:
    """Return a row of the table. `bare` is the bare loop's answer to the same task, if known."""
    rates = [found["tokens"] / seconds for seconds in found["seconds"]]
    low, rate, high = quartiles(rates)
    peak = found["peak_flops"]
    ours = task["engine"] not in OTHERS
    return (
        task["size"],
        task["engine"],
        _with(task),
        f"{rate:,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        f"{statistics.median(bare['seconds']) / statistics.median(found['seconds']):.3f}" if bare else "",
        f"{found['tokens'] / found['predicted_seconds']:,.0f}" if ours else "",
        f"{100 * rate * found['flops'] / (peak * found['ranks']):.1f} %" if peak else "",
        f"{found['first']:.1f}",
        f"{found['peak'] / 1e6:,.0f}" if found["peak"] else "",
        f"{found['predicted'] / 1e6:,.0f}" if ours else "",
        f"{100 * (found['predicted'] / found['peak'] - 1):+.1f} %" if ours and found["peak"] else "",
        f"{found['grown'] / 1e6:,.0f}" if found["grown"] is not None else "",
    )


def failed_row(task: Mapping[str, Any], why: RowFailed) -> Row:
    """Return a row without figures, in which the reason takes the place of the first figure."""
    return (task["size"], task["engine"], _with(task), why.reason, *[""] * (len(COLUMNS) - 4))


def _with(task: Mapping[str, Any]) -> str:
    checkpoint = {"no": [], "yes": ["checkpoint"], "selective": ["selective"]}[task["checkpoint"]]
    return "+".join([*(["compile"] if task["compile"] else []), *checkpoint])


def main() -> None:
    """Measure one row after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", nargs="+", choices=SIZES, metavar="SIZE", help=f"of {', '.join(SIZES)}")
    titans = [*([TITAN] if is_installed() else []), *([TITAN_MODEL] if has_titan_model() else [])]
    default = [BARE, *titans, "fsdp2", *(["zero3"] if importlib.util.find_spec("deepspeed") else [])]
    arguments.add_argument("--engines", nargs="+", choices=ENGINES, default=default)
    arguments.add_argument("--compile", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    arguments.add_argument("--checkpoint", nargs="+", choices=CHECKPOINTING, default=list(CHECKPOINTING))
    arguments.add_argument("--shard", type=int, default=1, help="ranks that hold the replica")
    gpu = on_gpu()
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16" if gpu else "fp32")
    arguments.add_argument("--micro-batches", type=int, default=1, help="per step")
    arguments.add_argument("--turns", type=int, default=3 if gpu else 5)
    arguments.add_argument(
        "--steps", type=int, default=10 if gpu else 2, help="in a turn; on a GPU its queue fills first"
    )
    arguments.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="for all, laid over the rest")
    options = arguments.parse_args()
    sizes = options.sizes or (["160M", "1B", "7B-layers"] if gpu else ["6M", "33M"])
    keys = ("shard", "turns", "steps", "override", "precision", "micro_batches")
    common = {key: getattr(options, key) for key in keys}
    rows: list[Row] = []
    for size, compiled, checkpoint in itertools.product(sizes, options.compile, options.checkpoint):
        settings = {"size": size, "compile": compiled == "yes", "checkpoint": checkpoint, **common}
        bare = None
        for engine in options.engines:
            task = {"engine": engine, **settings}
            if not is_possible(task):
                continue
            with tempfile.TemporaryDirectory() as cache:  # so that every row compiles for itself
                variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "KINETO_LOG_LEVEL": "5"}
                try:
                    found = ask(__file__, options.shard, task, variables)
                except RowFailed as why:  # continue with the other rows
                    print(why)
                    rows.append(failed_row(task, why))
                    continue
            rows.append(row(task, found, bare))
            bare = found if engine == BARE else bare
    device = "GPU" if gpu else "CPU"
    title = f"1 replica x {options.shard} shards on a {device}, {options.precision}, {options.turns} turns of {options.steps} steps"
    if options.micro_batches > 1:
        title += f", {options.micro_batches} micro-batches per step"
    show(title, COLUMNS, rows, words=WORDS)
    if options.write:
        table = markdown(COLUMNS, rows, words=WORDS)
        write_page(RESULTS / "throughput", "Tokens a second and memory", [f"{title}.", table, NOTES])


if __name__ == "__main__" and not is_asked(measure):
    main()
