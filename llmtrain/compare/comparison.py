"""Comparison files: the runs to make, their conditions and their seeds (docs/compare.md)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, ValidationError

from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.config import Section, TraceSection
from llmtrain.config.section import Count, FileName, PathText, expand_name
from llmtrain.errors import RecipeError
from llmtrain.files import read_mapping
from llmtrain.recipe_files import recipe_named_in
from llmtrain.recipe_loader import load_yaml, parse_overrides
from llmtrain.recipe_messages import explain_in, format_value

SET_BY = {
    "parallel.replicas": "hosts.count and runs.{run}.replicas",
    "run.seed": "seeds",
    "run.name": "seeds",
    "run.out_dir": "out_dir and name",
    "log.trace": "trace",
}
"""Keys of recipes that a comparison sets itself, and its own keys for them."""
TRIAL, COMPARISON = "trial.json", "comparison.yaml"
"""Names of the record of an ended trial, and of the comparison file in a comparison's folder."""
RUN_AGAIN = "delete the trial to run it again"
"""Remedy for a damaged file of a trial."""
WITHOUT_LIMITS = "on loopback, without limits"


@dataclass(frozen=True)
class Stage:
    """Part of a trial from one start of the run to the next. `replicas` replicas train until they are stopped after step
    `until`, or to the end of the run if that is None."""

    replicas: int
    until: int | None
    global_batch: int | None = None
    """Sequences per step; None: those of the recipe."""


class HostsSection(Section):
    """Virtual hosts, each of which trains one replica."""

    count: Count = 4
    processes: Count = 1
    """Ranks per host: the replica's shards."""
    cpus: PositiveFloat | None = None
    """CPU time of each host in cores, so that its speed does not depend on the other hosts; `null`: no limit."""


class DelaySection(Section):
    """Sleep in the forward pass of one host in each step, as in the experiments of EDiT and WAGMA."""

    host: Literal["random"] | NonNegativeInt
    """`random`: a new draw from the seed in each step, the same for all methods."""
    seconds: PositiveFloat


class PauseSection(Section):
    """Pause of a host (SIGSTOP) `at` seconds after training began."""

    host: NonNegativeInt
    at: PositiveFloat
    seconds: PositiveFloat


class KillSection(Section):
    """Death of a host (SIGKILL) `at` seconds after training began."""

    host: NonNegativeInt
    at: PositiveFloat


class GarbageSection(Section):
    """Random tokens as a host's data in steps `first` to `last`."""

    host: NonNegativeInt
    first: Count
    last: Count


class ConditionSection(Section):
    """Limits and faults under which runs are made. The default is a fast network without faults."""

    bandwidth_mbit: PositiveFloat | None = None
    """Mbit/s of each host's network card per direction, including headers (TCP carries 4 % less); `null`: no limit."""
    latency_ms: PositiveFloat | None = None
    """One-way latency of messages in milliseconds."""
    loss: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the packets that are lost."""
    hosts: dict[int, HostLimits] = Field(default_factory=dict)
    """Hosts that differ from the others. A missing key takes the value for all hosts."""
    delays: DelaySection | None = None
    pauses: list[PauseSection] = Field(default_factory=list)
    kills: list[KillSection] = Field(default_factory=list)
    """Deaths of hosts. The run then fails, and the report shows how."""
    garbage: GarbageSection | None = None

    def settings(self, shaping: bool = True) -> str:
        """Return the given keys as YAML in one line, such as `bandwidth_mbit: 100.0, kills: [{host: 1, at: 5.0}]`.
        Without `shaping`, limits are left out, because only faults are applied then."""
        limits = set() if shaping else {"bandwidth_mbit", "latency_ms", "loss", "hosts"}
        given = json.dumps(self.model_dump(exclude_unset=True, exclude=limits)).replace('"', "")[1:-1]
        if shaping:
            return given or "no limits, no faults"
        return ", ".join(filter(None, (WITHOUT_LIMITS, given)))

    def faults_after(self, seconds: float) -> list[str]:
        """Return a text for each pause and death of a host that is due later than `seconds` after training began."""
        faults = [("pause", one) for one in self.pauses] + [("death", one) for one in self.kills]
        return [f"the {kind} of host {one.host} at {one.at:g} s" for kind, one in faults if one.at > seconds]


class RestartSection(Section):
    """Stop with a checkpoint, from which the run continues on a different number of hosts."""

    after_step: Count
    """Logged step after which the run is asked to stop. It stops one or two log intervals later."""
    replicas: Count
    """Replicas after the restart, one per host."""
    global_batch: Count | None = None
    """`train.global_batch` after the restart; `null`: as before it."""


class ComparedRunSection(Section):
    """A recipe and the changes to it."""

    recipe: str | None = None
    """Recipe file, relative to the comparison file; `null`: the comparison's recipe."""
    overrides: list[str] = Field(default_factory=list)
    """`key=value` strings, laid over the recipe and the comparison's own overrides."""
    replicas: Count | None = None
    """Replicas at the start, on the first hosts; `null`: one on every host."""
    restarts: list[RestartSection] = Field(default_factory=list)

    def stages(self, hosts: int) -> tuple[Stage, ...]:
        """Return the stages of a trial on `hosts` hosts."""
        ends = [*(restart.after_step for restart in self.restarts), None]
        given = [None, *(restart.global_batch for restart in self.restarts)]
        batches = itertools.accumulate(given, lambda before, batch: before if batch is None else batch)
        replicas = [self.replicas or hosts, *(restart.replicas for restart in self.restarts)]
        return tuple(map(Stage, replicas, ends, batches))


