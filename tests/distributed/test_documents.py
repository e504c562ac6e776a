"""Tests that padding is exact: gradients of padded documents are those of a loop over documents, on every mesh."""

from __future__ import annotations

import pytest
import torch

from llmtrain.config import ModelSection
from llmtrain.loss import IGNORE_INDEX, inputs_and_labels
from llmtrain.model import blocks_of, build, initialize, model_config
from tests.distributed.document_runs import SGD, assert_is_plain, loader_of, train_on_documents
from tests.distributed.fake_engine import choices
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, LLAMA, VOCABULARY, Case

FP64 = {"parallel": {"precision": "fp64"}, "optim": SGD, "steps": 3, "global_batch": 16}


@pytest.mark.parametrize(
    ("model", "replicas", "shard"),
    [(LLAMA, 1, 1), (LLAMA, 2, 1), (LLAMA, 1, 2), (LLAMA, 2, 2), (GPT_NEO, 2, 2)],
    ids=["1x1", "2x1", "1x2", "2x2", "2x2-gpt_neo"],
)
def test_gradients_are_those_of_a_loop_over_documents(
    ranks: RankPool, model: ModelSection, replicas: int, shard: int
) -> None:
    """Gradients are accumulated over two to eight micro-batches."""
    case = Case(replicas=replicas, shard=shard, model=model, **FP64)
    outcomes = [one for [one] in ranks.run(train_on_documents, [case], world_size=replicas * shard)]
    assert_is_plain(outcomes, case, rtol=1e-9)


def test_replicas_that_average_after_every_step_have_the_gradient_of_all_tokens(ranks: RankPool) -> None:
    """Each replica divides by the same number, whatever part of the tokens it has, also in a method of local steps."""
    case = Case(choices("local_sgd", every=1), replicas=2, shard=2, **FP64)
    outcomes = [one for [one] in ranks.run(train_on_documents, [case])]
    assert_is_plain(outcomes, case, rtol=1e-9)


def test_ranks_differ_in_tokens_and_lengths() -> None:
    """Otherwise, a mean over each rank's tokens would pass the tests above."""
    case = Case(**FP64)
    ranks = [loader_of(case, rank, replicas=2, shard=2).next() for rank in range(4)]
    assert len({sum(int((batch != IGNORE_INDEX).sum()) for batch in batches) for batches in ranks}) > 2
    assert len({batch.shape[1] for batches in ranks for batch in batches}) > 1


@pytest.mark.parametrize("model", [LLAMA, GPT_NEO], ids=["llama", "gpt_neo"])
def test_real_tokens_do_not_see_padding(model: ModelSection) -> None:
    """Other values in the padding change no bit. Without any padding, results are equal up to rounding."""
    torch.manual_seed(0)
    language_model = build(model_config(model, VOCABULARY), loss_chunk=11)
    for block in blocks_of(language_model):
        initialize(language_model, block, seed=0, device=torch.device("cpu"), dtype=torch.float64)
    for parameter in language_model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.full((2, 16), IGNORE_INDEX)
    ids[0, :10], ids[1, :4] = torch.arange(10) % VOCABULARY, torch.arange(4) + 7
    inputs, labels = inputs_and_labels(ids)
    found = language_model.hidden(inputs)
    other = torch.where(labels == IGNORE_INDEX, 13, inputs)
    other[labels != IGNORE_INDEX] = inputs[labels != IGNORE_INDEX]
    assert not torch.equal(other, inputs)
    real = labels != IGNORE_INDEX
    assert torch.equal(language_model.hidden(other)[real], found[real])
    for row, size in ((0, 9), (1, 3)):
        alone = language_model.hidden(inputs[row : row + 1, :size])[0]
        torch.testing.assert_close(alone, found[row, :size], rtol=1e-12, atol=1e-12)
