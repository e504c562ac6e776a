"""Test of the engine against a plain loop: torch's AdamW, a schedule of its learning rate, and gradient clipping."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from llmtrain.config import LRScheduleSection
from tests.distributed.pairs_reference import Replicas
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import Case, global_batch, train

CASE = Case(
    replicas=1,
    shard=2,
    parallel={"precision": "fp64"},
    optim={"lr": 3e-2, "clip_norm": 0.6},
    schedule=LRScheduleSection(kind="cosine", warmup_steps=2),
)


def plain_loop(case: Case) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train in a plain loop, and return (losses, gradient norms, final weights by name)."""
    model, losses, norms = Replicas(case).model, [], []
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=case.optim["lr"], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: case.rates.at(done + 1) / case.optim["lr"])
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), case.optim["clip_norm"]).item())
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, norms, {f"causal_lm.{name}": p.detach() for name, p in model.named_parameters()}


def test_learning_rates_and_clipping_are_those_of_a_plain_loop(ranks: RankPool) -> None:
    losses, norms, weights = plain_loop(CASE)
    assert min(norms) < CASE.optim["clip_norm"] < max(norms), "some gradients are clipped, and others are not"
    shards = [outcome for [outcome] in ranks.run(train, [CASE], world_size=2)]
    for outcome in shards:
        np.testing.assert_allclose(outcome.losses, losses, rtol=1e-9)
        np.testing.assert_allclose(outcome.norms, norms, rtol=1e-8)
    for name, whole in weights.items():
        there = torch.cat([outcome.weights[name] for outcome in shards])
        assert (there - whole).abs().max() < 1e-6, name
