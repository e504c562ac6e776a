"""The training loop. Start with `Trainer.fit`, then `Trainer.train_step`.

The engine runs one replica; the method decides how replicas agree. The loop knows both by their interfaces only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmtrain.config import Recipe
from llmtrain.data.prefetch import PrefetchLoader
from llmtrain.lr import LRSchedule
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.sync.method import Method
from llmtrain.trace import span, step_span
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.console import Console
from llmtrain.train.devices import peak_memory_bytes
from llmtrain.train.io_errors import IoErrors
from llmtrain.train.metrics import AsyncMetricGather, GatheredMetrics, MetricReducer, MetricsWriter, RankMetrics
from llmtrain.train.mirror import Mirror
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.signals import StopRequest
from llmtrain.train.validation import Validation, ValidationSet, mean_of_replicas, validate


@dataclass
class IntervalMetrics:
    """This rank's sums since its last log line. Losses and norms stay on the device until the line is made."""

    loss: torch.Tensor | float = 0.0
    grad_norm: torch.Tensor | float = 0.0
    steps: int = 0
    gradients: int = 0
    """Steps that computed a gradient."""
    predicted_tokens: int = 0
    step_seconds: float = 0.0
    data_seconds: float = 0.0


class Trainer:
    """One run on one rank. Every rank calls `fit` and issues the same collectives in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        engine: Engine,
        method: Method,
        loader: PrefetchLoader,
        validation_sets: Sequence[ValidationSet],
        checkpoints: Checkpointer,
        summarizer: MetricReducer,
        console: Console,
        directory: RunDirectory,
        resume_from: Path | None,
        stop: StopRequest,
        suites: BackgroundEval,
        mirror: Mirror,
        disks: IoErrors,
    ):
        self.recipe, self.mesh, self.engine, self.method = recipe, mesh, engine, method
        self.loader, self.checkpoints, self.directory, self.resume_from = loader, checkpoints, directory, resume_from
        self.summarizer, self.console, self.stop, self.suites = summarizer, console, stop, suites
        self.mirror, self.disks = mirror, disks
        self.collector = AsyncMetricGather(mesh)
        self.validation_sets = validation_sets
        """The run's own validation text first, then those of `eval.sets`."""
        self.rates = LRSchedule.of(recipe)
        self.total_steps = recipe.train.total_steps
        self.step = 0
        """Steps of this replica."""
        self.global_step = self.previous_global_step = 0
        """Steps of the run that all ranks agree on, now and at the previous agreement. Equal to `step` in rounds of steps."""
        self.gradients = 0
        """Steps of this replica that computed a gradient."""
        self.predicted_tokens = 0
        """Tokens that this rank has trained on."""
        self.skipped = self.skipped_in_a_row = 0
        """Steps of this replica skipped because the gradient was not finite (`optim.nonfinite`)."""
        self.tokens = 0
        """Training tokens of all replicas at the last count over all ranks."""
        self.train_seconds = 0.0
        self.interval = IntervalMetrics()
        self.displayed: GatheredMetrics | None = None
        self.last_line: dict[str, float] = {}
        self.first_eval: Validation | None = None
        self.last_eval: Validation | None = None
        self.last_saved = self.last_evaluated = -1
        self.verified = 0
        """Number of synchronizations at the last comparison of anchors."""
        self.agreed_to_stop = False

    def fit(self) -> str:
        """Train to the end and return "done", or until a stop is requested and return "signal". Both end with a checkpoint."""
        self._resume()
        board = self.directory.tensorboard if self.recipe.log.tensorboard else None
        metrics = self.directory.metrics
        self.writer = self.disks.write(
            metrics, lambda: MetricsWriter(metrics, board, self.step, enabled=self.mesh.is_main)
        )
        self.disks.check()
        self.mirror.upload_if_newer(self.resume_from)
        self.console.start(self.global_step, self.total_steps)
        if self.global_step == 0:
            self._evaluate()
        while self.global_step < self.total_steps and not self.agreed_to_stop:
            self.train_step()
            self._poll()
            if not self._advance() or self.global_step >= self.total_steps:
                continue
            if self._due(self.recipe.log.every) or self.previous_global_step == 0:
                self._log()
            if self._due(self.recipe.eval.every):
                self._evaluate()
            if self._due(self.recipe.checkpoint.every):
                self._save()
        if self.global_step >= self.total_steps:
            if self.interval.steps > 0:  # or it continued from its end
                with self._training():
                    self.method.finish()
                self._log()
            self._evaluate()
        self._save()
        self._finish_checkpoint()
        self.method.close()
        self.disks.write(metrics, self.writer.close)
        self.disks.check()
        self.console.stop()
        return "done" if self.global_step >= self.total_steps else "signal"

    def train_step(self) -> None:
        """Do one step of this replica: data, gradient, inner update, and the synchronization that is due."""
        self.step += 1
        with self._training(), step_span(self.step):
            plan = self.method.begin_step(self.step, self.rates.at(min(self.step, self.total_steps)))
            micro_batches = self._next_batch() if plan.takes_batch else []
            if plan.computes_gradient:
                with span("gradient"):
                    loss = self.engine.forward_backward(micro_batches)
                    norm = self.engine.step(plan.lr)
                self._count_gradient(micro_batches, loss, norm)
            self.method.end_step(self.step)
        self.interval.steps += 1
        self.console.advance(self.global_step)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Count the enclosed code as training time: steps, outstanding device work and waits for other ranks. Validation,
        checkpointing and logging are excluded."""
        started = time.monotonic()
        yield
        self.interval.step_seconds += time.monotonic() - started
        self.train_seconds += time.monotonic() - started

    def _next_batch(self) -> list[torch.Tensor]:
        started = time.monotonic()
        with span("data"):
            micro_batches = self.loader.next()
        self.interval.data_seconds += time.monotonic() - started
        return micro_batches

    def _count_gradient(self, micro_batches: list[torch.Tensor], loss: torch.Tensor, norm: torch.Tensor) -> None:
        tokens = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in micro_batches)
        self.predicted_tokens += tokens
        if self.engine.skipped:
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.recipe.optim.nonfinite == "rollback":
                self.method.roll_back()
            return
        self.skipped_in_a_row = 0
        self.interval.loss += loss
        self.interval.grad_norm += norm
        self.interval.gradients += 1
        self.interval.predicted_tokens += tokens
        self.gradients += 1

    def _advance(self) -> bool:
        """Return whether all ranks agree on the run's global step now. Only then may they issue other collectives."""
        position = self.method.agreed_step(self.step)
        if position is None:
            return False
        self.previous_global_step, self.global_step = self.global_step, position
        return True

    def _log(self) -> None:
        """Finish the previous log line, then start gathering this interval's metrics."""
        self._wait()
        report, period = self.method.report(), self.method.period.round_length(self.step)
        gradients = max(1, self.interval.gradients)
        with self._training():
            loss, grad_norm = float(self.interval.loss), float(self.interval.grad_norm)  # waits for the device
        common = {
            "train/lr": self.rates.at(min(self.step, self.total_steps)),
            "sync/count": report.count,
            "sync/period": period,
            "sync/weights_max": report.weights_max,
            "sync/anomalies": report.anomalies,
            "sync/rollbacks": report.rollbacks,
            "sync/staleness": self.method.schedule.staleness,
            "perf/checkpoint_seconds": self.checkpoints.seconds,
            "health/slowest_replica": report.slowest_replica,
        }
        row = RankMetrics(
            steps=self.interval.steps,
            loss_sum=loss,
            predicted_tokens=self.interval.predicted_tokens,
            tokens_total=self.predicted_tokens,
            steps_total=self.step,
            gradients_total=self.gradients,
            late_total=report.late,
            skipped_total=self.skipped,
            skipped_in_a_row=self.skipped_in_a_row,
            grad_norm=grad_norm / gradients,
            step_seconds=self.interval.step_seconds,
            data_seconds=self.interval.data_seconds,
            peak_memory=peak_memory_bytes(self.mesh.device),
            bytes_total=self.mesh.replica.traffic.bytes,
            other_bytes_total=self.mesh.all_ranks.traffic.bytes,
            comm_seconds=self.mesh.replica.traffic.seconds,
            exposed_seconds=self.exposed_seconds,
            wait_seconds=report.wait_seconds,
            mean_squared=float(report.mean_squared),
            spread_squared=float(report.spread_squared),
            stop=self.stop.requested,
            unwritten=self.checkpoints.failed or self.disks.pending,
            fingerprint=self._fingerprint(report.count),
        )
        self.collector.submit(self.global_step, self.train_seconds, common, row)
        self.interval = IntervalMetrics()

    def _fingerprint(self, count: int) -> int:
        """Return the anchors' fingerprint if their comparison is due after `count` synchronizations, else 0."""
        every = self.recipe.sync.verify_every
        if every is None or count // every == self.verified // every:
            return 0
        self.verified = count
        return self.method.fingerprint()

    def _wait(self) -> None:
        """Wait for the pending log line and act on it. All ranks do so at the same step, on the same numbers, so no replica is
        ever more than two lines ahead of another."""
        with self._training(), self.method.report().time_exposed(), self.method.report().time_waiting():
            self.collector.wait()
        line, self.displayed = self.displayed or self._publish(self.collector.wait_all()), None
        if line is not None:
            self.summarizer.check(line)
            self.agreed_to_stop |= line.stop_requested
            if line.checkpoint_failed:
                self.checkpoints.wait()  # raises, on all ranks, if it was that
                self.disks.check()

    def _poll(self) -> None:
        """Display the pending log line or checkpoint as soon as it is ready. Decisions are made in `_wait`."""
        self._show_checkpoint()
        if self.mesh.is_main and self.displayed is None:
            self.displayed = self._publish(self.collector.wait_all(only_if_done=True))

    def _publish(self, line: GatheredMetrics | None) -> GatheredMetrics | None:
        if line is not None:
            self.last_line, self.tokens = self.summarizer.tags(line), line.tokens
            self._write(line.step, line.tokens, line.seconds, self.last_line)
            self.console.log_step(line.step, line.tokens, self.last_line)
        return line

    def _write(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        self.disks.write(self.directory.metrics, lambda: self.writer.write(step, tokens, seconds, tags))

    def _evaluate(self) -> None:
        """Validate the replicas' mean and log its loss. Each replica's own parameters are left as they were."""
        if self.global_step == self.last_evaluated:
            return
        self._wait()  # validating brings all ranks together anyway
        self._count_tokens()
        equal = self.method.is_synchronized or self.mesh.replicas == 1
        with nullcontext() if equal else mean_of_replicas(self.engine, self.mesh):
            found = [validate(self.engine, self.mesh, each.batches) for each in self.validation_sets]
        self.last_eval = found[0]
        self.first_eval, self.last_evaluated = self.first_eval or self.last_eval, self.global_step
        tags = {}
        for each, validation in zip(self.validation_sets, found, strict=True):
            tags |= each.tags(validation)
            self.console.log_validation(self.global_step, each.name, each.tags(validation))
        self._write(self.global_step, self.tokens, self.train_seconds, tags)

    def _count_tokens(self) -> None:
        mine = torch.tensor(float(self.predicted_tokens), dtype=torch.float64)
        self.tokens = int(self.mesh.all_ranks.all_reduce(mine, "counting tokens").wait())

    def _save(self) -> None:
        if self.global_step == self.last_saved:
            return
        self._wait()  # never keep a state that a bad number is known to have reached
        self._finish_checkpoint()
        self.disks.check()  # nor one whose metrics have a hole
        progress = {
            "step": self.step,
            "gradients": self.gradients,
            "skipped": self.skipped,
            "predicted_tokens": self.predicted_tokens,
            "loader": self.loader.state_dict(),
            "interval": {
                **vars(self.interval),
                "loss": float(self.interval.loss),
                "grad_norm": float(self.interval.grad_norm),
            },
            "train_seconds": self.train_seconds,
            "gradient_wait_seconds": self.engine.gradient_wait_seconds,
            "first_eval": vars(self.first_eval),
            "last_eval": vars(self.last_eval),
            "last_evaluated": self.last_evaluated,
            "last_line": self.last_line,
            "traffic": vars(self.mesh.replica.traffic),
            "other_traffic": vars(self.mesh.all_ranks.traffic),
        }
        self.checkpoints.save(self.global_step, progress)
        self.last_saved = self.global_step

    def _finish_checkpoint(self) -> None:
        """Wait until the last checkpoint is written. A run writes one at a time."""
        self.checkpoints.wait()
        self._show_checkpoint()

    def _show_checkpoint(self) -> None:
        if (written := self.checkpoints.written()) is not None:
            self.console.print(f"checkpoint {written.final} (written in {written.seconds:.1f} s)")
            self.suites.after_checkpoint(self.last_saved)
            self.mirror.upload_async(self.last_saved)

    def _resume(self) -> None:
        if self.resume_from is None:
            return
        loaded = self.checkpoints.load(self.resume_from, self.recipe.train.global_batch, self.recipe.run.seed)
        self.global_step, progress = loaded.step, loaded.progress
        self.previous_global_step = self.global_step
        self.step, self.gradients, self.skipped = progress["step"], progress["gradients"], progress["skipped"]
        self.predicted_tokens = progress["predicted_tokens"]
        self._count_tokens()
        self.loader.load_state_dict(progress["loader"])
        self.interval = IntervalMetrics(**progress["interval"])
        self.train_seconds = progress["train_seconds"]
        self.engine.gradient_wait_seconds = progress["gradient_wait_seconds"]
        self.first_eval = Validation(**progress["first_eval"])
        self.last_eval = Validation(**progress["last_eval"])
        self.last_evaluated, self.last_line = progress["last_evaluated"], progress["last_line"]
        vars(self.mesh.replica.traffic).update(progress["traffic"])
        vars(self.mesh.all_ranks.traffic).update(progress["other_traffic"])
        self.last_saved = self.global_step
        self.console.print(f"continuing from {self.resume_from}{loaded.how}")

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds that training stood still for traffic between replicas: synchronizations and averaged gradients."""
        return self.method.report().exposed_seconds + self.engine.gradient_wait_seconds

    def summary(self, stopped: str) -> dict[str, Any]:
        """Return the content of summary.json. Sums over ranks are those of the last log line."""
        report = self.method.report()
        return {
            "method": self.recipe.sync.method,
            "replicas": self.mesh.replicas,
            "shards": self.mesh.shard.size,
            "steps": self.global_step,
            "gradient_steps": self.last_line.get("train/gradient_steps"),
            "tokens": self.tokens,
            "train_seconds": round(self.train_seconds, 3),
            "tokens_per_second": round(self.tokens / self.train_seconds, 1) if self.train_seconds else None,
            "final_train_loss": self.last_line.get("train/loss"),
            "final_eval_loss": self.last_eval.loss if self.last_eval else None,
            "bytes_sent": round(self.last_line.get("comm/bytes_total", 0)),
            "other_bytes_sent": round(self.last_line.get("comm/other_bytes_total", 0)),
            "sync_count": report.count,
            "sync_seconds": round(report.seconds, 3),
            "exposed_sync_seconds": round(self.exposed_seconds, 3),
            "peak_memory_bytes": round(self.last_line.get("perf/peak_memory_gib", 0) * 2**30),
            "mirrored": self.mirror.newest,
            "stopped": stopped,
        }

    def _due(self, every: int | None) -> bool:
        """Return whether the last agreement reached or passed a multiple of `every`; False for None."""
        return every is not None and self.global_step // every > self.previous_global_step // every
