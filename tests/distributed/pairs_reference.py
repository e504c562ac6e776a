"""Reference run of a case in one process: plain transformers models in float64, the oracle's synchronization, and the inner
optimizers written out. It takes nothing of the engines or of `llmtrain.sync`, except the initial weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llmtrain.config import OptimSection
from llmtrain.lr import LRSchedule
from llmtrain.model import blocks_of, build, initialize, model_config
from tests.distributed.oracle import Oracle
from tests.distributed.oracle_late import DelayedOracle, OverlappedOracle, TimedDelayedOracle
from tests.distributed.oracle_timed import TimedOracle
from tests.distributed.real_engine import SEED, VOCABULARY, Case, Outcome, global_batch


@dataclass
class Reference:
    """Expected results of a run."""

    losses: list[float]
    """Mean over the replicas that computed a loss, of each step in which at least one did."""
    norms: list[list[float]]
    """Norms of the gradients before clipping: [replica][step]."""
    weights: dict[str, torch.Tensor]
    """Final weights by parameter."""
    moved: dict[str, float]
    """Norm of the difference between the final and the initial weights, by parameter."""
    rounds: int


@dataclass
class Replicas:
    """Gradients and inner optimizers of N models. The oracle asks for the direction of every inner step."""

    case: Case
    losses: dict[int, list[float]] = field(default_factory=dict)
    norms: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optim = OptimSection(**self.case.optim)
        initial = build(model_config(self.case.model, VOCABULARY), loss_chunk=99)
        blocks = blocks_of(initial)
        for block in blocks:
            initialize(initial, block, SEED, torch.device("cpu"), torch.float64)
        names = {id(parameter): name for name, parameter in initial.named_parameters()}
        of_blocks = [[p for module in block.modules for p in module.parameters()] for block in blocks]
        self.names = [list(dict.fromkeys(names[id(p)] for p in parameters)) for parameters in of_blocks]
        self.model = AutoModelForCausalLM.from_config(
            model_config(self.case.model, VOCABULARY), dtype=torch.float64, attn_implementation="eager"
        )
        self.model.load_state_dict(initial.causal_lm.state_dict())
        weights = {f"causal_lm.{name}": parameter for name, parameter in self.model.named_parameters()}
        self.parameters = [weights[name] for block in self.names for name in block]
        self.start = [_flat([weights[name].detach() for name in block]) for block in self.names]
        decay = [np.full(p.numel(), self.optim.weight_decay if p.ndim > 1 else 0.0) for p in self.parameters]
        self.decay, self.ends = np.concatenate(decay), np.cumsum([len(block) for block in self.start])[:-1]
        self.matrices = self._matrices() if self.optim.kind == "muon" else {}
        size = (self.case.replicas, len(self.decay))
        self.first, self.second, self.steps = np.zeros(size), np.zeros(size), [0] * self.case.replicas
        self.first_decay = np.full(len(self.decay), self.optim.betas[0])
        for start, shape in self.matrices.items():
            self.first_decay[start : start + shape.numel()] = self.optim.muon.momentum
        self.norms = [[] for _ in range(self.case.replicas)]
        self._directions: dict[int, list[np.ndarray]] = {}

    def run(self) -> Reference:
        """Run the case by the oracle of its schedule, and return the results."""
        sync, kinds = self.case.sync, {"delayed": DelayedOracle, "overlapped": OverlappedOracle}
        rates = LRSchedule(self.case.optim["lr"], self.case.steps, self.case.schedule)
        common = (sync, rates, self.start, self.case.replicas, self.direction, SEED)
        if sync.period.kind == "seconds":
            timed = TimedDelayedOracle if sync.schedule.kind == "delayed" else TimedOracle
            self.oracle: Oracle = timed(*common, seconds=lambda replica, step: 1.0)
        else:
            self.oracle = kinds.get(sync.schedule.kind, Oracle)(*common)
        self.oracle.averaged = [(self.first, self.second)]
        self.oracle.run()
        assert all((block == block[0]).all() for block in self.oracle.theta), "the oracle's replicas must end equal"
        weights = []
        for values in (self.start, [block[0] for block in self.oracle.theta]):
            self._load(values)
            weights.append({f"causal_lm.{name}": p.detach().clone() for name, p in self.model.named_parameters()})
        first, last = weights
        moved = {name: float((last[name] - first[name]).norm()) for name in first}
        losses = [float(np.mean(self.losses[step])) for step in sorted(self.losses)]
        return Reference(losses, self.norms, last, moved, self.oracle.count)

    def direction(self, step: int, replica: int, block: int, parameters: np.ndarray) -> np.ndarray:
        """Return what an inner step at learning rate 1 adds to a block. The oracle asks for block 0 before it changes anything."""
        if block == 0:
            self._directions[replica] = np.split(self._inner_step(step, replica), self.ends)
        return self._directions[replica][block]

    def _inner_step(self, step: int, replica: int) -> np.ndarray:
        theta = np.concatenate([block[replica] for block in self.oracle.theta])
        if step <= self.oracle.warmup:
            everybody = [self._gradient(step, each) for each in range(self.case.replicas)]
            gradient = np.mean([gradient for gradient, _ in everybody], axis=0)
            self.losses[step] = [loss for _, loss in everybody]
        else:
            gradient, loss = self._gradient(step, replica)
            self.losses.setdefault(step, []).append(loss)
        norm = float(np.linalg.norm(gradient))
        self.norms[replica].append(norm)
        if self.optim.clip_norm is not None:
            gradient = gradient * min(1.0, self.optim.clip_norm / (norm + 1e-6))
        if self.optim.kind == "sgd":
            return -(gradient + self.decay * theta)
        (beta, gamma), decay = self.optim.betas, self.first_decay
        self.steps[replica] += 1
        self.first[replica] = first = decay * self.first[replica] + (1 - decay) * gradient
        self.second[replica] = second = gamma * self.second[replica] + (1 - gamma) * gradient**2
        mean, square = first / (1 - beta ** self.steps[replica]), second / (1 - gamma ** self.steps[replica])
        direction = -(mean / (np.sqrt(square) + self.optim.eps) + self.decay * theta)
        if self.optim.kind == "muon":
            direction *= self.optim.muon.adamw_lr_ratio
        for start, shape in self.matrices.items():
            part = slice(start, start + shape.numel())
            update = self._orthogonal_step((decay * first + (1 - decay) * gradient)[part].reshape(shape))
            direction[part] = -(update + self.decay[part] * theta[part])
        return direction

    def _matrices(self) -> dict[int, torch.Size]:
        """Return the shapes of the layers' matrices, which Muon updates, by their offsets among all values."""
        shapes, start = {}, 0
        for name, parameter in zip((name for block in self.names for name in block), self.parameters, strict=True):
            if parameter.ndim == 2 and re.search(r"\.\d+\.", name):
                shapes[start] = parameter.shape
            start += parameter.numel()
        return shapes

    def _orthogonal_step(self, nesterov: np.ndarray) -> np.ndarray:
        """Return what Muon subtracts from a matrix at learning rate 1, without weight decay."""
        muon, (rows, columns) = self.optim.muon, nesterov.shape
        factor = {"match_rms_adamw": 0.2 * max(rows, columns) ** 0.5, "original": max(1, rows / columns) ** 0.5}
        return factor[muon.adjust_lr] * orthogonal_of(nesterov, muon.iterations).reshape(-1)

    def _gradient(self, step: int, replica: int) -> tuple[np.ndarray, float]:
        """Return the gradient of the mean loss on a replica's part of the batch, and that loss."""
        self._load([block[replica] for block in self.oracle.theta])
        batch = global_batch(self.case, step).chunk(self.case.replicas)[replica]
        logits = self.model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()
        return _flat([parameter.grad for parameter in self.parameters]), loss.item()

    @torch.no_grad()
    def _load(self, blocks: list[np.ndarray]) -> None:
        parts = torch.from_numpy(np.concatenate(blocks)).split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))


def orthogonal_of(matrix: np.ndarray, iterations: int) -> np.ndarray:
    """Apply Newton-Schulz iterations to the singular values themselves, because the iterations act on each of them separately."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def _flat(tensors: list[Any]) -> np.ndarray:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy().copy()


def reference(case: Case) -> Reference:
    """Return the expected results of the case, whatever its shards, engine, precision and wire."""
    return Replicas(case).run()


def assert_is_reference(ranks: list[Outcome], case: Case) -> None:
    """Compare a run in float64 with its reference. The tolerances are for Llama's normalization layers, which always compute in
    fp32."""
    expected = reference(case)
    np.testing.assert_allclose(ranks[0].losses, expected.losses, rtol=1e-8)
    for rank, outcome in enumerate(ranks):
        np.testing.assert_allclose(outcome.norms, expected.norms[rank // case.shard], rtol=1e-6)
    for weight, whole in expected.weights.items():
        rows = torch.cat([outcome.weights[weight] for outcome in ranks[: case.shard]])
        torch.testing.assert_close(rows, whole.detach(), rtol=1e-5, atol=1e-7)