class TargetSection(Section):
    """Validation loss that the runs race to."""

    loss: PositiveFloat | None = None
    """Nats per token, or bits per byte if the runs' tokenizers differ; `null`: the highest final loss of the
    baseline's seeds under the same condition."""


class BenchmarkSection(Section):
    """Benchmarks of the runs' last checkpoints. `llmtrain eval` runs them on the CPU after all trials (eval/README.md)."""

    name: str
    """Suite of the package (`small`, `offline`, `edit_paper`, `tinystories`) or a YAML file."""
    limit: Count | None = None
    """Maximum number of documents per task; `null`: the limit of the suite."""
    data_dir: PathText | None = None
    """Folder of local data, for suites like `offline` that read it."""


class Comparison(Section):
    """Runs, conditions and seeds. Each run is made under each condition with each seed."""

    name: FileName
    """Directory below `out_dir`; defaults to the file's name."""
    out_dir: PathText = "runs"
    recipe: str | None = None
    """Recipe of the runs that name none, relative to this file."""
    overrides: list[str] = Field(default_factory=list)
    """`key=value` strings for all runs."""
    hosts: HostsSection = Field(default_factory=HostsSection)
    runs: Annotated[dict[FileName, ComparedRunSection], Field(min_length=1)]
    conditions: Annotated[
        dict[FileName, ConditionSection], Field(min_length=1, default_factory=lambda: {"plain": ConditionSection()})
    ]
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1, default_factory=lambda: [1234])]
    """`run.seed` of each repetition."""
    baseline: str | None = None
    """Run that the others are compared with; `null`: the synchronous one, or else the first."""
    target: TargetSection = Field(default_factory=TargetSection)
    suite: Annotated[BenchmarkSection | None, BeforeValidator(expand_name)] = None
    """Benchmarks of all runs, `{name, limit, data_dir}`; `NAME` is short for `{name: NAME}`, and `null`: none."""
    trace: TraceSection | None = None
    """Steps whose timelines are drawn; `null`: none."""
    stop_after_minutes: PositiveFloat | None = None
    """Time limit. A longer trial is stopped, keeps its measurements and is shown as stopped; `null`: no limit."""


@dataclass(frozen=True)
class TrialSpec:
    """A planned trial: a run under a condition with a seed."""

    condition: str
    run: str
    seed: int
    recipe: Path
    overrides: tuple[str, ...]
    directory: Path
    stages: tuple[Stage, ...]

    def overrides_of(self, stage: Stage) -> tuple[str, ...]:
        """Return all overrides of the recipe for a stage."""
        batch = () if stage.global_batch is None else (f"train.global_batch={stage.global_batch}",)
        return (*self.overrides, f"parallel.replicas={stage.replicas}", *batch)

    def changes(self) -> list[str]:
        """Return a text for each restart within the trial: its step, its number of hosts and, if it changes, its batch."""
        found = []
        for one, other in itertools.pairwise(self.stages):
            batch = "" if other.global_batch == one.global_batch else f" and {other.global_batch} sequences per step"
            found.append(f"after step {one.until} with {other.replicas} hosts{batch}")
        return found

    def record(self) -> dict[str, Any]:
        """Return the content of the trial's trial.json; empty if the trial has not ended."""
        return read_mapping(self.directory / TRIAL, RUN_AGAIN)

    def state(self) -> str | None:
        """Return how the trial ended, or None if it has not."""
        return self.record().get("state")


