"""Numbers as a reader wants them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def seconds(value: float) -> str:
    """4.23 -> "4.2 s", 41.2 -> "41 s", 130 -> "2.2 min", 8000 -> "2.2 h"."""
    if value < 119.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def scaled(value: float) -> str:
    """Three digits and a prefix, after which a unit may follow: 3.2448e9 -> "3.24 G"."""
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{_three_digits(value)} {prefix}"
        value /= 1000
    return f"{_three_digits(value)} T"


def size(value: float) -> str:
    """Bytes: "3.24 GB"."""
    return f"{scaled(value)}B"


def count(value: float) -> str:
    """Tokens, or tokens per second: "1.23 M"."""
    return scaled(value).strip()


def loss(value: float) -> str:
    """Nats per token, to three decimals."""
    return f"{value:.3f}"


def times(value: float) -> str:
    """A ratio near or far from one: 0.97, 5.2, 41."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def percent(share: float) -> str:
    """0.021 -> "2.1 %", 0.97 -> "97 %"."""
    value = 100 * share
    if 0 < value < 0.05:
        return "less than 0.1 %"
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %"


def seeds(number: int) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{number} seed{'' if number == 1 else 's'}"


def listed(items: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def file_name(text: str) -> str:
    """A condition's name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_.") or "condition"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
