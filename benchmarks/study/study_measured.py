"""Measured speedups of `time_to_loss.yaml` beside the predicted ones.

    python benchmarks/study/study_measured.py

Prints, for each condition and seed: the time of a message of the model in fp32, in steps without communication; how many times as
fast as synchronous training a method reached the target, and how many times as fast it was predicted to be there. A step without
communication is one of Streaming DiLoCo, without the time for which it waited. Predictions take the tokens to the target from the
trials themselves.
"""

from __future__ import annotations

import tarfile
import tempfile
from itertools import product
from pathlib import Path

from study_plan import BATCH, Records
from study_runs import read_records
from study_stages import STAGES
from study_times import step_speed
from table import RESULTS, Row, show

from llmtrain.compare.measures import cost_to_reach
from llmtrain.compare.results import Trial, load_trials

TRIALS = RESULTS / "compare" / "time_to_loss" / "trials.tar.xz"
TARGETS = {11: 3.41, 12: 3.43}
"""Validation loss to reach, by seed. Synchronous training with seed 12 ends at 3.4101."""
MBIT = (100, 30, 10)
MESSAGE_BYTES = 1.92e6
"""Bytes that a replica sends in one all-reduce of the model in fp32."""
COLUMNS = ("Mbit/s", "seed", "message in steps", "method", "measured", "predicted", "measured / predicted")


def read_trials() -> dict[tuple[str, str, int], Trial]:
    """Return the committed trials by condition, run and seed."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(TRIALS) as archive:
        archive.extractall(folder, filter="data")
        return {(trial.condition, trial.run, trial.seed): trial for trial in load_trials([Path(folder)])}


def speedup_rows(done: Records) -> list[Row]:
    """Return the rows of the table. `done` has the records of the study, whose settings the trials have."""
    trials, rows = read_trials(), []
    main = [cell for cell in STAGES["main"] if (cell.replicas, cell.every, cell.batch) == (4, 30, BATCH[4])]
    for mbit, (seed, target), method in product(MBIT, TARGETS.items(), ("diloco", "streaming_diloco")):
        alone = trials[f"{mbit}mbit", "streaming_diloco", seed].summary
        step = (alone["train_seconds"] - alone["exposed_sync_seconds"]) / alone["steps"]
        message = MESSAGE_BYTES * 8 / (mbit * 1e6) / step
        beside, own = (cost_to_reach(trials[f"{mbit}mbit", run, seed], target) for run in ("synchronous", method))
        measured = beside["seconds"] / own["seconds"]
        [cell] = [cell for cell in main if cell.method == method]
        predicted = beside["tokens"] / own["tokens"] * step_speed(cell, done, message)
        figures = (f"{measured:.2f}", f"{predicted:.2f}", f"{measured / predicted:.2f}")
        rows.append((str(mbit), str(seed), f"{message:.1f}", method, *figures))
    return rows


if __name__ == "__main__":
    show("Speedups to a loss", COLUMNS, speedup_rows(read_records()))
