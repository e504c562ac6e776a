"""Numbers and durations as they are written for people."""

from __future__ import annotations

from llmtrain.quantities import counted, format_elapsed, format_si, mesh_size


def test_numbers_for_people():
    numbers = {0: "0", 999: "999", 41_200: "41.2k", 3.03e9: "3.03G", 2e15: "2e+03T"}
    assert {number: format_si(number) for number in numbers} == numbers
    assert format_si(999.4) == "999" and format_si(999_600) == "1M" and format_si(1015) == "1.02k"


def test_durations_to_the_second():
    durations = {0.4: "0 s", 9: "9 s", 59.6: "1 min 0 s", 116: "1 min 56 s", 3599.6: "1 h 0 min", 7530: "2 h 5 min"}
    assert {seconds: format_elapsed(seconds) for seconds in durations} == durations


def test_counts_have_nouns_in_the_singular_or_plural():
    counts = [counted(1, "replica"), counted(0, "step"), counted(1, "process"), counted(2, "process")]
    assert counts == ["1 replica", "0 steps", "1 process", "2 processes"]
    assert counted(1000, "step", ",") == "1,000 steps" and counted(1000, "step") == "1000 steps"
    assert mesh_size(1, 4) == "1 replica x 4 shards" and mesh_size(2, 1) == "2 replicas x 1 shard"
