"""Numbers that every rank measures between two log lines, gathered without a barrier and reduced to tags.

`Metrics.log` names the numbers, and `MetricReducer.tags` defines their reductions and tags. The gather runs in the
background. Its result is read when it is complete, at the latest before the next log line. A replica therefore waits at
a log line only for a replica that is a whole log interval behind it. On GPUs, this is an interval less one step,
because a line is gathered one step after it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from llmtrain.errors import TrainingError
from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.world import ranks_per_device
from llmtrain.quantities import GIB
from llmtrain.running_moments import RunningMoments
from llmtrain.train.state import Number, host_numbers

SPIKE_DEVIATIONS = 6.0
"""Number of standard deviations above the running mean beyond which a logged loss counts as a spike (OLMo's
threshold)."""
SPIKE_AFTER_LINES = 10
"""Number of log lines before a loss can count as a spike."""
SKIPS_IN_A_ROW = 10
"""Number of consecutive skipped steps that ends the run."""


@dataclass
class IntervalMetrics:
    """This rank's sums since its last log line, under the names by which they are gathered. Sums of device results stay
    on the device until they are gathered, so that training does not wait for them."""

    loss_sum: Number = 0.0
    grad_norm_sum: Number = 0.0
    steps: int = 0
    gradients: Number = 0
    """Inner optimizer steps. Pulls, and steps skipped for a non-finite gradient, do not count."""
    predicted_tokens: Number = 0
    padding: Number = 0
    """Padded positions, beyond the ends of documents."""
    step_seconds: float = 0.0
    data_seconds: float = 0.0

    def add_gradient(
        self, tokens: int, padding: int, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: Number
    ) -> Number:
        """Add a gradient of `tokens` tokens, with their summed `loss`. If the step was skipped (`skipped` is 1,
        otherwise 0), add nothing. Return the number of tokens that the optimizer step has used."""
        if isinstance(skipped, torch.Tensor):
            loss, grad_norm = (torch.where(skipped.bool(), 0.0, number) for number in (loss, grad_norm))
        used = 1 - skipped
        self.loss_sum = self.loss_sum + loss
        self.grad_norm_sum = self.grad_norm_sum + grad_norm
        self.gradients = self.gradients + used
        self.predicted_tokens = self.predicted_tokens + used * tokens
        self.padding = self.padding + used * padding
        return used * tokens


class DeviceNumbers:
    """Snapshot of numbers on its way to the host. On a GPU, the host continues while the numbers are computed and copied."""

    def __init__(self, numbers: Mapping[str, Number]):
        """Start copying the scalars among `numbers` that are on a GPU."""
        on_gpu = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor) and value.is_cuda}
        self._known = host_numbers({name: value for name, value in numbers.items() if name not in on_gpu})
        self._names = list(on_gpu)
        self._event: torch.cuda.Event | None = None
        self._copied: torch.Tensor | None = None
        if on_gpu:
            values = torch.stack([value.double() for value in on_gpu.values()])
            self._copied = torch.empty_like(values, device="cpu", pin_memory=True)
            self._copied.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Return whether `read` would return without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> dict[str, float]:
        """Wait until the device has computed the numbers, and return them as plain numbers."""
        if self._event is None:
            return self._known
        self._event.synchronize()
        return {**self._known, **dict(zip(self._names, self._copied.tolist(), strict=True))}


@dataclass
class LogLine:
    """Log line: this rank's numbers, some of which a GPU may still be computing, then the `columns` of all ranks, and
    their reductions over ranks."""

    step: int
    seconds: float
    """Training time of the run so far."""
    common: dict[str, float]
    """Values by tag that every rank knows without a gather: learning rate, period, counters."""
    numbers: DeviceNumbers
    """This rank's numbers, without the three waiting times."""
    more_step_seconds: float = 0.0
    """Seconds for which the interval's steps continued after the line was opened."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """Each number's values by rank, float64. Empty until they are gathered."""

    def row(self, waiting: Mapping[str, float]) -> dict[str, float]:
        """Wait until the device has computed this rank's numbers, and return them with the waiting times."""
        row = {**self.numbers.read(), **waiting}
        return row | {"step_seconds": row["step_seconds"] + self.more_step_seconds}

    @property
    def tokens(self) -> int:
        """Return the training tokens of all replicas so far."""
        return int(self.total("tokens_total"))

    def total(self, name: str) -> float:
        return float(self.columns[name].sum())

    def mean(self, name: str) -> float:
        return float(self.columns[name].mean())

    def largest(self, name: str) -> float:
        return float(self.columns[name].max())

    def any(self, name: str) -> bool:
        return self.total(name) > 0

    def slowest_per_step(self, name: str) -> float:
        """Return the slowest rank's seconds per step."""
        return float((self.columns[name] / self.columns["steps"]).max())


