"""Hand-written training loops that synchronize replicas with the tools of torch and torchft.

All loops take the same steps (`PlainLoop`): backward of a batch's mean loss, clipping, an inner optimizer, a learning rate per
step. They differ in the wrappers of the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from hosts import Member

TORCHFT = "torchft"


@dataclass(frozen=True)
class Job:
    """Model, data and settings that the loops of one measurement share."""

    model: nn.Module
    """Forward: (input_ids, labels) -> summed loss."""
    batches: Callable[[], Sequence[torch.Tensor]]
    """This replica's tokens for the next step, [sequences, T + 1], as one batch."""
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    lr: Callable[[int], float]
    """Learning rate by step, counted from 1."""
    clip_norm: float | None
    every: int
    """Local steps per round."""
    member: Member | None = None
    """This process among the ranks, for loops that need more than the process group."""
    fragments: Sequence[nn.Module] = ()
    """Parts of the model, for loops that synchronize it in parts."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    delay: int = 0
    """Local steps between sending a fragment and applying its mean."""
    alpha: float = 0.0
    """Share of a replica's own parameters in those with which it continues after that."""


class PlainLoop:
    """Steps of one replica that never communicates."""

    def __init__(self, job: Job):
        self.job = job
        self.forward: nn.Module = job.model
        self.parameters = list(job.model.parameters())
        self.inner = job.optimizer(self.parameters)
        self.optimizer: torch.optim.Optimizer = self.inner
        """Optimizer whose `step` is called."""

    def step(self, number: int) -> None:
        """Take step `number`, from 1."""
        [batch] = self.job.batches()
        inputs, labels = batch[:, :-1], batch[:, 1:]
        for group in self.inner.param_groups:
            group["lr"] = self.job.lr(number)
        (self.forward(inputs, labels) / labels.numel()).backward()
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Stop background work."""


class DdpLoop(PlainLoop):
    """DistributedDataParallel: gradients are averaged in every step, while backward computes further ones."""

    bucket_mb: float | None = None
    """Size of the messages in MB; None: 25, DistributedDataParallel's default."""

    def __init__(self, job: Job):
        super().__init__(job)
        # The only buffers are the constant frequencies of rotary positions. By default, each forward would wait for rank 0's.
        self.forward = nn.parallel.DistributedDataParallel(
            job.model, broadcast_buffers=False, bucket_cap_mb=self.bucket_mb
        )


class SmallBucketsLoop(DdpLoop):
    """DistributedDataParallel with buckets of 1 MB instead of 25, which is more than the model has."""

    bucket_mb = 1.0


class PostLocalSgdLoop(DdpLoop):
    """DDP's post-local SGD hook with a PeriodicModelAverager: parameters are averaged after the first step, and
    every `every` steps from then on. Each host has one replica, so gradients are never averaged."""

    def __init__(self, job: Job):
        super().__init__(job)
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        alone, _ = dist.new_subgroups(group_size=1)
        self.forward.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=0), post_localSGD_hook)
        averager = PeriodicModelAverager(period=job.every, warmup_steps=0)
        self.optimizer = PostLocalSGDOptimizer(self.inner, averager)


class TorchftDilocoLoop(PlainLoop):
    """torchft's DiLoCo or, with several fragments, its Streaming DiLoCo. Each replica has a Manager, and the process of the
    first replica has the lighthouse. If the job has no fragments, the complete model is one."""

    def __init__(self, job: Job):
        super().__init__(job)
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        member, timeout = job.member, timedelta(seconds=120)
        assert member is not None, "torchft needs to know where the other replicas are"
        self._lighthouse = None
        if member.rank == 0:
            self._lighthouse = LighthouseServer(bind="[::]:0", min_replicas=member.size)
            port = self._lighthouse.address().rpartition(":")[2]
            member.store.set("lighthouse", f"http://{member.address}:{port}")
        own_store = dist.TCPStore(member.address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=member.size,
            use_async_quorum=False,  # DiLoCo insists
            timeout=timeout,
            quorum_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=member.address,
            store_port=own_store.port,
            lighthouse_addr=member.store.get("lighthouse").decode(),
            replica_id=f"peer_{member.rank}",
            hostname=member.address,
            init_sync=False,  # all replicas start from the same weights
        )
        self._own_store = own_store
        fragments = list(job.fragments) or [job.model]
        outer = [
            torch.optim.SGD(fragment.parameters(), lr=job.outer_lr, momentum=job.outer_momentum, nesterov=True)
            for fragment in fragments
        ]
        self._rounds = DiLoCo(
            self.manager,
            fragments,
            self.inner,
            outer,
            sync_every=job.every,
            fragment_sync_delay=job.delay,
            fragment_update_alpha=job.alpha,
        )
        self._synchronizations_per_round = len(fragments)
        self._rounds.__enter__()

    def step(self, number: int) -> None:
        super().step(number)
        if number % self.job.every == 0:
            # torchft raises no error for a failed synchronization: it skips it, and tries again in the next round.
            expected = number // self.job.every * self._synchronizations_per_round
            if self.manager.current_step() != expected:
                raise RuntimeError(
                    f"torchft has committed {self.manager.current_step()} synchronizations after step {number} instead of {expected}"
                )

    def close(self) -> None:
        self._rounds.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def _state(self) -> dict[str, object]:
        return {"model": self.job.model.state_dict(), "inner": self.inner.state_dict()}

    def _load(self, state: dict[str, dict]) -> None:
        self.job.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])


def torchft_diloco(job: Job) -> PlainLoop:
    """Return a loop with torchft's DiLoCo, which synchronizes the complete model at once and waits for the result."""
    return TorchftDilocoLoop(replace(job, fragments=(), delay=0, alpha=0.0))


LOOPS: dict[str, Callable[[Job], PlainLoop]] = {
    "alone": PlainLoop,
    "ddp": DdpLoop,
    "ddp_small": SmallBucketsLoop,
    "post_local_sgd": PostLocalSgdLoop,
    "torchft_diloco": torchft_diloco,
    "torchft_streaming": TorchftDilocoLoop,
}
OF_TORCHFT = {"torchft_diloco", "torchft_streaming"}


def torchft_release() -> str:
    """Return torchft's installed release, or an empty string."""
    try:
        return version(TORCHFT)
    except PackageNotFoundError:
        return ""
