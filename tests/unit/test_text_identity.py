"""Tests of text identities: a run continues only on its own text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmtrain.data.dataset import TokenShards
from llmtrain.data.text_identity import TextIdentity, check_continued
from llmtrain.errors import DataError

IDS = np.random.default_rng(0).integers(0, 500, 9000).astype(np.uint16)


def text(ids: np.ndarray, vocabulary: int = 500) -> Any:
    return SimpleNamespace(tokens=lambda split: TokenShards([ids]), vocab_size=vocabulary, eos_id=0)


def identity(ids: np.ndarray, is_fixed: bool = True, **changes: Any) -> TextIdentity:
    return TextIdentity.of(text(ids, **changes), is_fixed)


def changed(at: int) -> np.ndarray:
    ids = IDS.copy()
    ids[at] += 1
    return ids


def test_the_same_text_continues() -> None:
    stored = identity(IDS)
    assert len(stored.windows) == 6
    assert TextIdentity.from_state(stored.state_dict()).continues(stored)
    check_continued({"": identity(IDS), "new": identity(IDS)}, {"": stored.state_dict(), "gone": stored.state_dict()})


@pytest.mark.parametrize(
    ("other", "continues"),
    [
        (identity(changed(7)), False),
        (identity(changed(2500)), False),
        (identity(IDS, vocabulary=600), False),
        (identity(IDS[:8000]), False),
        (identity(np.append(IDS, IDS)), False),
        (identity(np.append(IDS, IDS), is_fixed=False), True),
        (identity(IDS[:3000], is_fixed=False), True),
        (identity(changed(7), is_fixed=False), False),
        (identity(IDS[:10], is_fixed=False), True),
    ],
)
def test_what_continues(other: TextIdentity, continues: bool) -> None:
    """A text that is tokenized only as far as a run reads it may become longer or shorter."""
    assert identity(IDS).continues(other) == other.continues(identity(IDS)) == continues


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_text_that_is_shorter_than_a_window_is_compared_as_a_whole(is_fixed: bool) -> None:
    short = identity(IDS[:600], is_fixed)
    assert short.continues(identity(IDS[:600], is_fixed))
    assert not short.continues(identity(changed(599)[:600], is_fixed))
    assert not short.continues(identity(IDS[:600], is_fixed, vocabulary=600))
    for tokens in (500, 9000):
        assert short.continues(identity(IDS[:tokens], is_fixed)) == (not is_fixed)
    assert short.continues(TextIdentity(600, is_fixed, ())), "an earlier version stored no window of such a text"


def test_another_text_is_named() -> None:
    stored = {"news": identity(IDS).state_dict()}
    with pytest.raises(
        DataError, match=r"text news is not the one with .* \(8,000 tokens now, 9,000 then\); give the same text"
    ):
        check_continued({"news": identity(IDS[:8000])}, stored)
