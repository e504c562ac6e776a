"""Losses that the documentation quotes, each of which must be in a committed result."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests import ROOT
from tests.unit.test_study import runs

RESULTS = ROOT / "benchmarks" / "results"
LOSS = re.compile(r"(?<![\d.,])[2-9]\.\d{3,4}(?![\d.]*\d)")


@cache
def measured() -> tuple[list[float], set[str]]:
    """Return the losses of the study's records with the means over their seeds, and the losses on all pages of results."""
    losses: list[float] = []
    by_cell: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for path in runs.RECORDS.parent.glob("*.jsonl"):
        for name, record in runs.read_records(path).items():
            for key in ("loss", "bits_per_byte"):
                if (loss := record.get(key)) is not None:
                    losses.append(loss)
                    by_cell[path.name, name.rpartition("-")[0], key].append(loss)
    losses += map(statistics.mean, by_cell.values())
    pages = (path.read_text() for path in RESULTS.rglob("*.md"))
    return losses, {number for text in pages for number in LOSS.findall(text)}


def unknown(text: str) -> Iterator[str]:
    """Yield the losses in a text that no result has, with the words before them. Fenced output of programs is skipped."""
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    losses, on_pages = measured()
    rounded = {digits: {f"{loss:.{digits}f}" for loss in losses} for digits in (3, 4)}
    shortened = {f"{float(number):.3f}" for number in on_pages}
    for match in LOSS.finditer(text):
        number = match[0]
        if number not in rounded[len(number) - 2] | on_pages | shortened:
            yield text[max(0, match.start() - 60) : match.end()]


@pytest.mark.parametrize(
    "path", ["docs/results.md", "docs/claims.md", "docs/choosing.md", "docs/methods.md", "README.md"]
)
def test_losses_in_the_documentation_are_of_committed_results(path: str) -> None:
    assert not list(unknown((ROOT / path).read_text()))


def test_a_loss_of_no_result_is_found() -> None:
    text = "```text\nloss 7.6543\n```\nDiLoCo ends at 3.375 (3.3752), not at 7.654."
    assert [*unknown(text)] == ["\nDiLoCo ends at 3.375 (3.3752), not at 7.654"]