def load_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Return the comparison in a YAML file, with `overrides` (`key=value`) laid over all its runs.

    Raises RecipeError, which names the file and the key in one line, if the file is not a valid comparison.
    """
    data = load_yaml(path, "comparison", lambda: "; comparisons are YAML files, see recipes/compare/")
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected keys such as `runs:` and `conditions:`")
    if not data.keys() & {"recipe", "runs", "conditions"} and data.keys() & {"base", "train", "sync"}:
        raise RecipeError(f"{path} is a recipe, not a comparison; name it as `recipe:` of one, see recipes/compare/")
    data = {"name": path.stem} | data
    for key in ("runs", "conditions"):  # an entry without keys takes all defaults
        if isinstance(data.get(key), dict):
            data[key] = {str(name): value or {} for name, value in data[key].items()}
    try:
        comparison = Comparison.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise RecipeError(f"{path}: {explain_in(Comparison, error)}") from None
    if (problem := _problem(comparison)) is not None:
        raise RecipeError(f"{path}: {problem}")
    compared = comparison.runs.items()
    runs = {name: run.model_copy(update={"overrides": [*run.overrides, *overrides]}) for name, run in compared}
    return comparison.model_copy(update={"runs": runs})


def trials(comparison: Comparison, file: Path) -> list[TrialSpec]:
    """Return all trials in the order in which they run: by seed, then by condition, then by run."""
    planned, trace = [], comparison.trace
    for seed, condition, run in itertools.product(comparison.seeds, comparison.conditions, comparison.runs):
        section = comparison.runs[run]
        stages = section.stages(comparison.hosts.count)
        folder = Path(comparison.out_dir) / comparison.name / condition / run
        overrides = (
            f"parallel.replicas={stages[0].replicas}",
            f"parallel.shards={comparison.hosts.processes}",
            "eval.sample_prompt=null",
            *comparison.overrides,
            *section.overrides,
            "checkpoint.mirror=null",  # runs and conditions would share it, and continue from each other's checkpoints
            f"run.out_dir={folder}",
            f"run.name=seed-{seed}",
            f"run.seed={seed}",
            *([f"log.trace={{first: {trace.first}, steps: {trace.steps}}}"] if trace else []),
        )
        recipe = recipe_named_in(file, section.recipe or comparison.recipe)
        planned.append(TrialSpec(condition, run, seed, recipe, overrides, folder / f"seed-{seed}", stages))
    return planned


def check_overrides(planned: TrialSpec, comparison: Comparison) -> None:
    """Raise RecipeError for an override of a key that the comparison itself sets to another value."""
    given = parse_overrides([*comparison.overrides, *comparison.runs[planned.run].overrides])
    for stage, (key, setters) in itertools.product(planned.stages, SET_BY.items()):
        value, used = (_value(data, key) for data in (given, parse_overrides(planned.overrides_of(stage))))
        if value not in (None, used):
            raise RecipeError(
                f"{key} is {format_value(value)} in the overrides, but {setters.format(run=planned.run)} set it to "
                f"{format_value(used)}; change those instead"
            )


def _value(data: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key of a recipe, or None."""
    section, _, name = key.partition(".")
    return data[section].get(name) if isinstance(data.get(section), dict) else None


def _problem(comparison: Comparison) -> str | None:
    """Return the first problem of a comparison whose keys are all valid, or None."""
    count, runs = comparison.hosts.count, comparison.runs
    for name, run in runs.items():
        if run.recipe is None and comparison.recipe is None:
            return f"runs.{name} has no recipe; give runs.{name}.recipe or recipe"
        if (replicas := max(stage.replicas for stage in run.stages(count))) > count:
            return f"runs.{name} has {replicas} replicas, one per host, but hosts.count is {count}"
        steps = [restart.after_step for restart in run.restarts]
        if steps != sorted(set(steps)):
            return f"runs.{name}.restarts come after steps {steps}; give them in rising order"
    if comparison.baseline is not None and comparison.baseline not in runs:
        return f"baseline is {comparison.baseline!r}, which is not one of the runs {', '.join(runs)}"
    restarted = next((name for name, run in runs.items() if run.restarts), None)
    for name, condition in comparison.conditions.items():
        if restarted and (condition.pauses or condition.kills):
            return f"runs.{restarted} has restarts, which conditions.{name} with its pauses or kills excludes"
        faults = [*condition.pauses, *condition.kills, condition.garbage, condition.delays]
        faulty = [fault.host for fault in faults if fault is not None and fault.host != "random"]
        if too_high := [host for host in (*condition.hosts, *faulty) if host >= count]:
            return f"conditions.{name} names host {too_high[0]}, but hosts.count is {count}: they are 0 to {count - 1}"
        for run, section in runs.items():
            used = min(stage.replicas for stage in section.stages(count))
            if unused := [host for host in faulty if host >= used]:
                return (
                    f"conditions.{name} has a fault of host {unused[0]}, which runs.{run} does not always use: "
                    f"it trains on {used} of {count}; give a lower host, or compare that run in a file without the fault"
                )
        if condition.garbage and condition.garbage.last < condition.garbage.first:
            return f"conditions.{name}.garbage ends before it begins; give last >= first"
    return None
