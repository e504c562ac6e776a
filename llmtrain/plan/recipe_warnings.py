"""All warnings about the values of a recipe: values that have less effect than they seem to have, and values that make
the run worse. Training is possible with all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from llmtrain.config import MomentumSection, NesterovSection, PrimalAverageSection, Recipe
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.python_files import PYTHON, STDLIB
from llmtrain.data.ready_made import is_for_validation
from llmtrain.data.text_list import key_of
from llmtrain.data.token_files import find_token_files
from llmtrain.errors import DataError
from llmtrain.files import local_path
from llmtrain.plan.mesh_plan import size_or_assumed
from llmtrain.plan.model_size import size_of
from llmtrain.plan.time_estimate import HardwareRates, estimate_time, rate_here
from llmtrain.plan.unused_keys import is_given, unused_keys
from llmtrain.quantities import counted, format_duration
from llmtrain.step_counts import local_steps, round_count
from llmtrain.sync.methods import is_for_one_replica

SEVERAL = 3
"""Minimum length of a run, as a multiple of the length that its running average covers. At this length, the initial
parameters still have 5 % of the average's weight."""
TESTED_ROUNDS = 30
"""Maximum number of rounds for the warning about early momentum. Tests had at most 26: in 26 rounds of 30 steps (one
seed), DiLoCo with an outer learning rate of 0.7 and momentum 0.8 ended 6 % higher than with a warm-up of the momentum
over four rounds, and in 7 rounds DiLoCo and EDiT with their presets 11 and 13 % (benchmarks/results/study); in 13
rounds of 20, EDiT 3 %. With Muon, 7 rounds show no difference."""
LARGE, LARGE_LR = 0.8, 0.7
"""Smallest outer momentum and learning rate with which the warning was tested. With a learning rate of 0.4, the warm-up
changed the loss by less than 0.02."""
FEWEST_WITH_RULE = 13
"""Smallest number of rounds with which `sync.outer: auto` ended lower in tests."""
TESTED_WARMUP = 4
"""Rounds of warm-up with which the warning was tested."""
NO_TEXTS: Mapping[str, TokenDataset] = MappingProxyType({})


@dataclass(frozen=True)
class MeshSize:
    """Numbers of ranks and replicas of a run, as far as they are known before it starts."""

    ranks: int
    replicas: int | None = None
    """None if their number depends on nodes that are not known."""
    local_ranks: int | None = None
    """Ranks on this machine; None if the run is for other machines."""


def recipe_warnings(
    recipe: Recipe, texts: Mapping[str, TokenDataset] = NO_TEXTS, mesh: MeshSize | None = None
) -> list[str]:
    """Return a line for each value that has less effect than it seems to have, and for each that makes the run worse.

    `texts` holds the prepared texts by name; the run's own text has the name "". Warnings that depend on a mesh or a
    text that is not given are left out.
    """
    seconds = seconds_of_step(recipe, texts, mesh) if recipe.sync.period.is_timed else None
    return [
        *_period(recipe, mesh, seconds),
        *_average(recipe),
        *_validation(recipe, texts),
        *_trained_on(recipe),
        *_recordings(recipe),
        *unused_keys(recipe),
        *_early_momentum(recipe, seconds),
        *_ranks(recipe, mesh),
    ]


