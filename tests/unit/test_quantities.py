"""Numbers as people read them."""

from __future__ import annotations

from llmtrain.quantities import format_si


def test_numbers_for_people():
    numbers = {0: "0", 999: "999", 41_200: "41.2k", 3.03e9: "3.03G", 2e15: "2e+03T"}
    assert {number: format_si(number) for number in numbers} == numbers
    assert format_si(999.4) == "999" and format_si(999_600) == "1M" and format_si(1015) == "1.02k"
