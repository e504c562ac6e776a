"""The study's cells by stage, the order in which they are run, and the runs of each."""

from __future__ import annotations

from collections.abc import Sequence

from study_faults import FAULT_RUNS
from study_plan import AUTO, BATCH, FINAL_SEEDS, TRIALS, Cell, Records, Run, Setting, best_of, trials
from study_probes import PROBES
from study_values import nesterovs

METHODS = (
    *("synchronous", "diloco", "local_sgd", "edit", "streaming_diloco", "muloco"),
    *("sparseloco", "palsgd", "qsr", "co2", "slowmo", "post_local_sgd", "des_loc"),
)
FEW = ("synchronous", "diloco")
STAGES = {
    "main": (
        *(Cell(method, 4, 30, BATCH[4]) for method in METHODS),
        Cell("synchronous", 4, 30, BATCH[4], inner="muon"),
        Cell("wagma", 4, 30, BATCH[4], clock="even"),
    ),
    "gradients": (Cell("synchronous", 4, 30, BATCH[4], gradients="int8"),),
    "together": tuple(Cell(method, 4, 30, BATCH[4], together=0.08) for method in ("diloco", "local_sgd", "edit")),
    "uneven": tuple(
        Cell(method, 4, 30, BATCH[4], clock=clock) for clock in ("half", "random") for method in ("a_edit", "wagma")
    ),
    "replicas": (
        *(Cell(method, replicas, 30, BATCH[replicas]) for replicas in (8, 1, 2) for method in FEW),
        Cell("gpa", 1, 1, BATCH[1]),
    ),
    "rounds": (
        *(Cell(method, 4, 3, BATCH[4]) for method in METHODS[1:3]),
        *(Cell(method, 4, every, BATCH[4]) for every in (10, 100) for method in METHODS[1:4]),
        Cell("palsgd", 4, 100, BATCH[4]),
    ),
    "batch": tuple(Cell(method, 4, 30, batch) for batch in (32, 128) for method in FEW),
    "long": tuple(Cell(method, 4, 30, BATCH[4], length=4) for method in ("synchronous", "diloco", "edit", "local_sgd")),
    "text": (
        *(Cell(method, 4, 30, BATCH[4], text="tinystories") for method in (*METHODS[:4], "qsr")),
        Cell("a_edit", 4, 30, BATCH[4], clock="half", text="tinystories"),
    ),
    "power": (Cell("qsr", 4, 30, BATCH[4], variant="power1"),),
    "muon": (Cell("synchronous", 8, 30, BATCH[8], inner="muon"), Cell("muloco", 8, 30, BATCH[8])),
    "auto": (
        *(
            Cell("diloco", 4, *choice, variant=AUTO)
            for choice in ((10, BATCH[4]), (30, 32), (30, BATCH[4]), (100, BATCH[4]))
        ),
        *(Cell("edit", 4, every, BATCH[4], variant=AUTO) for every in (10, 30)),
        *(Cell("diloco", replicas, 30, BATCH[replicas], variant=AUTO) for replicas in (8, 2)),
        Cell("muloco", 4, 30, BATCH[4], variant=AUTO),
    ),
    "sites": (
        Cell("synchronous", 4, 30, BATCH[4], text="mixture"),
        *(Cell(method, 4, 30, BATCH[4], text=text) for method in ("diloco", "edit") for text in ("mixture", "sites")),
        *(Cell("diloco", 4, 10, BATCH[4], text=text, variant=AUTO) for text in ("mixture", "sites")),
    ),
    "probes": (),
    "faults": (),
}
"""Cells by stage, in the order in which they are run. Those of SINGLE_RUNS have single runs instead."""
SINGLE_RUNS = {"probes": PROBES, "faults": FAULT_RUNS}
SHORTENED = {
    cell: (0.25, 0.5) for cell in (STAGES["main"][0], STAGES["main"][-2], STAGES["long"][0], STAGES["text"][0])
}
"""Shares of the tokens in additional runs of synchronous training, the measure of what fewer tokens cost."""
HEAT_STEPS = tuple(
    (lr, momentum, warmup)
    for momentum, warmup in ((0.0, 0), (0.5, 0), (0.8, 0), (0.9, 0), (0.8, 4), (0.9, 4))
    for lr in (0.4, 0.7, 1.0)
)
"""Outer learning rates, momenta and rounds of warm-up of the heat map."""
HEAT = {STAGES["main"][1]: nesterovs(*HEAT_STEPS)}
"""Outer steps of additional final runs, each with the first seed and the inner learning rate of the best trial."""
URGENT = (
    *STAGES["main"][:4],
    STAGES["together"][0],
    *STAGES["replicas"][:2],
    STAGES["rounds"][0],
    *STAGES["gradients"],
    *(cell for cell in STAGES["main"] if not cell.clock),
    *STAGES["replicas"],
    *STAGES["main"],
    *STAGES["uneven"],
    STAGES["together"][1],
    *(cell for cell in STAGES["rounds"] if cell.method == "diloco"),
    *STAGES["long"][:2],
    *STAGES["together"],
    *STAGES["long"],
    STAGES["rounds"][3],
    STAGES["rounds"][-1],
    *STAGES["batch"][:2],
    *(cell for cell in STAGES["rounds"] if cell.method == "local_sgd"),
)
"""Cells to run before all others: plain averaging, DiLoCo and EDiT beside synchronous training, what changes DiLoCo's gap, and
what synchronous training with fewer bytes loses; then the main table, numbers of replicas, uneven replicas, DiLoCo with other
rounds, a synchronous start, and four times the tokens; then QSR's comparison at equal traffic, PALSGD with long rounds, and the
smaller batch."""


def runs_of(cell: Cell, done: Records) -> list[Run]:
    """Return the cell's runs as far as they are determined, finished ones included."""
    tried = list(trials(cell.tuned, done))
    own_trials = tried if cell.tuned == cell else []
    if len(tried) < TRIALS or (best := best_of(tried, done)) is None:
        return own_trials
    setting = Setting(best.setting.lr, ("sync.outer=auto",)) if cell.variant == AUTO else best.setting
    finals = [Run(cell, "final", seed, setting) for seed in FINAL_SEEDS]
    shares = SHORTENED.get(cell, ())
    return [
        *own_trials,
        *finals,
        *(Run(cell, "shorter", seed, best.setting, share) for share in shares for seed in FINAL_SEEDS),
        *(Run(cell, "heat", number, Setting(best.setting.lr, own)) for number, own in enumerate(HEAT.get(cell, ()))),
    ]


def pending(stages: Sequence[str], done: Records) -> list[Run]:
    """Return the runs that can be made now, in the order in which to make them: cell by cell, those in `URGENT` first."""
    cells = [cell for stage in stages for cell in STAGES[stage]]
    cells.sort(key=lambda cell: URGENT.index(cell) if cell in URGENT else len(URGENT))
    runs = [*(run for cell in cells for run in runs_of(cell, done)), *single_runs(stages)]
    return [run for run in runs if run.id not in done]


def single_runs(stages: Sequence[str]) -> list[Run]:
    """Return the runs of stages that have no cells."""
    return [run for stage in stages for run in SINGLE_RUNS.get(stage, ())]


def total(stages: Sequence[str]) -> int:
    """Return the total number of runs in the stages."""
    cells = [cell for stage in stages for cell in STAGES[stage]]
    finals = sum(len(FINAL_SEEDS) * (1 + len(SHORTENED.get(cell, ()))) + len(HEAT.get(cell, ())) for cell in cells)
    return TRIALS * sum(cell.tuned == cell for cell in cells) + finals + len(single_runs(stages))