class AsyncMetricGather:
    """Background gather of the ranks' numbers. All ranks call `submit` at the same steps."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._pending: tuple[LogLine, list[str], PendingCollective] | None = None

    def submit(self, line: LogLine, waiting: Mapping[str, float]) -> None:
        """Start gathering the numbers of one line, with this rank's `waiting` times. The previous line must have been
        collected."""
        assert self._pending is None
        row = line.row(waiting)
        names = sorted(row)  # the same order on every rank, whichever numbers a rank's GPU has computed
        values = torch.tensor([float(row[name]) for name in names], dtype=torch.float64)
        self._pending = line, names, self.mesh.all_ranks.start_all_gather(values, "gathering metrics")

    def wait(self) -> None:
        """Wait for the slowest rank's numbers, if a line is in flight."""
        if self._pending is not None:
            self._pending[-1].wait()

    def collect(self, only_if_done: bool = False) -> LogLine | None:
        """Return the line in flight, with all ranks' numbers, and forget it; None if no line is in flight. Waits for
        the slowest rank's numbers. With `only_if_done`, returns None instead of waiting."""
        if self._pending is None or (only_if_done and not self._pending[-1].is_done):
            return None
        line, names, pending = self._pending
        self._pending = None
        line.columns = dict(zip(names, pending.wait().unbind(dim=1), strict=True))
        return line


