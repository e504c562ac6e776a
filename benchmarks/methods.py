"""Loss and traffic of every method with the same model, text, seed and number of tokens.

    python benchmarks/methods.py --source train.txt --validation valid.txt      # TinyStories' files, or any text
    python benchmarks/methods.py                                                # TinyStories from the hub

Trains recipes/<method>_gpt_neo_8m.yaml with one method after another, shortened to 300 short steps of 4 replicas on the CPU, and
prints one table. Each run takes 2 to 3 minutes on two cores. All methods read the same number of tokens. Complete runs are not
repeated, so an interrupted benchmark continues. Such runs may be of earlier commits; the table and the page name the commits at
which the runs were trained. Delete runs/benchmark_* to train all methods anew. With `--write`, the table, a plot and each run's
metrics go to benchmarks/results/methods/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from table import (
    EVERY,
    RESULTS,
    ROOT,
    WARMUP,
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

from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.methods import METHODS

SHORTEST, GLOBAL_EVERY = 10, 10
"""Steps of QSR's shortest round, and steps between WAGMA's global averages."""
DECAY = 0.95
"""Decay of GPA's average, which covers about 20 steps, like a round."""
ONE_REPLICA = ["parallel.replicas=1", "parallel.shards=4"]
"""Mesh of the methods for a single replica."""
COLUMNS = (
    "method",
    "validation loss",
    "perplexity",
    "rounds",
    "sent between replicas",
    "steps",
    "gradient computations",
    "tokens",
)
LOSS = COLUMNS.index("validation loss")
PLOT = "validation_loss.png"
NOTES = f"""\
`recipes/<method>_gpt_neo_8m.yaml` with each method, 4 replicas of one process each, and for all of them: a vocabulary
of 4096 (with which 2.1 M of the 8 M parameters are left), sequences of 128 tokens, 32 of them in a step, the learning
rate of the synchronous recipe after 30 steps of warm-up. {WARMUP} synchronous steps, then
rounds of {EVERY}, where a method has such; of QSR's rounds the shortest has {SHORTEST} (alpha = half the peak learning
rate x sqrt({SHORTEST})), WAGMA averages globally every {GLOBAL_EVERY} steps, and post-local SGD is synchronous until the
learning rate has fallen to half its peak. PALSGD's steps that pull read nothing; it makes as many more. SNOO and
GPA are one replica of four ranks; GPA's average decays by {DECAY} per step. The rounds of
A-EDiT are of seconds, so its steps, and with them its loss, differ from run to run and from machine to machine.

One seed, and nothing was tuned for any method: values are the presets', most of them the papers' or their code's for
runs a thousand times as long; PALSGD's outer learning rate, all inner learning rates and rounds of {EVERY} steps are
neither. Losses that lie as close together as those of two seeds say nothing. Steps and gradient computations are a
replica's, means over the replicas; bytes are sums over all ranks. No times: other work went on beside some of the runs,
and on one machine's loopback they would say nothing about a slow network."""


def recipe_of(method: str) -> str:
    """Return the path of a method's recipe in the repository."""
    return f"recipes/{method}_gpt_neo_8m.yaml"


def own_overrides(method: str, common: Sequence[str], round_seconds: float) -> list[str]:
    """Return the overrides that give a method short rounds, by the kind of its period, and the common learning rate."""
    recipe = load_recipe(ROOT / recipe_of(method), common)
    sync = recipe.sync
    if sync.period.kind == "every_step":
        return []
    # The recipes of MuLoCo and GPA have learning rates of their own.
    changes = [f"optim.lr={load_recipe(ROOT / recipe_of('synchronous'), common).optim.lr:g}"]
    changes += [] if sync.warmup_until_lr is not None else [f"sync.warmup_steps={WARMUP}"]
    if sync.period.kind == "qsr":
        alpha = recipe.optim.lr / 2 * math.sqrt(SHORTEST)
        return [*changes, f"sync.period.base={SHORTEST}", f"sync.period.alpha={alpha:.4g}"]
    if sync.period.kind == "seconds":
        half_a_round = 4 * EVERY // 2
        return [*changes, f"sync.period.every={round_seconds:g}", f"sync.period.min_steps={half_a_round}"]
    if sync.pull is not None:  # steps that pull read no tokens, so there are more steps, to read as many tokens
        local = recipe.train.total_steps - WARMUP
        changes.append(f"train.steps={WARMUP + round(local / (1 - sync.pull.probability))}")
    if sync.outer.kind == "gpa":  # a running average, which needs many more steps than it covers
        return [*changes, f"sync.outer.decay={DECAY}", *ONE_REPLICA]
    every = GLOBAL_EVERY if sync.schedule.kind == "wait_avoiding" else EVERY
    one = ONE_REPLICA if load_recipe(ROOT / recipe_of(method)).parallel.replicas == 1 else []
    return [*changes, f"sync.period.every={every}", *one]


