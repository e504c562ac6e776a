"""Runs of EDiT in which one replica has a fault, from which the penalty should protect the others (PROTOCOL.md, amendment on faults).

faulty_run.py trains them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study_plan import BATCH, FINAL_SEEDS, Cell, Records, Run, Setting, loss_of
from study_values import Overrides, nesterov

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from table import Row

CELL = Cell("edit", 4, 10, BATCH[4])
RATE, OUTER_STEP = 0.003, nesterov(0.7, 0.5)
"""Setting that EDiT's trials with rounds of 10 steps chose."""
SHARE = 0.77
"""Share of a final run's tokens: 600 steps, 60 rounds."""
PARTS: dict[str, Overrides] = {
    "whole": (),
    "no_elimination": ("sync.reduction.z=null",),
    "no_weights": ("sync.reduction.temperature=null",),
    "no_clipping": ("sync.reduction.clip=null",),
    "clipping_only": ("sync.reduction.z=null", "sync.reduction.temperature=null"),
    "mean": ("sync.reduction=mean",),
}
"""Overrides for the complete penalty, for the penalty without some of its parts, and for the plain mean."""
FEW = ("whole", "mean")
FAULTS = {"clean": FEW, "bits": (*PARTS,), "rate": (*PARTS,), "documents": FEW, "gradients": FEW, "all_rates": FEW}
"""Penalties that are tried with each fault. `clean` has no fault; in `all_rates`, the inner learning rate of all replicas is four
times as high during the complete run."""
WITHOUT_REPLICA = ("clean", "all_rates")
"""Faults that no single replica has."""


def fault_run(fault: str, part: str, seed: int) -> Run:
    """Return the run with a fault, `part` of the penalty (a key of PARTS), and a seed."""
    rate = 4 * RATE if fault == "all_rates" else RATE
    program = "" if fault in WITHOUT_REPLICA else fault
    return Run(CELL, f"fault-{fault}-{part}", seed, Setting(rate, (*OUTER_STEP, *PARTS[part])), SHARE, program)


FAULT_RUNS = tuple(fault_run(fault, part, FINAL_SEEDS[0]) for fault, parts in FAULTS.items() for part in parts)


def fault_rows(done: Records) -> list[Row]:
    """Return a row for each fault and penalty that have been tried: the final loss, its difference to that of the complete penalty
    without a fault, and the number of blocks that were excluded."""
    clean = done.get(fault_run("clean", "whole", FINAL_SEEDS[0]).id)
    if clean is None:
        return []
    return [(*run.kind.split("-")[1:], *_figures(done[run.id], clean)) for run in FAULT_RUNS if run.id in done]


def _figures(record: Mapping[str, Any], clean: Mapping[str, Any]) -> tuple[str, str, str]:
    if record["loss"] is None:
        return "diverged", "", ""
    excluded = f"{record['diagnostics'].get('sync/anomalies', 0):.0f}"
    return f"{record['loss']:.4f}", f"{loss_of(record) - loss_of(clean):+.4f}", excluded
