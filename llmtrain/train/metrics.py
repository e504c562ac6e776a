"""Metrics of a run: measured and summed on each rank, and gathered without a barrier for the `RunLog`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from llmtrain.config import Recipe
from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import TRAFFIC_RULES
from llmtrain.parallel.engine import Engine, count_positions, count_tokens
from llmtrain.parallel.mesh import Mesh
from llmtrain.quantities import counted
from llmtrain.reshard import Rules, first, largest, mean
from llmtrain.sync.method import Method
from llmtrain.trace import span
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.devices import peak_memory_bytes, reserved_memory_bytes
from llmtrain.train.metric_gather import AsyncMetricGather, DeviceNumbers, IntervalMetrics, LogLine, MetricReducer
from llmtrain.train.run_log import RunLog
from llmtrain.train.signals import StopRequest
from llmtrain.train.state import Number, TrainState
from llmtrain.train.validation import Validation, ValidationSet
from llmtrain.turns import own_time

T = TypeVar("T")
METRICS_RULES: Rules = {
    "train_seconds": first,
    "gradient_wait_seconds": mean,
    "first_eval": first,
    "last_eval": first,
    "last_line": first,
    "traffic": TRAFFIC_RULES,
    "other_traffic": TRAFFIC_RULES,
    "virtual_seconds": largest,
}
"""Resharding rules for `Metrics.state_dict`."""

CLEAR_RISE, CLEAR_RISE_OF_WEIGHTS = 0.01, 0.1
"""Relative rise of the validation loss above which a run counts as diverging. A run that starts from trained weights
first raises their loss a little, because its learning rate is higher than at the end of their training."""


def rise_of_loss(first: float, last: float, is_continued: bool) -> str | None:
    """Return a warning if the `last` validation loss is above the one before the first step, else None. `is_continued` says
    whether the run began with trained weights."""
    if last <= first:
        return None
    line = f"validation loss {last:.4f} is not below the {first:.4f} before the first step"
    if last <= first * (1 + (CLEAR_RISE_OF_WEIGHTS if is_continued else CLEAR_RISE)):
        return f"{line}; if it stays higher, lower optim.lr"
    return f"{line}: the run is diverging, unless the learning rate is still warming up; lower optim.lr"  # also for NaN


class Metrics:
    """Metrics of one rank. All ranks call `log`, `wait` and `log_validation` at the same steps, and `poll` after each of their
    steps. No training step runs a collective of all ranks. A line's gather therefore has the same position in the order of
    collectives on every rank, whichever call starts it."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        engine: Engine,
        method: Method,
        checkpointer: Checkpointer,
        reducer: MetricReducer,
        run_log: RunLog,
        stop: StopRequest,
    ):
        self.recipe, self.mesh, self.engine, self.method = recipe, mesh, engine, method
        self.checkpointer, self.reducer, self.run_log, self.stop = checkpointer, reducer, run_log, stop
        self.interval = IntervalMetrics()
        self.train_seconds = 0.0
        """Training time so far in seconds: steps, outstanding device work and waits for other ranks."""
        self.tokens = 0
        """Training tokens of all replicas, as last counted over all ranks."""
        self.last_line: dict[str, float] = {}
        self._virtual_seconds = 0.0  # from the checkpoint; kept if the run continues without a virtual clock
        self.first_eval: Validation | None = None
        self.last_eval: Validation | None = None
        self._stop_agreed = False
        self._gather = AsyncMetricGather(mesh)
        self._open_line: LogLine | None = None
        """Line whose gather has not been started."""
        self._displayed: LogLine | None = None
        """Line that `poll` has logged and `wait` has not checked yet."""
        self._verified = 0  # synchronizations at the last comparison of anchors

    def open(self, state: TrainState) -> AbstractContextManager[None]:
        """Open the loggers and the progress bar for the enclosed training. A collective of all ranks."""
        rounds = self.method.period.round_number(state.total_steps)
        return self.run_log.open(state, self.tokens, rounds)

    @contextmanager
    def training_time(self) -> Iterator[None]:
        """Count the enclosed code as training time, which excludes validation, checkpoints and log lines. Replicas of
        one process take turns, so the run's training time is this replica's time multiplied by the number of
        replicas."""
        started = own_time()
        yield
        own, all_ranks = own_time() - started, self.mesh.all_ranks
        self.interval.step_seconds += own
        self.train_seconds += own * (all_ranks.size if all_ranks.shares_memory else 1)

    def time_data(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, and count its duration as time spent waiting for data."""
        started = time.monotonic()
        with span("data"):
            batch = read()
        self.interval.data_seconds += time.monotonic() - started
        return batch

    def accumulate(
        self,
        state: TrainState,
        micro_batches: Sequence[torch.Tensor],
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        skipped: Number,
    ) -> Number:
        """Count one gradient: its tokens on this rank, their summed `loss` and the replica's gradient norm. If the step
        was skipped (`skipped` is 1, otherwise 0), count its tokens only. Return the number of tokens that the optimizer
        step has used, 0 if it was skipped."""
        tokens = count_tokens(micro_batches)
        state.count_gradient(tokens, skipped)
        padding = count_positions(micro_batches) - tokens
        return self.interval.add_gradient(tokens, padding, loss, grad_norm, skipped)

    def count_step(self, state: TrainState) -> None:
        """Count a step and advance the progress bar."""
        self.interval.steps += 1
        self.run_log.console.advance(state.step, is_alone=state.step > state.global_step + 1)

    def log(self, state: TrainState, lr: float) -> None:
        """Finish the previous log line, then open the line of the interval that ends now. On a CPU, or if every step has a line,
        its numbers are gathered at once. Otherwise they are gathered after the next step, which keeps the GPU busy until then.
        `lr` is the learning rate to log."""
        self.wait()
        stats = self.method.stats
        common = {
            "train/lr": lr,
            "comm/replicas": self.mesh.replicas,
            "sync/count": stats.count,
            "sync/round": self._round_number(state),
            "sync/round_step": self._round_step(state),
            "sync/period": self.method.period.round_length(state.step),
            "sync/weights_max": stats.weights_max,
            "sync/anomalies": stats.anomalies,
            "sync/rollbacks": stats.rollbacks,
            "sync/longest_exclusion": stats.longest_exclusion,
            "sync/staleness": self.method.schedule.staleness,
            "perf/checkpoint_seconds": self.checkpointer.seconds,
            "health/slowest_replica": stats.slowest_replica,
        }
        numbers: dict[str, Number] = {  # of this rank, by the names under which `MetricReducer` reduces them
            **vars(self.interval),  # since the last line
            # Since the start of the run. `_submit` adds waiting times.
            "steps_total": state.step,
            "gradients_total": state.gradients,
            "tokens_total": state.predicted_tokens,
            "skipped_total": state.skipped,
            "late_total": stats.late,
            "bytes_total": self.mesh.replica_comms.traffic.bytes,
            "other_bytes_total": self.mesh.all_ranks.traffic.bytes,  # for validation, metrics and agreements
            "virtual_seconds": self.mesh.virtual_seconds,
            # As it is now.
            "skipped_in_a_row": state.skipped_in_a_row,
            "mean_squared": stats.mean_squared,
            "spread_squared": stats.spread_squared,
            "peak_memory": peak_memory_bytes(self.mesh.device),
            "reserved_memory": reserved_memory_bytes(self.mesh.device),
            "fingerprint": self._fingerprint(stats.count),
            "stop": self.stop.requested,
            "unwritten": self.checkpointer.failed or self.run_log.io_errors.found is not None,
        }
        self._open_line = LogLine(state.global_step, self.train_seconds, common, DeviceNumbers(numbers))
        for warning in self.method.take_warnings():
            self.run_log.warn(state.global_step, warning)
        self.interval = IntervalMetrics()
        if self.mesh.device.type == "cpu" or self.recipe.log.every == 1:
            self._submit()

    def wait(self) -> None:
        """Wait for the pending log line and act on it. All ranks do so at the same step and with the same numbers. No
        replica is therefore ever more than two log lines ahead of another.

        Raises TrainingError, on every rank, for a loss or gradient that is not finite, too many skipped steps,
        differing anchors or failed writes, and DataError for damaged data.
        """
        self._submit()
        with self.training_time(), self.method.stats.time_exposed(), self.method.stats.time_waiting():
            self._gather.wait()
        line = self._displayed or self._display(self._gather.collect())
        self._displayed = None
        if line is not None:
            try:
                self.reducer.check(line)
            except TrainingError as error:
                error.is_shared = True
                raise
            self._stop_agreed |= line.any("stop")
            if line.any("unwritten"):
                self.checkpointer.wait()  # raises, on all ranks, if the checkpoint failed
                self.run_log.io_errors.check()

    def wait_for_ranks(self, state: TrainState) -> None:
        """Wait for this rank's device, and then for the slowest rank, by counting tokens. Both waits are training time."""
        with self.training_time():
            if self.mesh.device.type == "cuda":
                torch.cuda.current_stream(self.mesh.device).synchronize()
            with self.method.stats.time_exposed(), self.method.stats.time_waiting():
                self.count_tokens(state)

    def poll(self) -> None:
        """Start gathering the line that the previous step opened. Then print and log the pending line if it is ready,
        without waiting. Called after each step. Decisions that all ranks must share are left to `wait`."""
        self._submit()
        if self.mesh.is_main and self._displayed is None:
            self._displayed = self._display(self._gather.collect(only_if_done=True))

    def log_validation(self, state: TrainState, found: Sequence[tuple[ValidationSet, Validation]]) -> None:
        """Log the results of a validation. Call `wait` first and, if the last line is older than this step, `wait_for_ranks`."""
        self.last_eval = found[0][1]
        self.first_eval = self.first_eval or self.last_eval
        state.last_evaluated = state.global_step
        tags = {text.name: text.tags(validation) for text, validation in found}
        self.run_log.log_validation(state.global_step, self.tokens, self.train_seconds, tags)
        is_continued = self.recipe.model.from_weights is not None
        if line := rise_of_loss(self.first_eval.loss, self.last_eval.loss, is_continued):
            self.run_log.warn(state.global_step, line)

    @property
    def stop_agreed(self) -> bool:
        """Return whether all ranks know that a stop was requested."""
        return self._stop_agreed or self.method.period.stop_agreed

    @property
    def has_unlogged_steps(self) -> bool:
        """Return whether this rank has trained since its last log line."""
        return self.interval.steps > 0

    def count_tokens(self, state: TrainState) -> None:
        """Count the training tokens of all replicas. A collective of all ranks."""
        mine = torch.tensor(float(state.predicted_tokens), dtype=torch.float64)
        self.tokens = int(self.mesh.all_ranks.all_reduce(mine, "counting tokens"))

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds for which training has waited for traffic between replicas: synchronizations and averaged
        gradients."""
        return self.method.stats.exposed_seconds + self.engine.gradient_wait.seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores, by their names in `METRICS_RULES`."""
        return {
            "train_seconds": self.train_seconds,
            "gradient_wait_seconds": self.engine.gradient_wait.seconds,
            "first_eval": asdict(self.first_eval),
            "last_eval": asdict(self.last_eval),
            "last_line": self.last_line,
            "traffic": self.mesh.replica_comms.traffic.state_dict(),
            "other_traffic": self.mesh.all_ranks.traffic.state_dict(),
            "virtual_seconds": max(self.mesh.virtual_seconds, self._virtual_seconds),
        }

    def load_state_dict(self, state: dict[str, Any], train: TrainState) -> None:
        """Restore the values of `state_dict`. Other entries of `state` are ignored. A collective of all ranks."""
        self.count_tokens(train)  # before traffic is restored, so that this message is not counted
        self.train_seconds, self.last_line = state["train_seconds"], state["last_line"]
        self.engine.gradient_wait.load(state["gradient_wait_seconds"])
        self.first_eval, self.last_eval = Validation(**state["first_eval"]), Validation(**state["last_eval"])
        self.mesh.replica_comms.traffic.load(**state["traffic"])
        self.mesh.all_ranks.traffic.load(**state["other_traffic"])
        self._virtual_seconds = state["virtual_seconds"]
        if self.mesh.clock is not None:
            self.mesh.clock.restore(self._virtual_seconds)

    def _submit(self) -> None:
        """Wait until the device has computed the numbers of the open line, if any, and start gathering them. If the
        device was still busy with the line's steps, count their time up to now."""
        line, self._open_line = self._open_line, None
        if line is None:
            return
        if not line.numbers.is_ready:
            with self.training_time():
                line.numbers.read()
            line.seconds, line.more_step_seconds = self.train_seconds, self.interval.step_seconds
            self.interval.step_seconds = 0.0
        waiting = {
            "comm_seconds": self.mesh.replica_comms.traffic.waiting.seconds,
            "exposed_seconds": self.exposed_seconds,
            "wait_seconds": self.method.stats.wait_seconds,
        }  # read now, because a GPU's times are known only once it is done
        self._gather.submit(line, waiting)

    def _round_number(self, state: TrainState) -> int:
        """Return the number of the current round, from 1; 0 in a synchronous phase."""
        number = self.method.period.round_number(state.step)
        # With timed rounds, a line is logged just before its round is counted, except at the end of the run.
        return self.method.stats.count + (not state.is_done) if number is None else number

    def _round_step(self, state: TrainState) -> int:
        """Return the number of local steps in the current round. With timed rounds, a line is logged just after an
        exchange, when no step follows yet, so return the number of steps before the exchange."""
        period = self.method.period
        return period.step_in_round(state.step) or period.round_length(state.step)

    def _fingerprint(self, count: int) -> Number:
        """Return the anchors' fingerprint if `sync.verify_every` asks for their comparison after `count` synchronizations, else
        0."""
        every = self.recipe.sync.verify_every
        if every is None or count // every == self._verified // every:
            return 0
        self._verified = count
        return self.method.fingerprint()

    def _display(self, line: LogLine | None) -> LogLine | None:
        """Log and print the tags of a line, if any, and warn of new loss spikes and skipped steps. Return the line."""
        if line is None:
            return None
        spikes, skipped = self.reducer.spikes, self.last_line.get("health/skipped_steps", 0)
        self.last_line, self.tokens = self.reducer.tags(line), line.tokens
        if self.reducer.spikes > spikes:
            self.run_log.warn(
                line.step, f"loss {self.last_line['train/loss']:.3f} is a spike, far above its running mean"
            )
        if self.last_line["health/skipped_steps"] > skipped:
            count = round(self.last_line["health/skipped_steps"])
            self.run_log.warn(
                line.step,
                f"{counted(count, 'step')} skipped so far: no finite gradient (optim.nonfinite)",
            )
        self.run_log.log_step(line.step, line.tokens, line.seconds, self.last_line)
        return line
