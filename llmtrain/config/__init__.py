"""Typed sections of a recipe: every key with its default, its unit and its allowed values.

This package is only the schema; `llmtrain/recipe_loader.py` reads files and overrides into it. `docs/recipes.md` and
the JSON schema are generated from it.
"""

from llmtrain.config.data import DataSection, SiteSection, SourceSection
from llmtrain.config.recipe import (
    CheckpointSection,
    EvalSection,
    LogSection,
    LRScheduleSection,
    ModelSection,
    MuonSection,
    OptimSection,
    ParallelSection,
    ProfileSection,
    Recipe,
    RunSection,
    SuiteSection,
    TraceSection,
    TrainSection,
    VirtualClockSection,
    WandbSection,
)
from llmtrain.config.section import Section
from llmtrain.config.sync import (
    AnyOuter,
    AnyPeriod,
    AnyReduction,
    AnySchedule,
    AutoOuterSection,
    AverageSection,
    EverySecondsSection,
    EveryStepSection,
    MomentsSection,
    MomentumSection,
    NesterovSection,
    Normalize,
    OuterLrSection,
    OuterRoundsSection,
    OuterSection,
    PeriodSection,
    PrimalAverageSection,
    PullSection,
    QsrSection,
    SgdSection,
    StepsSection,
    SyncSection,
    WireSection,
)
from llmtrain.config.sync_reductions import (
    EditPenaltySection,
    MeanSection,
    MedianNormSection,
    RadialSection,
    ReductionSection,
    TokenWeightedSection,
)
from llmtrain.config.sync_schedules import (
    PREFETCH,
    BlockingSection,
    DelayedSection,
    FragmentsSection,
    LayerwiseSection,
    OverlappedSection,
    SyncScheduleSection,
    WaitAvoidingSection,
)
