"""Numbers that every rank measures between two log lines, gathered without a barrier and reduced to tags.

`Metrics.log` lists the numbers. The gather runs in the background and is read once it is complete, at the latest
before the next log line. A replica therefore waits at a log line only for a replica that is a whole log interval behind it; on
GPUs, an interval less one step, because a line is gathered one step after it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from llmtrain.errors import TrainingError
from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.world import ranks_per_device
from llmtrain.quantities import GIB
from llmtrain.running_moments import RunningMoments
from llmtrain.train.device_numbers import DeviceNumbers

SPIKE_DEVIATIONS = 6.0
"""Number of standard deviations above the running mean beyond which a logged loss counts as a spike (OLMo's
threshold)."""
SPIKE_AFTER_LINES = 10
"""Number of log lines before a loss can count as a spike."""
SKIPS_IN_A_ROW = 10
"""Number of consecutive skipped steps that ends the run."""


@dataclass
class OpenLine:
    """Log line of which a GPU may still compute this rank's numbers."""

    step: int
    seconds: float
    """Training time of the run so far."""
    common: dict[str, float]
    """Values known to every rank without a gather: learning rate, period, counters."""
    numbers: DeviceNumbers
    """This rank's numbers, without the three times of waiting."""
    more_step_seconds: float = 0.0
    """Time of the interval's steps after the line was opened."""

    def row(self, waiting: Mapping[str, float]) -> dict[str, float]:
        """Return this rank's numbers with the times of waiting, once the device has computed them."""
        row = {**self.numbers.read(), **waiting}
        return row | {"step_seconds": row["step_seconds"] + self.more_step_seconds}


@dataclass(frozen=True)
class GatheredMetrics:
    """Numbers of all ranks for one log line."""

    step: int
    seconds: float
    common: dict[str, float]
    """Values known to every rank without a gather: learning rate, period, counters."""
    columns: dict[str, torch.Tensor]
    """Each number's values by rank, float64."""

    @property
    def tokens(self) -> int:
        """Return the training tokens of all replicas so far."""
        return int(self.columns["tokens_total"].sum())

    @property
    def stop_requested(self) -> bool:
        return bool(self.columns["stop"].sum() > 0)

    @property
    def checkpoint_failed(self) -> bool:
        return bool(self.columns["unwritten"].sum() > 0)


class AsyncMetricGather:
    """Background gather of the ranks' numbers. All ranks call `submit` at the same steps."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._pending: tuple[OpenLine, list[str], PendingCollective] | None = None

    def submit(self, line: OpenLine, waiting: Mapping[str, float]) -> None:
        """Start gathering the numbers of one line, with this rank's times of `waiting`. The previous line must have been
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

    def wait_all(self, only_if_done: bool = False) -> GatheredMetrics | None:
        """Return the numbers of the line in flight and forget it; None if there is none. Waits for the slowest rank's numbers, or
        with `only_if_done` returns None instead of waiting."""
        if self._pending is None or (only_if_done and not self._pending[-1].is_done):
            return None
        line, names, pending = self._pending
        self._pending = None
        columns = dict(zip(names, pending.wait().unbind(dim=1), strict=True))
        return GatheredMetrics(line.step, line.seconds, line.common, columns)


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

    def tags(self, line: GatheredMetrics) -> dict[str, float]:
        """Return the tags of one line and count its loss spike, if any."""
        loss_sums, tokens = line.columns["loss_sum"], line.columns["predicted_tokens"]
        loss = float(loss_sums.sum() / tokens.sum())  # NaN, written as null, if no rank computed a gradient
        step_seconds, steps = line.columns["step_seconds"], line.columns["steps"]
        seconds = float(step_seconds.sum() if self._in_turns else step_seconds.max())
        rate = float(tokens.sum()) / seconds if seconds > 0 else math.nan
        tags = {
            "train/loss": loss,
            "train/ppl": math.exp(min(loss, 700.0)),
            "train/steps": float(line.columns["steps_total"].mean()),
            "train/gradient_steps": float(line.columns["gradients_total"].mean()),
            "train/grad_norm": float((line.columns["grad_norm_sum"] / line.columns["gradients"].clamp(min=1)).mean()),
            "perf/tokens_per_second": rate,
            "perf/step_seconds": float((step_seconds / steps).max()),
            "perf/data_seconds": float((line.columns["data_seconds"] / steps).max()),
            "perf/peak_memory_gib": float(line.columns["peak_memory"].max()) / GIB,
            "comm/bytes_total": float(line.columns["bytes_total"].sum()),
            "comm/other_bytes_total": float(line.columns["other_bytes_total"].sum()),
            "comm/seconds": float(line.columns["comm_seconds"].mean()),
            "comm/exposed_seconds": float(line.columns["exposed_seconds"].mean()),
            "comm/wait_seconds": float(line.columns["wait_seconds"].mean()),
            "sync/pseudo_grad_norm": math.sqrt(float(line.columns["mean_squared"].sum()) / self.mesh.replicas),
            "sync/divergence": math.sqrt(float(line.columns["spread_squared"].sum()) / self.mesh.replicas),
            "sync/late": float(line.columns["late_total"].sum()) / self.mesh.shard_comms.size,
            "health/skipped_steps": float(line.columns["skipped_total"].sum()) / self.mesh.shard_comms.size,
            "health/loss_spikes": float(self._count_spike(loss)),
            "health/nonfinite": float((~loss_sums.isfinite()).sum()),
            **line.common,
        }
        if reserved := float(line.columns["reserved_memory"].max()):
            tags["perf/reserved_memory_gib"] = reserved / GIB
        if virtual := float(line.columns["virtual_seconds"].max()):
            tags["perf/virtual_seconds"] = virtual
        if padding := float(line.columns["padding"].sum()):
            tags["data/padding"] = padding / (padding + float(tokens.sum()))
        if self.peak is not None:
            tags["perf/mfu"] = rate * self.flops_per_token / (self.peak * self._devices)
        return tags

    def check(self, line: GatheredMetrics) -> None:
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
                    "checkpoint, with a smaller optim.lr under another run.name if it comes back"
                )

        skipped = line.columns["skipped_in_a_row"]
        if skipped.max() >= SKIPS_IN_A_ROW:
            rank = int(skipped.argmax())
            raise TrainingError(
                f"replica {rank // self.mesh.shard_comms.size} skipped its last {skipped[rank]:.0f} steps up to step {line.step}: no "
                "gradient was finite (optim.nonfinite); start again to continue from the last checkpoint, with a smaller optim.lr under "
                "another run.name if it comes back"
            )
        fingerprints = line.columns["fingerprint"].reshape(self.mesh.replicas, self.mesh.shard_comms.size)
        usual = fingerprints.mode(dim=0).values
        others = (fingerprints != usual).any(dim=1).nonzero().flatten().tolist()
        if others:
            who = f"the anchor of replica {', '.join(map(str, others))} is not that of the others"
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
