"""What do the methods reach with the same recipe, seed and tokens, and what do they send?

    python benchmarks/methods.py --source train.txt --validation valid.txt      # TinyStories' files, or any text
    python benchmarks/methods.py                                                # TinyStories from the hub

Trains recipes/edit_llama_tinystories.yaml once with each method, one after another, about ten minutes each on two
cores, and prints one table. A run that is complete is not made again, so an interrupted benchmark continues. With
`--write` the table, the models' texts and each run's metrics go to benchmarks/results/methods/.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "methods"
RECIPE = "recipes/edit_llama_tinystories.yaml"
COLUMNS = (
    "method",
    "validation loss",
    "perplexity",
    "rounds",
    "sent between replicas",
    "training stood still",
    "training",
    "tokens/s",
)


def train(method: str, overrides: list[str]) -> Path:
    """The run directory of `method`, trained now if it is not complete."""
    name = f"tinystories_{method}"
    command = ["bash", "launch/train.sh", RECIPE, f"sync.method={method}", f"run.name={name}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / "runs" / name


def row(run: Path) -> tuple[str, ...]:
    """A run's line of the table, from its summary.json."""
    summary = json.loads((run / "summary.json").read_text())
    evaluations = [
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "eval/ppl" in line
    ]
    return (
        summary["method"],
        f"{summary['final_eval_loss']:.4f}",
        f"{evaluations[-1]['eval/ppl']:.2f}",
        str(summary["sync_count"]),
        f"{summary['bytes_sent'] / 1e9:.2f} GB",
        f"{summary['exposed_sync_seconds']:.1f} s",
        f"{summary['train_seconds'] / 60:.1f} min",
        f"{summary['tokens_per_second']:,.0f}",
    )


def write(rows: list[tuple[str, ...]], runs: list[Path]) -> None:
    """Table, texts and logs, with what is needed to repeat them."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    texts = [
        f"**{run.name.removeprefix('tinystories_')}:** {(run / 'samples.txt').read_text().strip()}" for run in runs
    ]
    versions = f"Python {platform.python_version()}, {subprocess.run(['nproc'], capture_output=True, text=True).stdout.strip()} cores"
    command = f"`python benchmarks/methods.py {' '.join(sys.argv[1:])}`, commit {commit.strip()}, {versions}, {platform.machine()}"
    page = ["# The methods on TinyStories", command, "\n".join(lines), *texts]
    (RESULTS / "README.md").write_text("\n\n".join(page) + "\n")
    for run in runs:
        for name in ("metrics.jsonl", "recipe.yaml", "summary.json", "loss.png"):
            target = RESULTS / run.name.removeprefix("tinystories_") / name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(run / name, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="data.source: a file or folder of text")
    parser.add_argument("--validation", help="data.validation: another one")
    parser.add_argument("--methods", nargs="+", default=["edit", "diloco", "synchronous"])
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/")
    options = parser.parse_args()
    given = {"data.source": options.source, "data.validation": options.validation}
    directories = [
        train(method, [f"{key}={value}" for key, value in given.items() if value]) for method in options.methods
    ]
    rows = [row(directory) for directory in directories]
    table = Table(title=f"{RECIPE}, 2 replicas x 2 shards")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for cells in rows:
        table.add_row(*cells)
    Console(width=140).print(table)
    if options.write:
        write(rows, directories)
