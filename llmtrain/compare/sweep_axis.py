"""Families of conditions that differ in one number, such as a bandwidth: their place on an axis."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
RATE = re.compile(r"(\d+(?:\.\d+)?)[ _-]?([kmg]bit)(?:/s|ps)?", re.IGNORECASE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Scale:
    """The number of each condition of a family; None for the one that has none (`unlimited`, `nobody`)."""

    label: str
    numbers: dict[str, float | None]
    is_rate: bool

    def position(self, condition: str) -> float:
        """For sorting: a condition without a number is the best network, or the least delay."""
        number = self.numbers[condition]
        if number is not None:
            return number
        return float("inf") if self.is_rate else float("-inf")


def find_sweeps(conditions: Sequence[str]) -> list[Scale]:
    """One for every two or more names that are alike but for one number.

    `100mbit` and `1gbit` are alike, in Mbit/s. A single condition without any number belongs to all of them.
    """
    families: dict[str, dict[str, list[float]]] = {}
    bare: dict[str, float | None] = {}
    for name in conditions:
        plain = RATE.sub(lambda found: f"{_mbit(found):g}mbit", name)
        numbers = [float(text) for text in NUMBER.findall(plain)]
        if numbers:
            families.setdefault(NUMBER.sub("…", plain), {})[name] = numbers
        else:
            bare[name] = None
    common = bare if len(bare) == 1 else {}
    scales = []
    for skeleton, members in families.items():
        columns = [column for column in zip(*members.values(), strict=True) if len(set(column)) > 1]
        if len(columns) == 1 and len(set(columns[0])) == len(members):
            is_rate = "…mbit" in skeleton
            label = "bandwidth between hosts (Mbit/s)" if is_rate else skeleton
            scales.append(Scale(label, common | dict(zip(members, columns[0], strict=True)), is_rate))
    return scales


def _mbit(found: re.Match[str]) -> float:
    return float(found[1]) * RATES[found[2].lower()]
