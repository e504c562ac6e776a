"""The texts of a run: how many samples they have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmtrain.train.run_texts import RunTexts


@pytest.mark.parametrize("length", [3, 4])
def test_a_complete_text_that_is_shuffled_in_blocks_has_as_many_samples_as_it_has(length: int) -> None:
    class Tokens(list):
        is_complete = True

    texts = SimpleNamespace(sites=None, train_text=SimpleNamespace(tokens=Tokens(range(13))))
    loader = SimpleNamespace(sequence_length=length, num_samples=2**61)
    assert RunTexts.samples(texts, loader) == {"": 12 // length}
    texts.train_text.tokens = Tokens(range(length))
    assert RunTexts.samples(texts, loader) is None, "the loader refuses it"
    Tokens.is_complete, texts.train_text.tokens = False, Tokens(range(13))
    assert RunTexts.samples(texts, loader) is None
