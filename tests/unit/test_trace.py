"""Tests of timelines: which spans are written, and when none are."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from llmtrain.trace import Mark, message, open_trace, span, step_span
from llmtrain.train.run import _traced


def spans(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_of_some_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "rank-00000.jsonl"
    with open_trace(path, first=2, last=3):
        for step in range(1, 5):
            with step_span(step), span("exposed", "averaging"):
                pass
    assert [(line["kind"], line["step"]) for line in spans(path)] == [
        *(("exposed", 2), ("step", 2)),
        *(("exposed", 3), ("step", 3)),
    ]
    exposed, step = spans(path)[:2]
    assert exposed["name"] == "averaging"
    assert step["start"] <= exposed["start"] <= exposed["end"] <= step["end"]


def test_a_message_ends_on_another_thread_and_in_a_later_step(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    with open_trace(path, first=1, last=1):
        with step_span(1):
            arrived = message("synchronizing layer 0", 96.0)
        with step_span(2):
            assert message("unseen", 1.0) is None
            thread = threading.Thread(target=arrived)
            thread.start()
            thread.join()
    sent = next(line for line in spans(path) if line["kind"] == "message")
    assert (sent["name"], sent["bytes"], sent["step"]) == ("synchronizing layer 0", 96.0, 1)


def test_only_the_thread_that_trains_asks_the_device(tmp_path: Path) -> None:
    """Messages end on gloo's threads, which have another current device."""
    asked: list[threading.Thread] = []

    def clock() -> Mark:
        def mark() -> float | None:
            asked.append(threading.current_thread())
            return None  # the device has not reached this moment

        return mark

    with open_trace(tmp_path / "rank.jsonl", first=1, last=1, clock=clock), step_span(1):
        with span("gradient"):
            pass
        thread = threading.Thread(target=message("synchronizing layer 0", 96.0))
        thread.start()
        thread.join()
    assert set(asked) == {threading.current_thread()}


def test_what_arrives_after_the_end_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    with open_trace(path, first=1, last=1), step_span(1):
        arrived = message("late", 1.0)
    arrived()
    assert [line["kind"] for line in spans(path)] == ["step"]


def test_a_start_keeps_the_spans_of_steps_that_it_does_not_repeat(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    for resumed_at, steps in ((0, (1, 2, 3)), (2, (3, 4)), (9, (10,)), (0, (1,))):
        with open_trace(path, first=1, last=4, resumed_at=resumed_at):
            for step in steps:
                with step_span(step):
                    pass
        expected = [1] if resumed_at == 0 and steps == (1,) else [1, 2, 3] if resumed_at == 0 else [1, 2, 3, 4]
        assert [line["step"] for line in spans(path)] == expected


def test_without_a_trace_nothing_happens() -> None:
    with step_span(1), span("gradient"):
        assert message("unseen", 1.0) is None


def test_a_timeline_that_can_not_be_written_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")
    path, said = tmp_path / "trace/rank-00000.jsonl", []
    run = SimpleNamespace(
        recipe=SimpleNamespace(log=SimpleNamespace(trace=SimpleNamespace(first=1, steps=2))),
        directory=SimpleNamespace(trace_of=lambda rank: path),
        mesh=SimpleNamespace(world=SimpleNamespace(rank=0), device=torch.device("cpu")),
        console=SimpleNamespace(print=said.append),
    )
    with _traced(run, 0), step_span(1), span("data"):
        pass
    assert said == [f"no timeline is written to {path} (File exists)"]
    (tmp_path / "trace").unlink()
    with _traced(run, 0), step_span(1), span("data"):
        pass
    assert [line["kind"] for line in spans(path)] == ["data", "step"] and len(said) == 1
