"""Warnings about values of a recipe that have less effect than they seem to have. Training is possible with each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from llmtrain.config import LRScheduleSection, OptimSection, PrimalAverageSection, Recipe, Section
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.text_list import key_of
from llmtrain.files import local_path
from llmtrain.lr import LRSchedule
from llmtrain.plan.duration import format_duration
from llmtrain.plan.model_size import size_of
from llmtrain.plan.time_estimate import HardwareRates, estimate_time, rate_here
from llmtrain.sync.methods import inner_preset
from llmtrain.sync.period import warmup_of

SEVERAL = 3
"""Minimum length of a run, as a multiple of what its running average covers. At this length, the parameters from which the
average began still have 5 % of its weight."""


def ineffective_keys(recipe: Recipe, texts: Mapping[str, TokenDataset], step_seconds: float | None) -> list[str]:
    """Return a line for each value that has less effect than it seems to have.

    `texts` holds the validation texts that are prepared, by name; the run's own has the name "". `step_seconds` is the
    estimated duration of a step, or None if it is unknown.
    """
    return [
        *_period(recipe, step_seconds),
        *_average(recipe),
        *_validation(recipe, texts),
        *_trained_on(recipe),
        *_recordings(recipe),
        *_unused(recipe),
        *_unused_rates(recipe),
    ]


def seconds_of_step(recipe: Recipe, vocab_size: int, replicas: int, shards: int, local_ranks: int) -> float | None:
    """Return the estimated duration of a step on this machine, which has `local_ranks` of the ranks, or by the virtual clock.
    Return None if no warning depends on it, because the estimate times matrix products."""
    if not recipe.sync.period.is_timed:
        return None
    if (clock := recipe.parallel.virtual_clock) is not None:
        mean_delay = clock.random_delay / replicas
        return replicas / sum(1 / (seconds + mean_delay) for seconds in clock.step_seconds)
    rates = HardwareRates(rate_here(recipe, local_ranks), mbit=math.inf)
    return estimate_time(recipe, size_of(recipe, vocab_size), replicas, shards, rates).step


def _trained_on(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each validation text that is also trained on, because it is a part of a training text."""
    texts = recipe.data.texts()
    held_out = [(f"eval.sets.{name}", None, text) for name, text in recipe.eval.sets.items()]
    for name, section in texts.items():
        if section.validation not in (None, section.source):  # its own text leaves these files out
            key = key_of(recipe.data, name).removesuffix("source") + "validation"
            held_out.append((key, name, section.validation))
    for key, owner, text in held_out:
        for name, section in texts.items():
            is_left_out = name == owner or (section.validation != section.source and _is_in(text, section.validation))
            if _is_in(text, section.source) and not is_left_out:
                yield (
                    f"{key}: {text} is in {key_of(recipe.data, name)}={section.source}, so it is trained on; move it elsewhere"
                )


def _is_in(text: str, folder: str | None) -> bool:
    """Return whether a file or folder is another one, or in it."""
    here, there = local_path(text), None if folder is None else local_path(folder)
    return here is not None and there is not None and here.resolve().is_relative_to(there.resolve())


def _period(recipe: Recipe, step_seconds: float | None) -> Iterator[str]:
    sync, total = recipe.sync, recipe.train.total_steps
    period = sync.period
    if period.averages_gradients:
        return
    local = total - warmup_of(sync, LRSchedule.of(recipe))
    once = "replicas synchronize once, after the last step"
    if period.is_timed:
        if step_seconds is not None and period.every > local * step_seconds:
            run = format_duration(local * step_seconds)
            yield f"sync.period.every is {period.every:g} s, but the run's {local:,} local steps take about {run}: {once}"
    elif period.min_length is not None and period.min_length > local:
        yield (
            f"sync.period.{period.shortest_round} is {period.min_length:,}, but the run has {local:,} local steps: {once}"
        )


def _average(recipe: Recipe) -> Iterator[str]:
    """Yield a line if the run is too short for a running average of its parameters."""
    sync, outer = recipe.sync, recipe.sync.outer
    if not isinstance(outer, PrimalAverageSection) or sync.period.min_length is None:
        return
    local = recipe.train.total_steps - warmup_of(sync, LRSchedule.of(recipe))
    rounds, covered = local // sync.period.min_length, round(1 / (1 - outer.decay))
    if rounds < SEVERAL * covered:
        yield (
            f"sync.outer.decay is {outer.decay:g}, an average over about {covered:,} synchronizations, but the run has {rounds:,}: "
            "it ends with much of its early parameters"
        )


