"""Time of one replica's step by kind of operation.

    python benchmarks/step_parts.py                              # a small model on a CPU; three minutes on two cores
    python benchmarks/step_parts.py --size 1B --compile yes      # one GPU

Each loop runs in a process of its own. Some steps are timed, then others are profiled by torch. The time of each operation, without
the operations that it calls (on a GPU, the time of its kernels), is added to a group by the operation's name. With `--write`, the
table goes to benchmarks/results/step_parts/.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
from collections.abc import Iterable
from typing import Any

from loops import RowFailed, ask, is_asked, on_gpu, opened, timed
from table import RESULTS, Row, markdown, missing_sentence, parser, show, write_page
from throughput import BARE, CHECKPOINTING, ENGINES, SIZES, TITAN, is_possible, recipe_of, step_of
from titan import is_installed

GROUPS = {
    "optimizer": r"_fused_(adamw|sgd)_|Optimizer\.|_foreach_(norm|mul_|add_|lerp|addc|sqrt|div)|clip_grad|linalg_vector_norm",
    "communication": r"c10d::|nccl|gloo|fsdp::|FSDP::|chunk_cat|record_param_comms",
    "attention": r"scaled_dot_product|flex_attention|flash|efficient_attention|cudnn_attention",
    "matrix products": r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$|mkl::|mkldnn::.*linear",
    "compiled": r"fused|triton|Torch-Compiled|CompiledF",
    "copies": r"aten::(copy_|cat|_to_copy|contiguous|clone|split_with_sizes_copy|stack|index_select|embedding)|Memcpy",
    "filling": r"aten::(fill_|zero_|zeros|new_zeros)|Memset",
}
"""Patterns of the names of operations, by group. An operation is in the first group whose pattern matches."""
REST, IDLE = "elementwise, reductions", "none of these"
WALL, IDEAL = "a step", "matrix products at the rate of large ones"
OVER = "a step over its matrix products"
NOTES = """\
Milliseconds of a step, and its share; medians of the timed steps in the line *a step*, all others from profiled steps, scaled to
it. *None of these*: the step's time less the sum of the groups: Python, launching, waiting. *Matrix products at the rate of large
ones*: the step's floating-point operations (`flops_per_token`, and a third more where layers are recomputed) over the rate of a large
product, the best of those timed in each process: what a perfect step would take. *A step over its matrix products*: loops
ran one after another, and a change of the machine's speed affects a step and its matrix products alike. One process; groups
are by names (`GROUPS` in
`benchmarks/step_parts.py`), so *compiled* holds whatever torch.compile has fused, and the loss is in several."""


def group_of(name: str) -> str:
    """Return the group of an operation. Kernels that Triton compiles have the names of all operations that they fuse."""
    if name.startswith("triton_"):
        return "compiled"
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), REST)


def parts_of(events: Iterable[tuple[str, float]], wall: float) -> dict[str, float]:
    """Return the seconds of each group, given (operation, own seconds) pairs, and the seconds of `wall` in no operation."""
    parts = dict.fromkeys([*GROUPS, REST], 0.0)
    for name, seconds in events:
        parts[group_of(name)] += seconds
    return {**parts, IDLE: max(0.0, wall - sum(parts.values()))}


def measure(task: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from llmtrain.plan.model_size import size_of
    from llmtrain.plan.time_estimate import TRAINING_EFFICIENCY, rate_here

    recipe = recipe_of(task, SIZES[task["size"]])
    with opened(recipe, 1, 1) as (mesh, prepared, scratch):
        step = step_of(task["engine"], recipe, mesh, prepared, scratch, "")
        timed(step, 3, mesh)
        wall = statistics.median(timed(step, 1, mesh) for _ in range(task["steps"]))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu() else [])]
        with profile(activities=activities) as profiled:
            profiled_wall = timed(step, task["profiled"], mesh)
        own = "self_device_time_total" if on_gpu() else "self_cpu_time_total"
        # Only operations, which the host calls. On a GPU, their kernels are further events, which would count twice.
        operations = (event for event in profiled.key_averages() if event.device_type == DeviceType.CPU)
        events = [(event.key, 1e-6 * getattr(event, own)) for event in operations]
        scale = wall / profiled_wall
        parts = {name: scale * seconds for name, seconds in parts_of(events, profiled_wall).items()}
        again = 4 / 3 if task["checkpoint"] == "yes" else 1.0
        flops = again * recipe.train.tokens_per_step * size_of(recipe, prepared.vocab_size).flops_per_token
        return {**parts, WALL: wall, IDEAL: flops * TRAINING_EFFICIENCY / rate_here(recipe)}


def rows_of(found: dict[str, dict[str, float]]) -> list[Row]:
    """Return a row for each part, with a column for each loop. The last rows are the complete step, the ideal step (the best
    over all loops), and the ratio of the complete step to its matrix products."""
    ideal = min(loop[IDEAL] for loop in found.values())
    found = {name: {**loop, IDEAL: ideal} for name, loop in found.items()}

    def cell(loop: dict[str, float], part: str) -> str:
        return f"{1e3 * loop[part]:,.1f} ({100 * loop[part] / loop[WALL]:.0f} %)"

    largest = sorted([*GROUPS, REST], key=lambda part: -max(loop[part] for loop in found.values()))
    rows = [(part, *(cell(loop, part) for loop in found.values())) for part in (*largest, IDLE, WALL, IDEAL)]
    return [*rows, (OVER, *(f"{loop[WALL] / loop['matrix products']:.2f}" for loop in found.values()))]


def main() -> None:
    """Measure one loop after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    default = [BARE, *([TITAN] if is_installed() else []), "fsdp2"]
    default += ["zero3"] if importlib.util.find_spec("deepspeed") else []
    arguments.add_argument("--size", choices=SIZES, default="1B" if on_gpu() else "33M")
    arguments.add_argument("--engines", nargs="+", choices=ENGINES, default=default)
    arguments.add_argument("--compile", choices=("no", "yes"), default="no")
    arguments.add_argument("--checkpoint", choices=CHECKPOINTING, default="no")
    arguments.add_argument("--steps", type=int, default=7, help="that are timed")
    arguments.add_argument("--profiled", type=int, default=3, help="steps that are profiled")
    arguments.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="for all, laid over the rest")
    options = arguments.parse_args()
    precision = "bf16" if on_gpu() else "fp32"
    common = {key: getattr(options, key) for key in ("size", "checkpoint", "steps", "profiled", "override")}
    common |= {"compile": options.compile == "yes", "shard": 1, "precision": precision}
    tasks = [{"engine": engine, **common} for engine in options.engines]
    found, missing = {}, {}
    for task in tasks:
        if not is_possible(task):
            missing[task["engine"]] = "not possible with these settings"
            continue
        try:
            found[task["engine"]] = ask(__file__, 1, task)
        except RowFailed as why:  # continue with the other loops
            print(why)
            missing[task["engine"]] = why.reason
    if not found:
        raise SystemExit("no loop could be measured")
    lacking = [missing_sentence(missing)] if missing else []
    columns, rows = ("ms", *found), rows_of(found)
    how = f"compiled: {options.compile}, checkpointing: {options.checkpoint}"
    title = f"{options.size} on a {'GPU' if on_gpu() else 'CPU'}, {precision}, {how}"
    show(title, columns, rows)
    print(*lacking)
    if options.write:
        parts = [f"{title}.", markdown(columns, rows), *lacking, NOTES]
        write_page(RESULTS / "step_parts", "What a step spends its time on", parts)


if __name__ == "__main__" and not is_asked(measure):
    main()
