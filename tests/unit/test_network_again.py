"""Tests of benchmarks/network_again.py, which replaces the predictions on a page and keeps its measurements."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from llmtrain.plan.network_time import PREDICTION_ERROR
from tests import ROOT

sys.path.append(str(ROOT / "benchmarks"))
RESULTS = ROOT / "benchmarks/results"
again, network_page = map(importlib.import_module, ("network_again", "network_page"))
PAGE = (RESULTS / "network/README.md").read_text()
PREDICTED = [again.AT[name] for name in ("predicted", "off by", "predicted, s")]


def measured(page: str) -> list[tuple[str, ...]]:
    return [tuple(cell for at, cell in enumerate(row) if at not in PREDICTED) for row in again.rows_of(page)]


def test_the_page_has_todays_predictions() -> None:
    rows = again.rows_of(PAGE)
    assert again.rows_of(again.rewritten(PAGE)) == rows
    off = [abs(float(row[again.AT["off by"]])) for row in rows]
    assert max(off) <= min(PREDICTION_ERROR, network_page.FAR_OFF)


def test_other_predictions_are_replaced_and_measurements_kept() -> None:
    row = again.rows_of(PAGE)[0]
    other = list(row)
    other[again.AT["predicted"]], other[again.AT["off by"]] = "9.9 %", "+99.0"
    page = PAGE.replace(" | ".join(row), " | ".join(other))
    assert page != PAGE and measured(page) == measured(PAGE)
    new = again.rewritten(page)
    assert again.rows_of(new) == again.rows_of(PAGE)
    assert len(re.findall("predictions made again at", again.rewritten(new))) == 1
    assert re.search(r"commit \w+(-dirty)?; predictions made again at \S+, Python", new)


def test_rows_with_keys_of_their_own_are_refused() -> None:
    page = PAGE.replace("| edit | int4 |", "| mine | int4 |")
    with pytest.raises(SystemExit, match="row 'mine' has keys of its own"):
        again.rewritten(page)
