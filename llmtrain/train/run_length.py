"""Changes of the length or the global batch of a run that is continued: which changes are refused, and the jump of the
learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmtrain.config import DataSection, Recipe
from llmtrain.config.data import HUB
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule

VISIBLE_JUMP = 0.01
"""Relative change of the learning rate above which a jump is reported."""


@dataclass(frozen=True)
class LengthChange:
    """Difference in length and global batch between the recipe that wrote a checkpoint and the one that continues it."""

    before: Recipe
    after: Recipe
    step: int
    """Global step of the checkpoint."""

    @property
    def is_change(self) -> bool:
        """Return whether the recipes differ in their number of steps or in their global batch."""
        return self.steps_differ or self.old_global_batch is not None

    @property
    def steps_differ(self) -> bool:
        """Return whether the recipes differ in their number of steps."""
        return self.before.train.total_steps != self.after.train.total_steps

    @property
    def old_global_batch(self) -> int | None:
        """Return the global batch of the recipe that wrote the checkpoint; None if both recipes have the same global batch."""
        before, after = self.before.train.global_batch, self.after.train.global_batch
        return None if before == after else before

    def check(self, where: str) -> None:
        """Raise RecipeError if no steps are left to train, unless the checkpoint is the last of a run of this length.
        Also raise it if the global batch can't change. `where` names the checkpoint in the message."""
        total, batch = self.after.train.total_steps, self.after.train.global_batch
        is_end = self.step == total and self.before.train.total_steps <= self.step
        if self.steps_differ and self.step >= total and not is_end:
            raise RecipeError(
                f"{length_key(self.after)} is {_length(self.after)}, but {where} has trained {self.step} steps already; give more to "
                "continue it, or choose another run.name"
            )

        if problem := batch_problem(self.before, self.after):
            raise RecipeError(
                f"train.global_batch is {batch}, but {where} was trained with {self.old_global_batch}; {problem}, or choose another "
                "run.name"
            )

    def describe(self) -> str:
        """Return a short description for the console; empty if nothing changes."""
        old, new = self.before.train, self.after.train
        steps = f", for {new.total_steps:,} steps instead of {old.total_steps:,}" if self.steps_differ else ""
        batch = f", with {new.global_batch} sequences per step instead of {old.global_batch}"
        return f"{steps}{batch if self.old_global_batch else ''}{self._outer_step_changes()}"

    def _outer_step_changes(self) -> str:
        """Return, for `describe`, the values of `sync.outer` that the new length or recipe changes."""
        before, after = (recipe.sync.outer.model_dump() for recipe in (self.before, self.after))
        given = [f"sync.outer.{key}={value}" for key, value in after.items() if value != before.get(key)]
        return f" (now {', '.join(given)})" if given else ""

    def warnings(self) -> Iterator[str]:
        """Yield warnings about effects of the change that a user may not expect."""
        if (jump := self.rate_jump()) is not None:
            yield jump
        before, after = self.before.train, self.after.train
        left = (after.total_steps - self.step) * after.global_batch
        lacking = min(left, self.step * before.global_batch + left - after.total_steps * after.global_batch)
        if lacking > 0 and not all(map(is_fixed, self.after.data.texts().values())):
            yield (
                f"of the {left:,} sequences that are left, about {lacking:,} are read a second time: a hub dataset without "
                f"data.max_tokens is tokenized for {after.total_steps:,} steps of {after.global_batch}, and {self.step:,} had "
                f"{before.global_batch}"
            )

    def rate_jump(self) -> str | None:
        """Return a line about the jump that the new length and schedule cause in the learning rate after the
        checkpoint; None if there is no jump, or the length is the same."""
        if not self.steps_differ:
            return None
        old, new, following = LRSchedule.of(self.before), LRSchedule.of(self.after), self.step + 1
        step = max(1, self.step)
        last, found = old.at(step), new.at(following)
        # If both schedules agree at the checkpoint or in the step after it, the new one continues without a jump.
        if following > new.total_steps or _is_close(new.at(step), last) or _is_close(found, old.at(following)):
            return None
        kinds = [self.before.schedule.kind, self.after.schedule.kind]
        line = (
            f"learning rate: from {last:.3g} in step {self.step} to {found:.3g} in step {following}, because "
            f"schedule.kind={kinds[1]} now spans {new.total_steps} steps"
        )
        if last > 0 and found > 0:
            peak = self.after.optim.lr * last / found
            line += f"; optim.lr={peak:.3g} would continue at {last:.3g}"
        if kinds == ["wsd", "wsd"] and old.peak == new.peak:
            return f"{line}; from a checkpoint of step {min(old.last_peak_step, new.last_peak_step)} or before, it would not jump"
        if kinds[1] in ("constant", "wsd"):
            return line
        return f"{line}; a run with schedule.kind=constant never jumps, and one with wsd only from within its decay"

    def samples_before(self, name: str, samples: int, of_text: Callable[[int], int]) -> int:
        """Return the number of samples that the text `name` had in the run that wrote the checkpoint, given the `samples`
        that it has now.

        A hub dataset is tokenized only as far as a run reads it, so it had only the samples for that run's steps and
        batch. Any other text had all samples. `of_text` returns, for a number of sequences that a run reads, how many
        come from this text.
        """
        texts = {**self.after.data.texts(), **self.before.data.texts()}
        data, train = texts[name], self.before.train
        if is_fixed(data):
            return samples
        return min(samples, of_text(train.total_steps * train.global_batch))


def batch_problem(before: Recipe, after: Recipe) -> str | None:
    """Return the reason why a run of `before` can't continue with the global batch of `after`; None if it can."""
    there, here = before.train, after.train
    if there.global_batch == here.global_batch:
        return None
    if here.steps is None and here.total_steps != there.total_steps:
        return f"give the length in steps (train.tokens=null train.steps={there.total_steps})"
    if after.data.packing == "none":
        return "with data.packing=none it must stay, because the order of documents depends on it"
    return None


def _is_close(rate: float, other: float) -> bool:
    return abs(rate - other) <= VISIBLE_JUMP * max(rate, other)


def is_fixed(data: DataSection) -> bool:
    """Return whether a text has the same tokens in a run of any length. A hub dataset is tokenized as far as a run reads it."""
    return not data.source.startswith(HUB) or data.max_tokens is not None


def length_key(recipe: Recipe) -> str:
    """Return the key that gives the recipe's length."""
    return "train.steps" if recipe.train.steps is not None else "train.tokens"


def _length(recipe: Recipe) -> str:
    train = recipe.train
    return str(train.steps) if train.steps is not None else f"{train.tokens} ({train.total_steps} steps)"
