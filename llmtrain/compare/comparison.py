"""A comparison file: which runs, under which conditions, with which seeds.

name: sync_vs_async
recipe: ../diloco_gpt_neo_8m.yaml            # of every run that names no other; paths are relative to this file
overrides: [train.tokens=null, train.steps=300]   # for all runs
hosts: {count: 4, cpus: 0.5}
runs:
  synchronous: {overrides: [sync.method=synchronous]}
  diloco: {}
conditions:
  100mbit: {bandwidth_mbit: 100}
  slow: {delays: {host: 3, seconds: 0.3}}
seeds: [1, 2, 3]
baseline: synchronous
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from llmtrain.config import Section, TraceSection
from llmtrain.errors import RecipeError
from llmtrain.recipe_messages import closest, format_value

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class HostsSection(Section):
    """The virtual hosts. Each holds one replica."""

    count: PositiveInt = 4
    """Hosts, and replicas."""
    processes: PositiveInt = 1
    """Ranks on a host: the replica's shards."""
    cpus: PositiveFloat | None = None
    """Cores' time that a host may use, so that hosts are equally fast whatever the others do; `null`: no limit."""


class HostSection(Section):
    """One host that is unlike the others. What is not given is as for all."""

    bandwidth_mbit: PositiveFloat | None = None
    """Mbit/s of its network card, in each direction."""
    latency_ms: PositiveFloat | None = None
    """Milliseconds that its messages take longer, one way."""
    cpus: PositiveFloat | None = None
    """Cores' time that it may use."""


class DelaySection(Section):
    """A sleep in the forward pass of one host in every step, as in the experiments of EDiT and WAGMA."""

    host: Literal["random"] | NonNegativeInt
    """The host, or `random`: in each step another one, drawn from the seed, the same for all methods."""
    seconds: PositiveFloat
    """How long it sleeps."""


class PauseSection(Section):
    """A host stops (SIGSTOP) for a while."""

    host: NonNegativeInt
    """Which one."""
    at: PositiveFloat
    """Seconds after training has begun."""
    seconds: PositiveFloat
    """For how long."""


class KillSection(Section):
    """A host dies (SIGKILL)."""

    host: NonNegativeInt
    """Which one."""
    at: PositiveFloat
    """Seconds after training has begun."""


class GarbageSection(Section):
    """A host trains on tokens drawn at random instead of its text for some steps."""

    host: NonNegativeInt
    """Which one."""
    first: PositiveInt
    """The first such step."""
    last: PositiveInt
    """The last one."""


class ConditionSection(Section):
    """What the runs have to live with. Nothing given: a fast network and no faults."""

    bandwidth_mbit: PositiveFloat | None = None
    """Mbit/s of every host's network card, in each direction, headers included (TCP carries 4 % less); `null`: no limit."""
    latency_ms: PositiveFloat | None = None
    """Milliseconds that messages take, one way; needs a kernel with netem."""
    hosts: dict[int, HostSection] = Field(default_factory=dict)
    """Hosts that are unlike the others, by number."""
    delays: DelaySection | None = None
    """Sleeps in the forward pass."""
    pauses: list[PauseSection] = Field(default_factory=list)
    """Hosts that stop for a while."""
    kills: list[KillSection] = Field(default_factory=list)
    """Hosts that die; the run fails, and the report shows how."""
    garbage: GarbageSection | None = None
    """Nonsense as data."""

    def words(self) -> str:
        """For people: `100 Mbit/s, host 3 sleeps 0.3 s in every step`."""
        parts = [f"{self.bandwidth_mbit:g} Mbit/s" if self.bandwidth_mbit else "no limit on bandwidth"]
        if self.latency_ms:
            parts.append(f"{self.latency_ms:g} ms latency")
        for number, host in sorted(self.hosts.items()):
            units = {"bandwidth_mbit": "Mbit/s", "latency_ms": "ms latency", "cpus": "CPUs"}
            given = [f"{value:g} {units[key]}" for key, value in host.model_dump().items() if value is not None]
            parts.append(f"host {number}: {', '.join(given)}")
        if self.delays:
            who = "another host" if self.delays.host == "random" else f"host {self.delays.host}"
            parts.append(f"{who} sleeps {self.delays.seconds:g} s in every step")
        parts += [f"host {p.host} stops for {p.seconds:g} s after {p.at:g} s" for p in self.pauses]
        parts += [f"host {k.host} dies after {k.at:g} s" for k in self.kills]
        if self.garbage:
            parts.append(f"host {self.garbage.host} reads garbage in steps {self.garbage.first} to {self.garbage.last}")
        return ", ".join(parts)

    def hosts_named(self) -> Iterator[int]:
        """Every host number that occurs."""
        yield from self.hosts
        yield from (one.host for one in (*self.pauses, *self.kills, *([self.garbage] if self.garbage else [])))
        if self.delays and self.delays.host != "random":
            yield self.delays.host