def _validation(recipe: Recipe, texts: Mapping[str, TokenDataset]) -> Iterator[str]:
    section = recipe.eval
    for name, text in texts.items():
        split = text.index.splits["validation"]
        if _is_given(section, "tokens") and split.exhausted and split.tokens < section.tokens:
            what = f"the text {name} of eval.sets" if name in section.sets else "the validation text"
            what += f" of {name}" if name and name not in section.sets else ""
            yield f"eval.tokens is {section.tokens:,}, but {what} has {split.tokens:,} tokens: all of them are used"
    is_cut = section.sample_tokens >= recipe.train.sequence_length
    if section.sample_prompt is not None and is_cut and _is_given(section, "sample_tokens"):
        yield (
            f"eval.sample_tokens is {section.sample_tokens:,}, but a sample with its prompt ends at "
            f"train.sequence_length = {recipe.train.sequence_length:,} tokens"
        )


def _recordings(recipe: Recipe) -> Iterator[str]:
    total = recipe.train.total_steps
    for key, section in (("trace", recipe.log.trace), ("profile", recipe.log.profile)):
        if section is not None and section.first > total:
            yield f"log.{key}.first is {section.first:,}, but the run has {total:,} steps: nothing is recorded"


def _unused(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key that the other keys make unused."""
    sync, parallel = recipe.sync, recipe.parallel
    if sync.period.averages_gradients and sync.warmup_steps:
        yield f"sync.warmup_steps is {sync.warmup_steps:,}, but sync.method={sync.method} averages gradients in every step"
    if sync.period.averages_gradients and sync.warmup_until_lr is not None:
        yield (
            f"sync.warmup_until_lr is {sync.warmup_until_lr:g}, but sync.method={sync.method} averages gradients in every step"
        )
    if sync.offload and (sync.period.averages_gradients or not sync.needs_anchor):
        yield f"sync.offload is true, but sync.method={sync.method} keeps no anchor that could be offloaded"
    if sync.moments is not None and sync.moments.first is None and sync.moments.second is None:
        yield "sync.moments is given, but neither first nor second: no moments are averaged"
    for key in ("keep", "values"):
        if _is_given(sync.wire, key) and sync.wire.kind != "topk":
            yield f"sync.wire.{key} is {getattr(sync.wire, key)}, but sync.wire is {sync.wire.kind}, and only topk has a choice of values"
    if _is_given(sync.wire, "feedback_decay") and not sync.wire.error_feedback:
        yield f"sync.wire.feedback_decay is {sync.wire.feedback_decay:g}, but sync.wire.error_feedback is false"
    no_gradients_sent = not sync.period.averages_gradients and warmup_of(sync, LRSchedule.of(recipe)) == 0
    if sync.wire.gradients and no_gradients_sent:
        yield "sync.wire.gradients is true, but the run has no synchronous steps (sync.warmup_steps), which send gradients"
    if recipe.train.document_mask and recipe.data.packing == "none":
        yield "train.document_mask is true, but with data.packing=none a sequence never has two documents"
    if _is_given(parallel, "zero_stage") and parallel.engine != "zero":
        yield f"parallel.zero_stage is {parallel.zero_stage}, but parallel.engine is {parallel.engine}, which has no stages"
    if _is_given(recipe.optim, "muon") and recipe.optim.kind != "muon" and not inner_preset(sync.method):
        yield f"optim.muon is given, but optim.kind is {recipe.optim.kind}"
    if not parallel.reshard_after_forward and (parallel.engine == "zero" or parallel.shards == 1):
        yield "parallel.reshard_after_forward is false, which has an effect on fsdp2 with several shards only"


def _unused_rates(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key of the inner optimizer and its learning rate that their kinds make unused."""
    schedule, optim = recipe.schedule, recipe.optim
    if schedule.kind != "step":
        for key in _chosen(schedule, "decay_at", "decay_factor"):
            yield f"{key}, but schedule.kind is {schedule.kind}, and only step has points at which the rate drops"
    if schedule.kind in ("constant", "step"):
        for key in _chosen(schedule, "final_ratio"):
            yield f"{key}, but schedule.kind is {schedule.kind}, and only cosine and linear have a final rate"
    if optim.kind == "sgd":
        for key in _chosen(optim, "betas", "eps"):
            yield f"{key}, but optim.kind is sgd, which has no moments"


def _chosen(section: LRScheduleSection | OptimSection, *keys: str) -> Iterator[str]:
    """Yield `section.key is value` for those of the keys that have another value than the default."""
    label = "optim" if isinstance(section, OptimSection) else "schedule"
    for key in keys:
        if (value := getattr(section, key)) != type(section).model_fields[key].default:
            yield f"{label}.{key} is {list(value) if isinstance(value, tuple) else f'{value:g}'}"


def _is_given(section: Section, key: str) -> bool:
    """Return whether a recipe, a base file or the command line gives the key another value than the default. The recipe.yaml of a
    run gives all keys."""
    default = type(section).model_fields[key].get_default(call_default_factory=True)
    return key in section.model_fields_set and getattr(section, key) != default
