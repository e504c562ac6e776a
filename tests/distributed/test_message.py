"""Tests of messages in flight: the start of their second exchange, waits for them, and norms of their means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.sync.message import Message, WeightedMessage
from tests.distributed.fake_engine import Scenario, edit
from tests.distributed.threads import ThreadComms, simulate


def start_of_second(kind: type[Message], due: int) -> int | None:
    """Return the age at which a message that is applied after `due` steps starts its second exchange."""
    message = kind.__new__(kind)
    started: list[int] = []
    message._pending, message._gathering = {0: SimpleNamespace(start_second_phase=lambda: started.append(age))}, None
    for age in range(1, due + 1):
        message.advance(age, due)
    assert len(started) <= 1
    return started[0] if started else None


def test_a_second_exchange_starts_in_the_middle_and_has_more_of_odd_steps() -> None:
    assert [start_of_second(Message, due) for due in (1, 2, 3, 4, 5)] == [None, 1, 1, 2, 2]


def test_a_weighed_message_is_sent_one_step_later() -> None:
    assert [start_of_second(WeightedMessage, due) for due in (1, 2, 3, 4, 5)] == [None, None, 2, 2, 3]


def test_all_that_is_in_flight_can_be_waited_for() -> None:
    """`wait` waits for the weighing of an unsent message or the means of a sent one, and changes nothing."""
    waited: list[str] = []
    for name in ("exchange", "mean"):
        message, pending = (
            WeightedMessage.__new__(WeightedMessage),
            SimpleNamespace(wait=lambda name=name: waited.append(name)),
        )
        message._gathering, message._pending = (pending, {}) if name == "exchange" else (None, {0: pending})
        before = dict(vars(message))
        message.wait()
        assert vars(message) == before
    assert waited == ["exchange", "mean"]


@pytest.mark.parametrize("late", [{}, {"kind": "overlapped", "steps": 2}], ids=["blocking", "overlapped"])
@pytest.mark.parametrize(
    ("clip", "wire", "measured"), [(1e6, "fp32", False), (1e6, "int8", True), (1e-3, "fp32", True)]
)
def test_replicas_compute_the_norm_of_a_mean_only_if_it_may_be_clipped(
    clip: float, wire: str, measured: bool, late: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()
    original = ThreadComms.start_all_reduce

    def noted(self: ThreadComms, tensor: Any, what: str, *args: Any) -> Any:
        asked.add(what)
        return original(self, tensor, what, *args)

    monkeypatch.setattr(ThreadComms, "start_all_reduce", noted)
    schedule = {"schedule": late} if late else {}
    simulate(Scenario(edit(every=3, penalty={"clip": clip}, wire=wire, **schedule), 2, 2, steps=7))
    assert "weighing pseudo-gradients" in asked
    assert ("norm of a pseudo-gradient" in asked) == measured