def seconds_of_step(
    recipe: Recipe, texts: Mapping[str, TokenDataset] = NO_TEXTS, mesh: MeshSize | None = None
) -> float | None:
    """Return the estimated seconds of a step, by the virtual clock or on this machine; None if the run is for other
    machines. Without a clock, this function measures matrix products."""
    if (clock := recipe.parallel.virtual_clock) is not None:
        mean_delay = clock.random_delay / len(clock.step_seconds)
        return len(clock.step_seconds) / sum(1 / (seconds + mean_delay) for seconds in clock.step_seconds)
    if mesh is None or mesh.local_ranks is None:
        return None
    prepared = next(iter(texts.values()), None)
    size = size_or_assumed(recipe) if prepared is None else size_of(recipe, prepared.vocab_size)
    rates = HardwareRates(rate_here(recipe, mesh.local_ranks), mbit=math.inf)
    return estimate_time(recipe, size, mesh.replicas, mesh.ranks // mesh.replicas, rates).step


def _period(recipe: Recipe, mesh: MeshSize | None, seconds: float | None) -> Iterator[str]:
    """Yield a line if the run has only one round. `seconds` is the duration of a step, if known."""
    period, local = recipe.sync.period, local_steps(recipe)
    once = "replicas synchronize once, after the last step"
    if period.is_timed:
        if seconds is not None and period.every > local * seconds:
            run = format_duration(local * seconds)
            yield f"sync.period.every is {period.every:g} s, but the run's {local:,} local steps take about {run}: {once}"
        elif mesh is not None and mesh.replicas and period.min_steps > local * mesh.replicas:
            yield (
                f"sync.period.min_steps is {period.min_steps:,}, but {mesh.replicas} x {local:,} local steps are all of the run: {once}"
            )
    elif period.min_length is not None and period.min_length > local:
        yield (
            f"sync.period.{period.shortest_round} is {period.min_length:,}, but the run has {local:,} local steps: {once}"
        )


def _average(recipe: Recipe) -> Iterator[str]:
    """Yield a line if the run is too short for a running average of its parameters."""
    sync, outer = recipe.sync, recipe.sync.outer
    if not isinstance(outer, PrimalAverageSection) or sync.period.min_length is None:
        return
    rounds, covered = round_count(recipe), round(1 / (1 - outer.decay))
    if rounds < SEVERAL * covered:
        yield (
            f"sync.outer.decay is {outer.decay:g}, an average over about {covered:,} synchronizations, but the run has {rounds:,}: "
            "the final average still contains much of the early parameters"
        )


def _validation(recipe: Recipe, texts: Mapping[str, TokenDataset]) -> Iterator[str]:
    section = recipe.eval
    for name, text in texts.items():
        split = text.index.splits["validation"]
        if is_given(recipe, "eval.tokens") and split.exhausted and split.tokens < section.tokens:
            what = f"the text {name} of eval.sets" if name in section.sets else "the validation text"
            what += f" of {name}" if name and name not in section.sets else ""
            yield f"eval.tokens is {section.tokens:,}, but {what} has {split.tokens:,} tokens: all of them are used"
    is_cut = section.sample_tokens >= recipe.train.sequence_length
    if section.sample_prompt is not None and is_cut and is_given(recipe, "eval.sample_tokens"):
        yield (
            f"eval.sample_tokens is {section.sample_tokens:,}, but a sample with its prompt ends at "
            f"train.sequence_length = {recipe.train.sequence_length:,} tokens"
        )


def _trained_on(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each validation text that is a part of a training text, so that it is trained on."""
    texts = recipe.data.texts()
    held_out = [(f"eval.sets.{name}", None, text) for name, text in recipe.eval.sets.items()]
    for name, section in texts.items():
        if section.validation not in (None, section.source):  # its own text leaves these files out
            key = key_of(recipe.data, name).removesuffix("source") + "validation"
            held_out.append((key, name, section.validation))
    keys = {section.source: key_of(recipe.data, name) for name, section in texts.items()}
    if {STDLIB, PYTHON} <= keys.keys():
        yield f"{keys[STDLIB]}: {STDLIB} is in {keys[PYTHON]}={PYTHON}, so validation text is trained on; leave one of them out"
    for key, owner, text in held_out:
        for name, section in texts.items():
            is_left_out = name == owner or (section.validation != section.source and _is_in(text, section.validation))
            if _is_in(text, section.source) and not is_left_out:
                yield (
                    f"{key}: {text} is in {key_of(recipe.data, name)}={section.source}, so it is trained on; move it elsewhere"
                )


def _is_in(text: str, folder: str | None) -> bool:
    """Return whether `text`, a file or folder, is `folder` or inside it, or one of the token files that `folder` names together."""
    here = local_path(text)
    if here is None or folder is None:
        return False
    places = [local_path(folder)]
    if places == [None]:  # a pattern, or the beginning of a name
        with suppress(DataError):
            named = find_token_files(folder, "", ()) or []
            places = [path for path in named if not is_for_validation(path)]
    return any(place is not None and here.resolve().is_relative_to(place.resolve()) for place in places)


def _recordings(recipe: Recipe) -> Iterator[str]:
    total = recipe.train.total_steps
    for key, section in (("trace", recipe.log.trace), ("profile", recipe.log.profile)):
        if section is not None and section.first > total:
            yield f"log.{key}.first is {section.first:,}, but the run has {counted(total, 'step', ',')}: nothing is recorded"


def _early_momentum(recipe: Recipe, seconds: float | None) -> Iterator[str]:
    """Yield a line, with a better value, if a short run has its outer momentum from the first round on. `seconds` is
    the duration of a step, if known, and serves to count timed rounds."""
    period, outer = recipe.sync.period, recipe.sync.outer
    if not isinstance(outer, NesterovSection | MomentumSection):
        return
    if period.is_timed:
        rounds = 0 if seconds is None else round(local_steps(recipe) * seconds / period.every)
    else:
        rounds = round_count(recipe) if period.min_length else 0
    is_tested = outer.momentum >= LARGE and outer.lr >= LARGE_LR and recipe.optim.kind == "adamw"
    if is_tested and recipe.parallel.replicas != 1 and 1 < rounds <= TESTED_ROUNDS and not outer.rounds.momentum_warmup:
        has_rule = isinstance(outer, NesterovSection) and not period.is_timed and rounds >= FEWEST_WITH_RULE
        yield (
            f"sync.outer.momentum is {outer.momentum:g} from the first of {'about ' * period.is_timed}{rounds} rounds: in tests, runs "
            f"this short ended with a lower loss with {'sync.outer=auto or ' * has_rule}"
            f"sync.outer.rounds.momentum_warmup={min(TESTED_WARMUP, rounds)}"
        )


def _ranks(recipe: Recipe, mesh: MeshSize | None) -> Iterator[str]:
    """Yield a line if the method averages replicas but there is only one, and a line if a rank that should be profiled
    does not exist."""
    if mesh is None:
        return
    if mesh.replicas == 1 and not (is_for_one_replica(recipe.sync.method) or recipe.sync.period.averages_gradients):
        yield (
            f"there is one replica, so sync.method={recipe.sync.method} has no other replica to average with; for several replicas, give "
            "parallel.replicas=auto and start more processes (llmtrain launch), or parallel.in_process=true parallel.replicas=2"
        )
    missing = [rank for rank in recipe.log.profile.ranks if rank >= mesh.ranks] if recipe.log.profile else []
    if missing:
        yield f"log.profile.ranks has {missing[0]}, but the ranks are 0 to {mesh.ranks - 1}, so nothing is recorded for it"
