"""Memory that the plan estimates for messages, compared with counts by hand."""

from __future__ import annotations

import pytest

from tests.unit.test_plan_memory import planned


def test_synchronous_has_no_messages_of_ours(tmp_path) -> None:
    assert planned(tmp_path, "sync.method=synchronous").messages == 0
    few, many = (planned(tmp_path, "sync.schedule=layerwise", f"sync.schedule.prefetch={n}") for n in (0, 2))
    assert 0 < few.messages < many.messages


@pytest.mark.parametrize(
    ("wire", "encoded"), [("bf16", 4.0), ("int8", 2 * (1 + 4 / 128)), ("topk", (1 + 4) * (96 + 16 + 8) / 4096)]
)
def test_errors_of_a_message_in_flight_add_its_encoded_bytes(tmp_path, wire: str, encoded: float) -> None:
    """CO2 has all 3864 values in flight. A synchronization sends 3 blocks, of up to 808 values, at once. The errors for
    the next message take 4 bytes per value."""
    plain = planned(tmp_path, "sync.method=co2", replicas=4)
    assert plain.messages == 4 * 3864 + 5 * 4 * 808
    fed_back = planned(tmp_path, "sync.method=co2", f"sync.wire={{kind: {wire}, error_feedback: true}}", replicas=4)
    assert fed_back.messages == plain.messages + 4 * 3864 + int(encoded * 3864) + int(3 * encoded * 808)
    assert fed_back.host_checkpoint == plain.host_checkpoint + 4 * 3864, "messages have arrived by then"
    if wire != "topk":
        assert planned(tmp_path, "sync.method=co2", f"sync.wire={wire}", replicas=4).messages == plain.messages
