"""Identity of a run's texts, stored in its checkpoints, so that a run does not continue on other tokens.

A text may change although the recipe does not: a file is added to a folder, a package is upgraded, or a dataset has a new
revision. A run that continued on the changed text would repeat some samples and skip others, or would read token ids of
another tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.data.dataset import TokenDataset, TokenShards
from llmtrain.data.token_digests import WINDOW, digest_windows
from llmtrain.errors import DataError

SPACING = 1.5
"""Ratio of the start positions of consecutive windows. The positions do not depend on the text's length, so they are the same
in a longer run."""


@dataclass(frozen=True)
class TextIdentity:
    """Number and digests of a text's training tokens, by which a run recognizes it."""

    tokens: int
    is_fixed: bool
    """True if runs of all lengths have the same tokens."""
    windows: tuple[str, ...]
    """Digest of each complete window or, if the text is shorter than a window, of all of it."""

    @classmethod
    def of(cls, text: TokenDataset, is_fixed: bool) -> TextIdentity:
        """Return the identity of those training tokens of a text that exist now."""
        tokens = text.tokens("train")
        vocabulary = f"{text.vocab_size} {text.eos_id} ".encode()
        length = min(WINDOW, len(tokens))
        windows = (tokens.window(start, length) for start in _starts(tokens))
        return cls(len(tokens), is_fixed, tuple(digest_windows([window], vocabulary) for window in windows))

    def continues(self, other: TextIdentity) -> bool:
        """Return whether a run that began with the other text can continue with this one."""
        if self.is_fixed and other.is_fixed and self.tokens != other.tokens:
            return False
        if self.tokens != other.tokens and min(self.tokens, other.tokens) < WINDOW:
            return True  # the windows have different lengths
        return all(mine == theirs for mine, theirs in zip(self.windows, other.windows, strict=False))

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TextIdentity:
        """Return the identity from the values that `state_dict` returned."""
        return cls(state["tokens"], state["is_fixed"], tuple(state["windows"]))


def check_continued(texts: Mapping[str, TextIdentity], stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DataError if one of the run's `texts` differs from the text of the same name in `stored`, which has the identities from
    a checkpoint. A text without a stored identity is new, and passes."""
    for name in texts.keys() & stored.keys():
        before, now = TextIdentity.from_state(stored[name]), texts[name]
        if not now.continues(before):
            counts = "" if now.tokens == before.tokens else f" ({now.tokens:,} tokens now, {before.tokens:,} then)"
            raise DataError(
                f"the training text{f' {name}' if name else ''} is not the one with which the run's checkpoint was written{counts}; "
                "give the same text and tokenizer, start another run with run.name=NAME, or continue from the weights alone with "
                "model.from_weights=RUN"
            )


def _starts(tokens: TokenShards) -> Iterator[int]:
    """Yield the start positions of complete windows, or 0 if the text is shorter. Later windows are farther apart."""
    if 0 < len(tokens) < WINDOW:
        yield 0
    start = 0
    while start + WINDOW <= len(tokens):
        yield start
        start = max(start + WINDOW, int(start * SPACING))
