"""Steps of a tiny model on documents that are not packed, and the same steps as a plain loop over documents without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenShards
from llmtrain.data.document_loader import DocumentLoader
from llmtrain.data.documents import DocumentSamples, find_starts
from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel.engine import count_tokens
from tests.distributed.pairs_reference import Replicas
from tests.distributed.real_engine import LENGTH, VOCABULARY, Case, Outcome, Run, mesh_of

EOS = 0
SGD = {"kind": "sgd", "lr": 0.3, "clip_norm": None, "weight_decay": 0.0}


def loader_of(case: Case, rank: int = 0, replicas: int = 1, shard: int = 1) -> DocumentLoader:
    """Return a loader of documents of 1 to 40 tokens, of which the longest are cut."""
    draw = np.random.default_rng(1)
    ids = draw.integers(1, VOCABULARY, 4000).astype(np.uint16)
    ids[np.cumsum(draw.integers(1, 41, 180))] = EOS
    tokens = TokenShards([ids])
    shape = BatchShape(
        sequence_length=LENGTH,
        global_batch=case.global_batch,
        micro_batch=case.micro_batch,
        replica=rank // shard,
        replicas=replicas,
        shard_rank=rank % shard,
        shards=shard,
        seed=5,
    )
    return DocumentLoader(DocumentSamples(tokens, find_starts(tokens, EOS, LENGTH), EOS), shape)


@dataclass
class DocumentRun(Run):
    """Run of a case that reads documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loader = loader_of(self.case, self.mesh.world.rank, self.case.replicas, self.case.shard)

    def _train_step(self) -> None:
        batches = self.loader.next()
        plan = self.method.begin_step(self.step, self.case.rates.at(self.step))
        loss = self.engine.forward_backward(batches, self.loader.mean_replica_tokens)
        self.norms.append(float(self.engine.step(plan.lr)))
        self.method.end_step(self.step, count_tokens(batches))
        self.sums.append([float(loss), count_tokens(batches)])


def train_on_documents(cases: list[Case]) -> list[Outcome]:
    """Run the cases one after another on this rank; all have the same number of ranks."""
    outcomes = []
    for case in cases:
        run = DocumentRun(case, mesh_of(case.replicas, case.shard))
        run.train(case.steps)
        outcomes.append(run.finish())
    return outcomes


def plain_loop(case: Case) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train with SGD in float64, one document at a time without padding. Return losses, gradient norms and final weights."""
    model, loader, losses, norms = Replicas(case).model, loader_of(case), [], []
    for _ in range(case.steps):
        rows = [row[row != IGNORE_INDEX] for batch in loader.next() for row in batch]
        tokens = sum(len(row) - 1 for row in rows)
        model.zero_grad()
        losses.append(0.0)
        for row in rows:
            logits = model(row[None, :-1]).logits[0]
            loss = F.cross_entropy(logits, row[1:], reduction="sum") / tokens
            loss.backward()
            losses[-1] += loss.item()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        with torch.no_grad():
            for p in model.parameters():
                p -= case.optim["lr"] * p.grad
    return losses, norms, {f"causal_lm.{name}": p.detach() for name, p in model.named_parameters()}


def assert_is_plain(outcomes: list[Outcome], case: Case, rtol: float) -> None:
    """Check that the outcomes of a case's ranks are those of the plain loop."""
    losses, norms, weights = plain_loop(case)
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.losses, losses, rtol=rtol)
        if case.sync.method == "synchronous":
            np.testing.assert_allclose(outcome.norms, norms, rtol=rtol * 10)
    for name, whole in weights.items():
        for first in range(0, len(outcomes), case.shard):
            there = torch.cat([outcome.weights[name] for outcome in outcomes[first : first + case.shard]])
            assert (there - whole).abs().max() < 10 * rtol, name