class RestartSection(Section):
    """The run stops with a checkpoint and continues from it on another number of hosts."""

    after_step: PositiveInt
    """It is told to stop once it has logged this step; it does so a log interval or two later."""
    replicas: PositiveInt
    """Replicas from then on, one host each."""


class ComparedRunSection(Section):
    """One run: a recipe and what is changed in it."""

    recipe: str | None = None
    """A recipe, relative to the comparison file; `null`: the comparison's."""
    overrides: list[str] = Field(default_factory=list)
    """`key=value`, laid over the recipe and the comparison's own overrides."""
    replicas: PositiveInt | None = None
    """Replicas that it begins with, on the first hosts; `null`: one on every host."""
    restarts: list[RestartSection] = Field(default_factory=list)
    """Where it goes on with more or fewer of them."""


class TargetSection(Section):
    """The validation loss that runs race to."""

    loss: PositiveFloat | None = None
    """`null`: what the baseline ends with under the same condition."""


class Comparison(Section):
    """Runs, conditions and seeds. Every run is made under every condition with every seed."""

    name: Name
    """Directory below `out_dir`; the file's name when left out."""
    out_dir: str = "runs"
    """Where the comparison's directory is made."""
    recipe: str | None = None
    """The recipe of runs that name none, relative to this file."""
    overrides: list[str] = Field(default_factory=list)
    """`key=value` for all runs."""
    hosts: HostsSection = Field(default_factory=HostsSection)
    """The virtual cluster."""
    runs: Annotated[dict[Name, ComparedRunSection], Field(min_length=1)]
    """By name."""
    conditions: Annotated[
        dict[Name, ConditionSection], Field(min_length=1, default_factory=lambda: {"plain": ConditionSection()})
    ]
    """By name."""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1, default_factory=lambda: [1234])]
    """`run.seed` of each repetition."""
    baseline: str | None = None
    """The run that others are measured against; `null`: the synchronous one, or the first."""
    target: TargetSection = Field(default_factory=TargetSection)
    """The loss to reach."""
    trace: TraceSection | None = None
    """Steps of which timelines are drawn; `null`: none."""
    stop_after_minutes: PositiveFloat | None = None
    """A trial that takes longer is stopped, keeps what it has measured, and is shown as stopped; `null`: never."""


@dataclass(frozen=True)
class TrialSpec:
    """One trial that the comparison asks for."""

    condition: str
    run: str
    seed: int
    recipe: Path
    overrides: tuple[str, ...]
    directory: Path
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Stage:
    """A part of a trial between two starts: `replicas` train until the run is stopped after `until` (a step), or is over."""

    replicas: int
    until: int | None

    @property
    def overrides(self) -> tuple[str, ...]:
        """What this stage changes in the trial's recipe."""
        return (f"parallel.replicas={self.replicas}",)


