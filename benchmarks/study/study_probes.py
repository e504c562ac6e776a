"""Single runs that answer questions about others (PROTOCOL.md). Nothing is chosen by them."""

from __future__ import annotations

from study_plan import BATCH, FINAL_SEEDS, TRIAL_SHARE, Cell, Run, Setting
from study_values import nesterov

SYNCHRONOUS, DILOCO, LOCAL_SGD = (Cell(method, 4, 30, BATCH[4]) for method in ("synchronous", "diloco", "local_sgd"))
OF_8, LARGE_BATCH = Cell("diloco", 8, 30, BATCH[8]), Cell("diloco", 4, 30, 128)
IN_ROUNDS_OF_3 = Cell("diloco", 4, 3, BATCH[4])
EVERY_STEP, MUON = Cell("local_sgd", 4, 1, BATCH[4]), Cell("synchronous", 4, 30, BATCH[4], inner="muon")
RATE = 0.00525451
"""The rate that synchronous training's trials chose."""
CHOSEN = Setting(0.003, nesterov(0.7, 0.5))
"""Setting that DiLoCo's trials chose with 4 replicas, H = 30 and the batch of 64."""
FRAGMENTS = "sync.schedule.fragments=3"
UNCLIPPED = ("optim.clip_norm=null",)


def with_seeds(cell: Cell, name: str, setting: Setting) -> tuple[Run, ...]:
    """Return a probe with all tokens and each of the seeds of final runs."""
    return tuple(Run(cell, f"probe-{name}", seed, setting) for seed in FINAL_SEEDS)


FIRST_PROBES = (
    Run(MUON, "probe-rate_of_muloco", 11, Setting(0.0169706)),
    Run(DILOCO, "probe-step_of_edit", 11, Setting(0.003, nesterov(0.8, 0.85, 4))),
    *(Run(DILOCO, "probe-best_of_heat", seed, Setting(0.003, nesterov(0.7, 0.8, 4))) for seed in FINAL_SEEDS[1:]),
    Run(LOCAL_SGD, "probe-rate_of_diloco", 11, Setting(0.003)),
    Run(OF_8, "probe-setting_of_4", 11, CHOSEN),
    Run(LARGE_BATCH, "probe-setting_of_64", 11, CHOSEN),
    *(
        Run(EVERY_STEP, "probe-short", number, Setting(rate), TRIAL_SHARE)
        for number, rate in enumerate((0.00241, 0.00341, RATE, 0.0074, 0.0105))
    ),
    Run(EVERY_STEP, "probe-short_unclipped", 1, Setting(RATE, UNCLIPPED), TRIAL_SHARE),
    Run(SYNCHRONOUS, "probe-short_unclipped", 1, Setting(RATE, UNCLIPPED), TRIAL_SHARE),
    Run(
        Cell("des_loc", 4, 1, BATCH[4]),
        "probe-short_moments",
        1,
        Setting(RATE, ("sync.moments={first: 1, second: 1}",)),
        TRIAL_SHARE,
    ),
    Run(Cell("co2", 4, 30, BATCH[4]), "probe-short", 1, Setting(0.006, ("sync.outer.momentum=0.2",)), TRIAL_SHARE),
)
"""Probes that were made before probes had records, and are made again."""
LATER_PROBES = (
    *with_seeds(IN_ROUNDS_OF_3, "small_momentum", Setting(0.003, nesterov(0.85, 0.4, 43))),
    Run(IN_ROUNDS_OF_3, "probe-momentum", 11, Setting(0.003, nesterov(0.74, 0.7, 43))),
    *with_seeds(OF_8, "setting_of_4", CHOSEN)[1:],
    *with_seeds(LARGE_BATCH, "setting_of_64", CHOSEN)[1:],
    *with_seeds(DILOCO, "int8", Setting(CHOSEN.lr, (*CHOSEN.own, "sync.wire=int8"))),
    *with_seeds(Cell("local_sgd", 4, 8, BATCH[4]), "traffic_of_qsr", Setting(0.00396496)),
    *with_seeds(
        Cell("streaming_diloco", 4, 30, BATCH[4]),
        "fp32",
        Setting(0.003, (FRAGMENTS, *nesterov(0.7, 0.9, 4), "sync.wire=fp32")),
    ),
)
"""Probes that were announced with the present plan."""
LONG_PROBES = with_seeds(
    Cell("streaming_diloco", 4, 30, BATCH[4], length=4),
    "step_of_diloco",
    Setting(0.006, (FRAGMENTS, *nesterov(1.0, 0.8, 4))),
)
"""Probes with four times the tokens, announced with these."""
PROBES = LATER_PROBES + FIRST_PROBES + LONG_PROBES
"""All probes. Those with a trial's tokens have a trial's seed."""