class MetricReducer:
    """Reducer of a line's numbers to the tags of docs/metrics.md."""

    def __init__(self, mesh: Mesh, flops_per_token: float, peak: float | None):
        """Reduce for this mesh. `peak` is a device's peak FLOP/s, or None if it is unknown and no MFU is reported."""
        self.mesh, self.flops_per_token, self.peak = mesh, flops_per_token, peak
        self._in_turns = mesh.all_ranks.shares_memory
        """True if the ranks take turns on one device."""
        sharing = ranks_per_device(mesh.world) if mesh.device.type == "cuda" else 1
        self._devices = 1 if self._in_turns else mesh.world.size / sharing
        self.spikes = 0
        self._losses = RunningMoments((1, 1), ema=0.05)

    def tags(self, line: LogLine) -> dict[str, float]:
        """Return the tags of one line and count its loss spike, if any."""
        columns, replicas, shards = line.columns, self.mesh.replicas, self.mesh.shard_comms.size
        tokens, step_seconds = columns["predicted_tokens"].sum(), columns["step_seconds"]
        # Both are NaN, written as null, if no rank computed a gradient.
        loss = float(columns["loss_sum"].sum() / tokens)
        norms = (columns["grad_norm_sum"] / columns["gradients"])[columns["gradients"] > 0]
        seconds = float(step_seconds.sum() if self._in_turns else step_seconds.max())
        rate = float(tokens) / seconds if seconds > 0 else math.nan
        tags = {
            "train/loss": loss,
            "train/ppl": math.exp(min(loss, 700.0)),
            "train/steps": line.mean("steps_total"),
            "train/gradient_steps": line.mean("gradients_total"),
            "train/grad_norm": float(norms.mean()),
            "perf/tokens_per_second": rate,
            "perf/step_seconds": line.slowest_per_step("step_seconds"),
            "perf/data_seconds": line.slowest_per_step("data_seconds"),
            "perf/peak_memory_gib": line.largest("peak_memory") / GIB,
            "comm/bytes_total": line.total("bytes_total"),
            "comm/other_bytes_total": line.total("other_bytes_total"),
            "comm/seconds": line.mean("comm_seconds"),
            "comm/exposed_seconds": line.mean("exposed_seconds"),
            "comm/wait_seconds": line.mean("wait_seconds"),
            "sync/pseudo_grad_norm": math.sqrt(line.total("mean_squared") / replicas),
            "sync/divergence": math.sqrt(line.total("spread_squared") / replicas),
            "sync/late": line.total("late_total") / shards,
            "health/skipped_steps": line.total("skipped_total") / shards,
            "health/loss_spikes": float(self._count_spike(loss)),
            "health/nonfinite": float((~columns["loss_sum"].isfinite()).sum()),
            **line.common,
        }
        if reserved := line.largest("reserved_memory"):
            tags["perf/reserved_memory_gib"] = reserved / GIB
        if virtual := line.largest("virtual_seconds"):
            tags["perf/virtual_seconds"] = virtual
        if padding := line.total("padding"):
            tags["data/padding"] = padding / (padding + float(tokens))
        if self.peak is not None:
            tags["perf/mfu"] = rate * self.flops_per_token / (self.peak * self._devices)
        return tags

    def check(self, line: LogLine) -> None:
        """Raise TrainingError, on every rank, if training is no longer meaningful: a loss or gradient
        norm is not finite, a replica has skipped its last `SKIPS_IN_A_ROW` steps, or anchors differ."""
        # Steps that `optim.nonfinite` skips are in neither of the two sums, so they do not end the run here.
        for what, column in (("loss", "loss_sum"), ("norm of the gradient", "grad_norm_sum")):
            values = line.columns[column]
            if not values.isfinite().all():
                rank = int((~values.isfinite()).nonzero()[0])
                raise TrainingError(
                    f"the {what} is {values[rank].item()} on rank {rank} (replica {rank // self.mesh.shard_comms.size}) at step "
                    f"{line.step} or in the {line.columns['steps'][rank]:.0f} steps before it; start again to continue from the last "
                    "checkpoint, and if it happens again, use a smaller optim.lr under another run.name"
                )

        skipped = line.columns["skipped_in_a_row"]
        if skipped.max() >= SKIPS_IN_A_ROW:
            rank = int(skipped.argmax())
            raise TrainingError(
                f"replica {rank // self.mesh.shard_comms.size} skipped its last {skipped[rank]:.0f} steps up to step {line.step}: no "
                "gradient was finite (optim.nonfinite); start again to continue from the last checkpoint, and if it happens again, "
                "use a smaller optim.lr under another run.name"
            )
        fingerprints = line.columns["fingerprint"].reshape(self.mesh.replicas, self.mesh.shard_comms.size)
        usual = fingerprints.mode(dim=0).values
        others = (fingerprints != usual).any(dim=1).nonzero().flatten().tolist()
        if others:
            who = f"the anchor of replica {', '.join(map(str, others))} differs from the others"
            if 2 * len(others) >= self.mesh.replicas:
                who = f"the anchors of the {self.mesh.replicas} replicas differ"
            raise TrainingError(
                f"{who}, found at step {line.step}: they no longer train the same model; look for faulty memory or network, and "
                "start again to continue from the last checkpoint"
            )

    def _count_spike(self, loss: float) -> int:
        if not math.isfinite(loss):
            return self.spikes
        value = torch.tensor([[loss]], dtype=torch.float64)
        is_spike = self._losses.count >= SPIKE_AFTER_LINES and self._losses.z_scores(value) > SPIKE_DEVIATIONS
        self.spikes += int(is_spike)
        self._losses.update(value, torch.tensor([[not is_spike]]))
        return self.spikes