def load_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read a comparison file; `overrides` (`key=value`) are laid over all its runs. Raises RecipeError, one line that
    names file and key."""
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such file; comparisons are YAML files, see recipes/compare/") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: can't be read as a comparison: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected keys such as `runs:` and `conditions:`")
    data = {"name": path.stem} | data
    for key in ("runs", "conditions"):  # an entry without keys is one with all defaults
        if isinstance(data.get(key), dict):
            data[key] = {str(name): value or {} for name, value in data[key].items()}
    try:
        comparison = Comparison.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise RecipeError(f"{path}: {_explain(error)}") from None
    _check(comparison, path)
    runs = {
        name: run.model_copy(update={"overrides": [*run.overrides, *overrides]})
        for name, run in comparison.runs.items()
    }
    return comparison.model_copy(update={"runs": runs})


def trials(comparison: Comparison, file: Path) -> list[TrialSpec]:
    """All of them, in the order in which they are made: runs in turn under a condition, seed after seed."""
    return [
        _planned(comparison, file, condition, run, seed)
        for seed in comparison.seeds
        for condition in comparison.conditions
        for run in comparison.runs
    ]


def _planned(comparison: Comparison, file: Path, condition: str, run: str, seed: int) -> TrialSpec:
    section, hosts = comparison.runs[run], comparison.hosts
    folder = Path(comparison.out_dir) / comparison.name / condition / run
    overrides = [
        f"parallel.replicas={section.replicas or hosts.count}",
        f"parallel.shards={hosts.processes}",
        "eval.sample_prompt=null",
        *comparison.overrides,
        *section.overrides,
        f"run.out_dir={folder}",
        f"run.name=seed-{seed}",
        f"run.seed={seed}",
    ]
    if comparison.trace is not None:
        overrides.append(f"log.trace={{first: {comparison.trace.first}, steps: {comparison.trace.steps}}}")
    recipe = file.parent / (section.recipe or comparison.recipe)
    return TrialSpec(
        condition, run, seed, recipe, tuple(overrides), folder / f"seed-{seed}", _stages(section, hosts.count)
    )


def _stages(run: ComparedRunSection, hosts: int) -> tuple[Stage, ...]:
    replicas = [run.replicas or hosts, *(restart.replicas for restart in run.restarts)]
    return tuple(
        itertools.starmap(Stage, zip(replicas, [*(restart.after_step for restart in run.restarts), None], strict=True))
    )


def _check(comparison: Comparison, path: Path) -> None:
    for name, run in comparison.runs.items():
        if run.recipe is None and comparison.recipe is None:
            raise RecipeError(f"{path}: runs.{name} has no recipe; give runs.{name}.recipe or recipe")
        _check_stages(run, f"{path}: runs.{name}", comparison.hosts.count)
    if comparison.baseline is not None and comparison.baseline not in comparison.runs:
        raise RecipeError(
            f"{path}: baseline is {comparison.baseline!r}, which is none of the runs {', '.join(comparison.runs)}"
        )
    restarted = next((name for name, run in comparison.runs.items() if run.restarts), None)
    for name, condition in comparison.conditions.items():
        if restarted and (condition.pauses or condition.kills):
            raise RecipeError(
                f"{path}: runs.{restarted} has restarts, which conditions.{name} with its pauses or kills excludes"
            )
        for host in condition.hosts_named():
            if host >= comparison.hosts.count:
                raise RecipeError(
                    f"{path}: conditions.{name} names host {host}, but hosts.count is {comparison.hosts.count}: they are 0 to "
                    f"{comparison.hosts.count - 1}"
                )
        if condition.garbage and condition.garbage.last < condition.garbage.first:
            raise RecipeError(f"{path}: conditions.{name}.garbage ends before it begins; give last >= first")


def _check_stages(run: ComparedRunSection, where: str, hosts: int) -> None:
    for replicas in (run.replicas or hosts, *(restart.replicas for restart in run.restarts)):
        if replicas > hosts:
            raise RecipeError(f"{where} has {replicas} replicas, one a host, but hosts.count is {hosts}")
    steps = [restart.after_step for restart in run.restarts]
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise RecipeError(f"{where}.restarts come after steps {steps}; give them in rising order")


def _explain(error: ValidationError) -> str:
    """The first problem in one line."""
    problems = error.errors(include_url=False)
    first = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    *parents, key = first["loc"]
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        known = list(_section_of(parents).model_fields)
        near = closest(str(key), known)
        return f"{path} is not a key; " + (f"did you mean {near}?" if near else f"keys are {', '.join(known)}")
    if first["type"] == "missing":
        return f"{path} is not given and has no default"
    return f"{path} is {format_value(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _section_of(path: list[Any]) -> type[Section]:
    """The class that is read at a location of the file."""
    below = {
        "hosts": HostsSection,
        "runs": ComparedRunSection,
        "conditions": ConditionSection,
        "target": TargetSection,
        "trace": TraceSection,
    }
    inner = {
        "hosts": HostSection,
        "delays": DelaySection,
        "pauses": PauseSection,
        "kills": KillSection,
        "garbage": GarbageSection,
    }
    if not path:
        return Comparison
    if path[0] == "conditions" and len(path) > 2:
        return inner.get(path[2], ConditionSection)
    if path[0] == "runs" and len(path) > 2:
        return RestartSection
    return below.get(path[0], Comparison)
