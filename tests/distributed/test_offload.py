"""Tests of offloaded anchors: they change no bit, however late their copies are made, and a missing wait is detected.

`LateCopies` takes the place of a GPU's side stream. It does the worst that a stream may do: it copies nothing before
the caller waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from llmtrain.parallel.comms import Comms
from tests.distributed.fake_engine import SPIKES, Scenario, choices, edit, train
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_bits


class LateCopies:
    """Offload that copies only when it is waited for. Until then, prefetched copies are NaN, and host copies old."""

    def __init__(self, waits: bool = True):
        self.waits = waits
        self.asked: list[Callable[[], object]] = []
        self.brought = self.released = self.most_at_once = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def prefetch(self, host_copy: torch.Tensor) -> LateCopy:
        copy = torch.full_like(host_copy, torch.nan)
        self.asked.append(partial(copy.copy_, host_copy))
        self.brought += 1
        self.most_at_once = max(self.most_at_once, self.brought - self.released)
        return LateCopy(self, copy, self.asked[-1])

    def write_back(self, host_copy: torch.Tensor, changed: torch.Tensor) -> None:
        self.asked.append(partial(host_copy.copy_, changed))

    def synchronize(self, last: Callable[[], object] | None = None) -> None:
        """Make all requested copies, or those up to `last`, in the order of the requests, as a stream does."""
        while self.asked if last is None else last in self.asked:
            self.asked.pop(0)()


class LateCopy:
    """Copy on the device, overwritten with NaN some time after its release."""

    def __init__(self, copies: LateCopies, copy: torch.Tensor, arrival: Callable[[], object]):
        self._copies, self._copy, self._arrival = copies, copy, arrival

    def use(self) -> torch.Tensor:
        if self._copies.waits:
            self._copies.synchronize(self._arrival)
        return self._copy

    def release(self) -> None:
        self._copies.released += 1
        self._copies.asked.append(partial(self._copy.fill_, torch.nan))  # the memory is reused after copies from it


def late(device: torch.device) -> LateCopies:
    return LateCopies()


def never_waited_for(device: torch.device) -> LateCopies:
    return LateCopies(waits=False)


OVERLAPPED = {"kind": "overlapped", "steps": 2, "fragments": 2, "alpha": 0.5}
PENALTY = {"z": 6.0, "min_rounds": 3, "temperature": 0.3, "clip": 0.5}
RUNS = {
    **{
        f"edit, prefetch {ahead}": (edit, {"penalty": PENALTY, "schedule": {"kind": "layerwise", "prefetch": ahead}})
        for ahead in (0, 1, 2, 9)
    },
    "diloco": (partial(choices, "diloco", 3), {}),
    "slowmo": (partial(choices, "slowmo", 3), {}),
    "streaming_diloco": (partial(choices, "streaming_diloco", 5), {"schedule": OVERLAPPED}),
    "co2": (partial(choices, "co2", 3), {}),
    "palsgd": (partial(choices, "palsgd", 3), {}),
    "int8": (partial(choices, "diloco", 3), {"wire": {"kind": "int8", "error_feedback": True}}),
}


def scenario_of(run: str, offload: bool, **changes: object) -> Scenario:
    section, parts = RUNS[run]
    scales = SPIKES if run.startswith("edit") else {}
    return Scenario(section(warmup_steps=1, offload=offload, **parts), 2, 2, steps=18, scales=scales, **changes)


@pytest.mark.parametrize("run", RUNS)
def test_late_copies_change_no_bit(run: str) -> None:
    """They change none in training and none in the state that is saved in the middle of it."""
    common = {"resume_after": 7, "save_after": (3, 4)}
    kept = simulate(scenario_of(run, offload=False, **common))
    assert_same_bits(simulate(scenario_of(run, offload=True, copies=late, **common)), kept)


@pytest.mark.parametrize("run", ["edit, prefetch 2", "diloco", "streaming_diloco", "co2", "palsgd"])
def test_a_wait_left_out_is_seen(run: str) -> None:
    kept = simulate(scenario_of(run, offload=False))
    with pytest.raises(AssertionError, match="forward"):
        assert_same_bits(simulate(scenario_of(run, offload=True, copies=never_waited_for)), kept)


def test_a_round_brings_each_anchor_twice_and_each_momentum_once() -> None:
    """EDiT needs an anchor for the norms that its penalty uses, and again for the outer step."""
    copies = LateCopies()
    sync = edit(every=2, penalty=PENALTY, offload=True, schedule={"kind": "layerwise", "prefetch": 0})
    scenario = Scenario(sync, 1, 1, steps=8, copies=lambda device: copies)
    one = Comms(None)
    train(scenario, one, one)
    assert copies.brought == copies.released == 4 * 3 * len(scenario.shapes)
    assert copies.most_at_once == 4  # anchor and momentum of a block and of the next one


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS)
def test_offload_on_a_gpu_changes_no_bit(run: str) -> None:
    one = Comms(None, torch.device("cuda"))
    kept, offloaded = (
        train(replace(scenario_of(run, offload, resume_after=7), replicas=1, shard=1), one, one)
        for offload in (False, True)
    )
    for ours, theirs in zip([*offloaded.forwards, offloaded.final], [*kept.forwards, kept.final], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(np.concatenate(a, axis=None), np.concatenate(b, axis=None))
