"""Tests of attention: GPT-Neo's against explicit sums in NumPy, and packed documents that must not attend to each other."""

import copy
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmtrain import attention
from llmtrain.attention import attend, document_ids, position_ids
from llmtrain.config import ModelSection
from llmtrain.model import blocks_of, build, initialize, model_config

SEPARATOR = 5
FAMILIES = {
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 3,
        "max_position_embeddings": 40,
    },
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def written_out(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, documents: np.ndarray | None
) -> np.ndarray:
    mixed = np.zeros_like(q)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        seen = [
            j
            for j in range(i + 1)
            if (window is None or i - j < window) and (documents is None or documents[b, i] == documents[b, j])
        ]
        weights = np.exp([q[b, h, i] @ k[b, h, j] for j in seen])
        mixed[b, h, i] = weights @ v[b, h, seen] / weights.sum()
    return mixed


WINDOWS, LENGTHS = [None, 1, 4, 5, 99], [1, 4, 5, 8, 13]
PAIRS = [(window, length, (i + j) % 2 == 1) for i, window in enumerate(WINDOWS) for j, length in enumerate(LENGTHS)]
"""Every window with every length, alternately with and without documents."""


@pytest.mark.parametrize(("window", "length", "has_documents"), PAIRS)
def test_attention_by_hand(window: int | None, length: int, has_documents: bool) -> None:
    q, k, v = (draw(2, 3, length, 4, seed=seed).requires_grad_() for seed in range(3))
    ids = torch.randint(0, 8, (2, length), generator=torch.Generator().manual_seed(length))
    documents = document_ids(ids, SEPARATOR) if has_documents else None
    found = attend(q, k, v, window, documents)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    expected = written_out(*arrays, window, None if documents is None else documents.numpy())
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-12)

    upstream = draw(*found.shape, seed=3)  # the gradient along one direction, against finite differences
    (found * upstream).sum().backward()
    step, directions = 1e-6, [draw(*q.shape, seed=seed).numpy() for seed in (4, 5, 6)]
    ends = [
        written_out(
            *(x + sign * step * d for x, d in zip(arrays, directions, strict=True)),
            window,
            None if documents is None else documents.numpy(),
        )
        for sign in (1, -1)
    ]
    slope = ((ends[0] - ends[1]) / (2 * step) * upstream.numpy()).sum()
    along = sum((x.grad.numpy() * d).sum() for x, d in zip((q, k, v), directions, strict=True))
    assert along == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [None, 5, 99])
@pytest.mark.parametrize("short", [0, 256])
def test_bf16_with_and_without_the_fused_kernel(
    window: int | None, has_documents: bool, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SHORT", short)
    rounded = [draw(2, 3, 13, 4, seed=seed).bfloat16() for seed in range(3)]
    ids = torch.randint(0, 8, (2, 13), generator=torch.Generator().manual_seed(0))
    documents = document_ids(ids, SEPARATOR) if has_documents else None
    found, gradients = [], []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in rounded]
        mixed = attend(*inputs, window, documents)
        mixed.backward(draw(*mixed.shape, seed=3).to(dtype))
        found.append(mixed.detach())
        gradients.append(torch.stack([x.grad for x in inputs]))
    for narrow, exact in (found, gradients):
        assert narrow.dtype == torch.bfloat16
        assert float((narrow - exact).norm() / exact.norm()) < 0.01


def test_documents_by_hand() -> None:
    ids = torch.tensor([[9, 5, 1, 2, 5, 5, 3], [5, 1, 1, 1, 1, 1, 5]])
    documents = document_ids(ids, SEPARATOR)
    assert documents.tolist() == [[0, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 2]]
    assert position_ids(documents).tolist() == [[0, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0]]


def model_of(family: str, separator: int | None):
    section = ModelSection(type=family, config=FAMILIES[family])
    model = build(model_config(section, vocab_size=97), loss_chunk=7, separator=separator)
    for block in blocks_of(model):
        initialize(model, block, 1, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # with its initial weights, a model hardly depends on attention
            parameter.add_(0.3 * draw(*parameter.shape, seed=parameter.ndim))
    return model.double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_if_each_were_alone(family: str) -> None:
    ids = torch.randint(6, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    for row, ends in enumerate([(3, 4, 17), (11, 29)]):
        ids[row, list(ends)] = SEPARATOR
    apart, together = model_of(family, SEPARATOR), model_of(family, None)
    documents, packed = document_ids(ids, SEPARATOR), apart.hidden(ids)
    for row in range(2):
        for number in documents[row].unique():
            alone = together.hidden(ids[row][documents[row] == number][None])
            torch.testing.assert_close(packed[row][documents[row] == number], alone[0], rtol=1e-6, atol=1e-8)
    assert (packed - together.hidden(ids)).abs().max() > 1e-2, "the mask changed nothing"


def test_parameters_and_values_are_those_of_transformers() -> None:
    ours = model_of("gpt_neo", None)
    theirs = AutoModelForCausalLM.from_config(ours.causal_lm.config, dtype=torch.float64).eval()
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.causal_lm.named_parameters()]
    theirs.load_state_dict(copy.deepcopy(ours.causal_lm.state_dict()), strict=False)
    ids = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))
    # The model of transformers multiplies queries and keys in fp32, which limits the agreement.
    torch.testing.assert_close(theirs.transformer(ids).last_hidden_state, ours.hidden(ids), rtol=1e-4, atol=1e-5)


def test_dropout_is_there_in_training_alone() -> None:
    section = ModelSection(type="gpt_neo", config=FAMILIES["gpt_neo"] | {"attention_dropout": 0.5})
    model = build(model_config(section, vocab_size=97), loss_chunk=7)
    for block in blocks_of(model):
        initialize(model, block, 1, torch.device("cpu"), torch.float32)
    ids = torch.arange(20)[None]
    model.train()
    assert not torch.equal(model.hidden(ids), model.hidden(ids))
    model.eval()
    assert torch.equal(model.hidden(ids), model.hidden(ids))
