"""Loss and bytes of DiLoCo with each wire format.

    python benchmarks/wires.py --source train.txt --validation valid.txt      # TinyStories' files, or any text
    python benchmarks/wires.py                                                # TinyStories from the hub

Trains the DiLoCo run of benchmarks/methods.py once with each wire format, and prints one table. Each run takes 2 to 3 minutes on
two cores. The run in fp32 is that of benchmarks/methods.py itself. Complete runs are not repeated. Such runs may be of earlier
commits; the table and the page name the commits at which the runs were trained. Delete runs/benchmark_diloco* to train all of them
anew. With `--write`, the table and each run's metrics go to benchmarks/results/wires/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from methods import own_overrides, recipe_of
from table import (
    RESULTS,
    ROOT,
    Row,
    add_run_options,
    commits_sentence,
    keep_runs,
    lowest_in_bold,
    markdown,
    metrics_of,
    parser,
    run_overrides,
    show,
    summary_of,
    train,
    write_page,
)

METHOD = "diloco"
WIRES = {
    "fp32": [],
    "bf16": ["sync.wire.kind=bf16"],
    "int8": ["sync.wire.kind=int8"],
    "int4": ["sync.wire.kind=int4"],
    "int4+feedback": ["sync.wire.kind=int4", "sync.wire.error_feedback=true"],
    "fp4": ["sync.wire.kind=fp4"],
    "2bit+feedback": ["sync.wire.kind=2bit", "sync.wire.error_feedback=true"],
}
"""Overrides of each wire format, added to the recipe."""
BYTES = {
    "fp32": 4,
    "bf16": 2,
    "int8": 1 + 4 / 128,
    "int4": 1 / 2 + 4 / 128,
    "fp4": 1 / 2 + 4 / 128,
    "2bit": 1 / 4 + 4 / 128,
}
"""Bytes per value of each wire format, including the value's share of its block's scale."""
COLUMNS = ("wire", "validation loss", "difference to fp32", "bytes per round and rank", "theory", "off by", "rounds")
LOSS = COLUMNS.index("validation loss")
NOTES = """\
`recipes/diloco_gpt_neo_8m.yaml` with the changes of `benchmarks/methods.py` (4 replicas, 300 steps, rounds of 20 after 50
synchronous steps) and each wire. Bytes are what one rank sends in a round, counted where they are sent, without the
synchronous steps; theory is 2 (N-1)/N x parameters x bytes per value: 4 in fp32, 2 in bf16, 1 + 4/128 in int8, 1/2 + 4/128 in
int4 and fp4, 1/4 + 4/128 in 2bit. What the count has beyond it is
padding to whole blocks of 128 values a rank, and 96 bytes for the meeting. One seed: differences as small as those
of two seeds say nothing about a wire."""


def bytes_per_round(run: Path) -> float:
    """Return the mean bytes that a replica sent per round. The synchronous steps, up to the last line before the first
    synchronization, do not count."""
    lines = metrics_of(run, "comm/bytes_total")
    before = [line["comm/bytes_total"] for line in lines if line["sync/count"] == 0][-1]
    return (lines[-1]["comm/bytes_total"] - before) / lines[-1]["sync/count"] / summary_of(run)["replicas"]


def theory(parameters: int, replicas: int, kind: str) -> float:
    """Return the bytes that a rank sends in the two passes of a ring all-reduce."""
    return 2 * (replicas - 1) / replicas * parameters * BYTES[kind]


def parameters_of(run: Path) -> int:
    """Return the number of parameters of the model that a run has trained."""
    from llmtrain.model import build, count_parameters, model_config
    from llmtrain.recipe_loader import load_recipe
    from llmtrain.train.prepare_data import prepare_texts

    with contextlib.chdir(ROOT):  # paths in its recipe are relative to that folder
        recipe = load_recipe(run / "recipe.yaml")
        vocab_size = prepare_texts(recipe, show_progress=False)[""].vocab_size
    return count_parameters(build(model_config(recipe.model, vocab_size), recipe.parallel.loss_chunk))


def row(wire: str, run: Path, parameters: int, fp32_loss: float) -> Row:
    """Return a run's row of the table."""
    summary, sent = summary_of(run), bytes_per_round(run)
    expected = theory(parameters, summary["replicas"], wire.partition("+")[0])
    return (
        wire,
        f"{summary['final_eval_loss']:.4f}",
        f"{100 * (summary['final_eval_loss'] / fp32_loss - 1):+.2f} %",
        f"{sent:,.0f}",
        f"{expected:,.0f}",
        f"{100 * (sent / expected - 1):+.2f} %",
        str(summary["sync_count"]),
    )


def write(rows: Sequence[Row], runs: Mapping[str, Path]) -> None:
    """Write the page with the table, and keep the runs' logs, by which the numbers can be checked."""
    folder = RESULTS / "wires"
    table = markdown(COLUMNS, lowest_in_bold(rows, LOSS))
    write_page(folder, "DiLoCo by wire", [table, commits_sentence(runs), NOTES])
    keep_runs(runs, folder)


def main() -> None:
    """Train with every wire format, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    add_run_options(arguments)
    arguments.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), metavar="WIRE")
    options = arguments.parse_args()
    runs = {}
    for wire, changes in WIRES.items():
        if wire != "fp32" and wire not in options.wires:
            continue
        name = "_".join(["benchmark", METHOD, *(wire.split("+") if changes else [])])
        common = [*run_overrides(options), f"run.name={name}"]
        own = own_overrides(METHOD, common, round_seconds=0)
        runs[wire] = train(recipe_of(METHOD), [*common, *own, *changes, *options.override])
    parameters, fp32_loss = parameters_of(runs["fp32"]), summary_of(runs["fp32"])["final_eval_loss"]
    rows = [row(wire, run, parameters, fp32_loss) for wire, run in runs.items()]
    show(f"GPT-Neo 8M with DiLoCo on 4 replicas, {parameters:,} parameters", COLUMNS, rows)
    print(commits_sentence(runs))
    if options.write:
        write(rows, runs)


if __name__ == "__main__":
    main()
