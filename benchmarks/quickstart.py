"""Final bits per byte of the quickstart, compared with its settings before the study and with other methods with Muon.

    python benchmarks/quickstart.py --write
    python benchmarks/quickstart.py --variants now before      # only these

Trains each variant of recipes/quickstart.yaml with three seeds, in turn. A run takes about two minutes on two cores. Complete runs
are not repeated, so an interrupted benchmark continues. Run nothing else at the same time, because times are compared, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from table import (
    RESULTS,
    Row,
    commits_sentence,
    keep_runs,
    markdown,
    metrics_of,
    parser,
    show,
    summary_of,
    train,
    write_page,
)

RECIPE, FOLDER = "recipes/quickstart.yaml", "runs/benchmark_quickstart"
SEEDS = (1, 2, 3)
QSR_ALPHA = 0.0632
"""QSR's alpha with which rounds of 10 steps grow as soon as the learning rate falls from its peak, 0.02: 0.02 x sqrt(10)."""
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "now": ("the quickstart: EDiT with Muon", ()),
    "before": (
        "EDiT with AdamW, as the quickstart was before the study",
        ("optim={kind: adamw, lr: 1.0e-2}", "train.steps=540", "schedule.warmup_steps=40", "sync.warmup_steps=140"),
    ),
    "adamw": (
        "the same with the quickstart's warm-up of 120 steps",
        ("optim={kind: adamw, lr: 1.0e-2}", "train.steps=540", "sync.warmup_steps=140"),
    ),
    "local_sgd": ("Local SGD with Muon", ("sync.method=local_sgd", "sync.period.every=10")),
    "qsr": ("QSR with Muon", ("sync.method=qsr", f"sync.period={{kind: qsr, base: 10, alpha: {QSR_ALPHA}}}")),
    "auto": (
        "DiLoCo with Muon and `sync.outer=auto`",
        ("sync.method=diloco", "sync.period.every=10", "sync.outer=auto"),
    ),
    "synchronous": ("synchronous training with Muon", ("sync.method=synchronous",)),
}
"""Description and overrides of each variant, by name."""
COLUMNS = (
    "variant",
    "bits per byte, median",
    "by seed",
    "seconds, median",
    "rounds",
    "sent between replicas",
    "tokens",
)
NOTES = """\
`recipes/quickstart.yaml` (0.73 M parameters, 2 replicas x 2 shards) with the changes below, and three seeds in turn. *Seconds* are
training time, without start-up, validation and checkpoints. All runs but those with AdamW read as many tokens; those have 540 steps
instead of 450, which take about as long. Only the quickstart itself was tuned, with another seed."""


def name_of(variant: str, seed: int) -> str:
    """Return the name of a run."""
    return f"{variant}-{seed}"


def run_of(variant: str, seed: int) -> Path:
    """Train a variant with a seed, unless that run is complete, and return the run directory."""
    keys = [f"run.name={name_of(variant, seed)}", f"run.out_dir={FOLDER}", f"run.seed={seed}", "log.tensorboard=false"]
    return train(RECIPE, [*VARIANTS[variant][1], *keys])


def row_of(variant: str, runs: Sequence[Path]) -> Row:
    """Return a variant's row of the table, from its runs by seed."""
    summaries = [summary_of(run) for run in runs]
    bits = [metrics_of(run, "eval/bpb")[-1]["eval/bpb"] for run in runs]
    seconds = statistics.median(summary["train_seconds"] for summary in summaries)
    first = summaries[0]
    return (
        VARIANTS[variant][0],
        f"{statistics.median(bits):.3f}",
        " ".join(f"{one:.3f}" for one in bits),
        f"{seconds:.0f}",
        f"{first['sync_count']:,}",
        f"{first['bytes_sent'] / 1e6:,.0f} MB",
        f"{first['tokens'] / 1e6:.2f} M",
    )


def changes_of(variants: Sequence[str]) -> str:
    """Return the changes of each variant, as a list in Markdown."""
    return "\n".join(
        f"- {VARIANTS[name][0]}: `{' '.join(VARIANTS[name][1])}`" for name in variants if VARIANTS[name][1]
    )


def main() -> None:
    """Train the missing runs, print the table, and write the page if `--write` is given."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    options = options_parser.parse_args()
    runs: Mapping[tuple[str, int], Path] = {
        (variant, seed): run_of(variant, seed) for seed in SEEDS for variant in options.variants
    }
    rows = [row_of(variant, [runs[variant, seed] for seed in SEEDS]) for variant in options.variants]
    show("The quickstart and its variants", COLUMNS, rows)
    if options.write:
        named = {name_of(*key): run for key, run in runs.items()}
        paragraphs = [NOTES, markdown(COLUMNS, rows), changes_of(options.variants), commits_sentence(named)]
        write_page(RESULTS / "quickstart", "The quickstart and its variants", paragraphs)
        keep_runs(named, RESULTS / "quickstart")


if __name__ == "__main__":
    main()
