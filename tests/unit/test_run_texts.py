"""Tests of a run's texts: their numbers of samples, and the joint loss of several texts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from llmtrain.train.text_kinds import SingleText
from llmtrain.train.validation import Validation, ValidationSet, joined, weighted_mean


@pytest.mark.parametrize("length", [3, 4])
def test_a_complete_text_that_is_shuffled_in_blocks_has_as_many_samples_as_it_has(length: int) -> None:
    class Tokens(list):
        is_complete = True

    texts = SimpleNamespace(train_text=SimpleNamespace(tokens=Tokens(range(13))))
    loader = SimpleNamespace(sequence_length=length, num_samples=2**61)
    assert SingleText.samples(texts, loader) == {"": 12 // length}
    texts.train_text.tokens = Tokens(range(length))
    assert SingleText.samples(texts, loader) is None, "the loader refuses a text without samples"
    Tokens.is_complete, texts.train_text.tokens = False, Tokens(range(13))
    assert SingleText.samples(texts, loader) is None


@pytest.mark.parametrize("ratios", [(4.5, 2.0), (4.0, 3.0)])
def test_the_bits_per_byte_of_a_mixture_do_not_depend_on_the_tokenizer(ratios: tuple[float, float]) -> None:
    parts = [
        ValidationSet(name, tuple, ratio, share=w) for name, ratio, w in zip("ab", ratios, (3.0, 1.0), strict=True)
    ]
    bits = [0.9, 0.5]
    found = [Validation(one * math.log(2) * part.bytes_per_token, 9) for one, part in zip(bits, parts, strict=True)]
    tags = joined(parts).tags(weighted_mean(parts, found))
    assert tags["eval/bpb"] == pytest.approx(0.8)
    assert tags["eval/loss"] == pytest.approx((3 * found[0].loss + found[1].loss) / 4)