def row(run: Path) -> Row:
    """Return a run's row of the table, from its summary.json."""
    summary = summary_of(run)
    gradients = summary["gradient_steps"]
    return (
        summary["method"],
        f"{summary['final_eval_loss']:.4f}",
        f"{math.exp(summary['final_eval_loss']):.2f}",
        str(summary["sync_count"]),
        f"{summary['bytes_sent'] / 1e9:.2f} GB",
        str(summary["steps"]),
        "" if gradients is None else f"{gradients:.0f}",
        f"{summary['tokens'] / 1e6:.2f} M",
    )


def draw(runs: Mapping[str, Path], target: Path) -> None:
    """Draw validation loss over tokens, for the complete run and its second half. The legend is ordered by final loss."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    whole, half = figure.subplots(1, 2)
    entries, middle, seen = [], 0.0, []
    for number, (method, run) in enumerate(runs.items()):
        points = [(line["tokens"], line["eval/loss"]) for line in metrics_of(run, "eval/loss")]
        style = {
            "color": f"C{number % 10}" if number else "black",
            "linestyle": ("-", "--", ":")[number % 3],
            "marker": "osD^v<>PX*hp"[number % 12],
            "markersize": 5,
        }
        (line,) = whole.plot(*zip(*points, strict=True), **style)
        half.plot(*zip(*points, strict=True), **style)
        middle = max(middle, points[-1][0] / 2)
        seen += points
        entries.append((points[-1][1], method, line))
    late = [loss for tokens, loss in seen if tokens >= 0.95 * middle]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    half.set(xlim=(0.95 * middle, 2.05 * middle), ylim=(min(late) - margin, max(late) + margin), title="second half")
    whole.set(ylabel="validation loss of the replicas' mean (nats per token)", title="whole run")
    for axes in (whole, half):
        axes.set_xlabel("tokens of all replicas")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    entries.sort(key=lambda entry: -entry[0])
    labels = [f"{method}  {loss:.3f}" for loss, method, _ in entries]
    figure.legend([line for *_, line in entries], labels, loc="outside right center", title="at the end")
    figure.savefig(target, dpi=110)


def write(rows: Sequence[Row], runs: Mapping[str, Path]) -> None:
    """Write the page with table and plot, and keep the runs' logs, by which the numbers can be checked."""
    folder = RESULTS / "methods"
    table = markdown(COLUMNS, lowest_in_bold(rows, LOSS))
    picture = f"![Validation loss over tokens by method]({PLOT})"
    write_page(folder, "Losses by method", [table, commits_sentence(runs), NOTES, picture])
    draw(runs, folder / PLOT)
    keep_runs(runs, folder)


def main() -> None:
    """Train with every method, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    add_run_options(arguments)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    arguments.add_argument("--round-seconds", type=float, default=10, help="A-EDiT's rounds; about 20 steps")
    options = arguments.parse_args()
    runs = {}
    for method in (method for method in METHODS if method in options.methods):
        common = [*run_overrides(options), f"run.name=benchmark_{method}"]
        own = own_overrides(method, common, options.round_seconds)
        runs[method] = train(recipe_of(method), [*common, *own, *options.override])
    rows = [row(run) for run in runs.values()]
    show("GPT-Neo 8M on 4 replicas", COLUMNS, rows)
    print(commits_sentence(runs))
    if options.write:
        write(rows, runs)


if __name__ == "__main__":
    main()
