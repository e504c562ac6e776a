"""Tests of the table of pairs: every two levels that a recipe may combine are in a row."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

from tests.distributed.pairs import FACTORS, ROWS, is_refused

PLAIN = {name: levels[0] for name, levels in FACTORS.items()}
HALVES = (("method", "mesh", "schedule", "wire"), ("engine", "precision", "offload", "recomputed", "optimizer"))
"""Choices that rules of recipes concern, in halves that are checked one by one. Only the rule about pulls under stage 3
of ZeRO concerns both halves, and it forbids no pair."""


def is_covered_by_oracle(method: str, schedule: str) -> bool:
    """Return whether a pair needs no row. Under the wait-avoiding schedule, methods without pulls differ only in their
    outer step and their period, and test_wagma.py compares all of these with the oracle. WAGMA under another schedule
    is Local SGD, which has rows."""
    return method != "palsgd" and (schedule == "wait_avoiding") != (method == "wagma")


@cache
def half_is_allowed(half: tuple[str, ...], levels: tuple[str, ...]) -> bool:
    return not is_refused({**PLAIN, **dict(zip(half, levels, strict=True))})


def can_meet(chosen: dict[str, str]) -> bool:
    """Return whether any recipe may combine the chosen levels."""
    return all(
        any(
            half_is_allowed(half, levels)
            for levels in product(*([chosen[name]] if name in chosen else FACTORS[name] for name in half))
        )
        for half in HALVES
    )


def test_no_row_is_refused() -> None:
    assert [row for row in ROWS if is_refused(row)] == []


def test_all_levels_that_go_together_meet() -> None:
    missing = []
    for first, second in combinations(FACTORS, 2):
        there = {(row[first], row[second]) for row in ROWS}
        for levels in product(FACTORS[first], FACTORS[second]):
            if (first, second) == ("method", "schedule") and is_covered_by_oracle(*levels):
                continue
            if levels not in there and can_meet(dict(zip((first, second), levels, strict=True))):
                missing.append((first, second, levels))
    assert missing == []


def test_some_levels_never_meet_and_no_row_can_be_left_out() -> None:
    """Otherwise the two tests above would pass if nothing could meet, or with superfluous rows."""
    assert not can_meet({"method": "edit", "schedule": "wait_avoiding"}) and not can_meet(
        {"engine": "zero1", "precision": "fp64"}
    )
    pairs = [{(first, row[first], second, row[second]) for first, second in combinations(FACTORS, 2)} for row in ROWS]
    for number, mine in enumerate(pairs):
        assert mine - set().union(*(other for place, other in enumerate(pairs) if place != number))
