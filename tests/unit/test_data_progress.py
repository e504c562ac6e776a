"""The line of progress while text is tokenized."""

from __future__ import annotations

import pytest

from llmtrain.data import extend as extending


def test_the_rate_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(extending.time, "monotonic", lambda: clock[0])
    progress = extending.ProgressBar("train tokens", 100_000_000, show=False)
    for million_a_second in (4, 1):
        for _ in range(10):
            clock[0] += 10
            progress.advance(10**6, million_a_second * 10**6)
    assert progress.line() == "train tokens: 20.0 MB, 50.00 M tokens, 0.10 M tokens/s, 8 min left"
