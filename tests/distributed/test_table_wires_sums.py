"""Tests of sums of messages in wire formats whose levels come from a table."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.oracle_wire import rounded_sum
from tests.distributed.test_comms_wire import Case, assert_equal_bits, by_case, bytes_of
from tests.unit.test_wire import TABLES


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", TABLES)
def test_sums_losses_and_bytes_are_the_references(kind: str, world: int) -> None:
    cases = [Case(kind, numel, heavy_tails=heavy) for numel in (1, 127, 513, 5003) for heavy in (False, True)]
    for case, outcomes in by_case(cases, world).items():
        messages = case.messages(world)
        result, lost = rounded_sum(messages, kind)
        assert_equal_bits([outcome.result for outcome in outcomes])
        for rank, outcome in enumerate(outcomes):
            if not case.heavy_tails:  # the order of additions does not matter
                np.testing.assert_allclose(outcome.result, result, rtol=1e-12, atol=1e-12, err_msg=str(case))
                np.testing.assert_allclose(outcome.lost, lost[rank], rtol=1e-12, atol=1e-12, err_msg=str(case))
        missing = np.abs(messages.sum(0) - outcomes[0].result - sum(outcome.lost for outcome in outcomes))
        assert missing.max() <= 1e-12 * np.abs(messages).max(), "result and rounding errors add up to the exact sum"
        assert {outcome.counted for outcome in outcomes} == {bytes_of(case, world)}
        assert {outcome.sent for outcome in outcomes} == {outcomes[0].counted}
