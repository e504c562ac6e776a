"""The training loop. Read `Trainer.fit` first, then `Trainer.train_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmtrain.config import Recipe
from llmtrain.data.loader import PrefetchLoader
from llmtrain.lr import LRSchedule
from llmtrain.parallel.engine import Engine
from llmtrain.reshard import Rules, rules_of
from llmtrain.sync.method import Method
from llmtrain.trace import span, step_span
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.metrics import METRICS_RULES, Metrics
from llmtrain.train.run_texts import RunTexts
from llmtrain.train.state import Number, TrainState
from llmtrain.train.validation import Validator


class Trainer:
    """One run on one rank. The engine runs this rank's replica, and the method synchronizes replicas. All ranks make the same
    calls."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        method: Method,
        loader: PrefetchLoader,
        metrics: Metrics,
        validator: Validator,
        checkpointer: Checkpointer,
        texts: RunTexts,
    ):
        self.recipe, self.engine, self.method, self.loader = recipe, engine, method, loader
        self.metrics, self.validator, self.checkpointer, self.texts = metrics, validator, checkpointer, texts
        self.lr, self.state = LRSchedule.of(recipe), TrainState(recipe.train.total_steps)
        self.known_texts: Mapping[str, Any] = {}
        """Identities of texts that the loaded checkpoint has stored, including texts that no rank reads now but a later start may."""
        self.after_step: list[Callable[[int], None]] = []
        """Functions called after each step, with the number of this replica's step."""

    def fit(self) -> str:
        """Train to the end or to a requested stop, save a checkpoint, and return "done" or "signal". To continue a run, call
        `load` first."""
        state, recipe = self.state, self.recipe
        with self.metrics.open(state):  # metrics.jsonl, TensorBoard, progress bar
            if state.global_step == 0:
                self.validate()
            while not state.is_done and not self.metrics.stop_agreed:
                self.train_step()
                self.metrics.poll()
                self.checkpointer.poll()
                agreed = self.method.agreed_step(state.step)
                if not state.advance(agreed):
                    continue  # in timed rounds, ranks agree on a global step only when they exchange step counts
                if state.is_done:
                    break  # `finish` synchronizes the last round before it logs and validates
                with self.method.period.paused():  # timed rounds count training alone
                    if state.is_due(recipe.log.every) or state.is_first_step:
                        self.metrics.log(state, self.lr.at(state.step))
                    if state.is_due(recipe.eval.every):
                        self.validate()
                    if state.is_due(recipe.checkpoint.every):
                        self.save()
            if state.is_done:
                self.finish()
            # A resumed run continues a timed round, which must not include the time of writing.
            with self.method.period.paused():
                self.save()
            self._wait_for_checkpoint()
            self.method.end_threads()
        return "done" if state.is_done else "signal"

    def train_step(self) -> None:
        """Run one step of this replica: data, gradient, inner update and, if due, synchronization."""
        state, metrics = self.state, self.metrics
        state.step += 1
        with metrics.training_time(), step_span(state.step):
            plan = self.method.begin_step(state.step, self.lr.at(state.step))
            micro_batches = metrics.time_data(self.loader.next) if plan.takes_batch else []
            tokens: Number = 0
            if plan.computes_gradient:
                with span("gradient"):
                    loss = self.engine.forward_backward(micro_batches, self._tokens_per_gradient())
                    grad_norm = self.engine.step(plan.lr)
                if self.recipe.optim.nonfinite == "rollback" and self.engine.skipped:
                    self.method.roll_back()
                tokens = metrics.accumulate(state, micro_batches, loss, grad_norm, skipped=self.engine.skipped)
            self.method.end_step(state.step, tokens)
        metrics.count_step(state)
        for call in self.after_step:
            call(state.step)

    def _tokens_per_gradient(self) -> float:
        """Return the number of tokens by which the replica's summed loss is divided. If gradients are averaged, this is
        the mean number per replica, so that every token counts alike. Otherwise it is the number in this replica's part
        of the batch."""
        tokens = self.loader.mean_replica_tokens
        return tokens if self.engine.average_gradients else tokens * self.loader.relative_part

    def validate(self) -> None:
        """Validate the replicas' mean, or the anchor if the method validates the anchor. Log the loss and a text that the model
        generates; the validation before the first step generates no text. Each replica's own parameters stay as they were."""
        if self.state.global_step != self.state.last_evaluated:
            self._wait_in_training_time()
            with_sample = self.state.global_step > 0
            blocks = self.method.validated_blocks()
            found, text = self.validator.run(self.method.is_synchronized, with_sample, blocks)
            self.metrics.log_validation(self.state, found)
            if text is not None:
                self.metrics.run_log.log_sample(self.state, self.metrics.tokens, text)

    def finish(self) -> None:
        """Synchronize the last round, which may be shorter than the others. Then log and validate. Afterwards all
        replicas are equal."""
        if self.metrics.has_unlogged_steps:  # else the run was resumed at its end
            with self.metrics.training_time():
                self.method.finish()
            self.metrics.log(self.state, self.lr.at(self.state.step))
        self.validate()

    def save(self) -> None:
        """Start a checkpoint of the global step, unless that step is saved already. If the step has no log line, log
        first. `metrics.wait` then checks all steps, so that a run in a bad state ends before the state is saved. The
        checkpoint also need not store a partial interval."""
        if self.state.global_step != self.state.last_saved:
            if self.metrics.has_unlogged_steps:
                self.metrics.log(self.state, self.lr.at(self.state.step))
            self._wait_in_training_time()
            self._wait_for_checkpoint()
            self.checkpointer.save(self.state.global_step, self.state_dict)
            self.state.last_saved = self.state.global_step

    def _wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete, because a run writes one at a time. Raises TrainingError, on every rank,
        if the checkpoint or the metrics could not be written, and DataError for damaged data. A collective of all ranks."""
        self.checkpointer.wait()
        self.metrics.run_log.io_errors.check()

    def _wait_in_training_time(self) -> None:
        """Wait for the pending log line, for all ranks to reach this step, and for messages in flight, and count the
        wait as training time. Otherwise the wait would fall into a validation or checkpoint, whose time does not
        count."""
        self.metrics.wait()
        if self.metrics.has_unlogged_steps:  # else the line was this step's, and all ranks have reached it
            self.metrics.wait_for_ranks(self.state)
        with self.metrics.training_time():
            self.method.wait_for_messages()

    def load(self, path: Path) -> None:
        """Continue from the checkpoint in `path`, whatever mesh wrote it. A collective of all ranks."""
        loaded = self.checkpointer.load(path, self.reshard_rules(), self.recipe.run.seed)
        progress, length, console = loaded.progress, loaded.length, self.metrics.run_log.console
        self.known_texts = progress["texts"]
        self.texts.check_continued(self.known_texts)
        self.state.load_state_dict(progress, loaded.step)
        self.metrics.load_state_dict(progress, self.state)
        loader_state = progress["loader"]
        if length is not None:  # the number of steps or the global batch has changed
            loader_state = self.loader.state_for_length(loader_state, length.samples_before)
            self.method.keep_warmup(loaded.step)
            if length.steps_differ:
                self.method.total_steps_changed()
        self.loader.load_state_dict(loader_state)
        console.print(f"continuing from {path}{length.describe() if length else ''}{loaded.how}")
        for warning in length.warnings() if length is not None else ():
            console.print(f"warning: {warning}")

    def state_dict(self) -> dict[str, object]:
        """Return this rank's plain values for a checkpoint."""
        texts = {**self.known_texts, **self.texts.state_dict()}
        own = {"loader": self.loader.state_dict(), "texts": texts}
        return {**self.state.state_dict(), **self.metrics.state_dict(), **own}

    def reshard_rules(self) -> Rules:
        """Return the rules by which `state_dict` is resharded."""
        own = {"loader": self.loader.reshard_rule(), "texts": self.texts.reshard_rule()}
        return {**rules_of(TrainState), **METRICS_RULES, **own}
