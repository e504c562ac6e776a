"""Tests of commands on random mistakes (tests/fuzz): each succeeds, or prints one line and ends with exit code 1 to 3."""

from __future__ import annotations

import logging
import random
import sys
import traceback
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from tests.fuzz.draws import Finding, ends_well
from tests.fuzz.kinds import KINDS

FEW, MANY = 8, 300
"""Number of cases per kind in the fast tier, and in the deep one."""
TRAIN = ("checkpoints", "exported_folders")
"""Kinds that first train a run, and are therefore in the deep tier only."""


def tiers() -> list:
    """Return (kind, first seed, number of cases) for both tiers."""
    few = [pytest.param(name, 0, FEW, id=f"few-{name}") for name in KINDS if name not in TRAIN]
    return few + [pytest.param(name, 10**6, MANY, id=f"many-{name}", marks=pytest.mark.deep) for name in KINDS]


@pytest.mark.parametrize(("name", "start", "cases"), tiers())
def test_mistakes_end_well(name: str, start: int, cases: int, tmp_path: Path) -> None:
    case, codes = KINDS[name](tmp_path), set()
    for seed in range(start, start + cases):
        codes.add(case(random.Random(seed)))
    assert codes & {1, 2}, "no input was wrong"


def test_bad_ends_are_seen() -> None:
    def ends(command: object, problem: str) -> None:
        with pytest.raises(Finding, match=f"^{problem}"):
            ends_well(command, "it")

    def silent() -> None:
        sys.exit(2)

    def loud() -> None:
        traceback.print_exception(ValueError("Traceback"))

    def other() -> None:
        raise UserError("'NoneType' object is not iterable")

    ends(silent, "silence")
    ends(lambda: sys.exit(7), "exit code")
    ends(lambda: {}[1], "traceback")
    ends(loud, "traceback")
    ends(other, "library's message")
    assert ends_well(lambda: logging.getLogger("a").warning("one"), "it") == 0


def test_a_hang_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.in_process.HANG_SECONDS", 0.05)
    with pytest.raises(Finding, match=r"^hang"):
        ends_well(lambda: [None for _ in iter(int, 1)], "it")
