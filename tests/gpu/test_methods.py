"""Tests of every part of a method: delayed streams change no bit of the result, and the losses are those of a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.fake_engine import choices
from tests.distributed.pool import RankPool
from tests.gpu.on_gpu import case_of, train_to_bits

OVERLAPPED = {"kind": "overlapped", "steps": 2, "fragments": 2, "alpha": 0.5}
LATE = ("side_stream_delayed", "main_stream_delayed")
MUON = {"kind": "muon", "lr": 1e-2, "muon": {"precision": "fp32"}}


def streaming(**changes: Any) -> Any:
    return choices("streaming_diloco", 4, **{"warmup_steps": 1, "schedule": OVERLAPPED, "offload": True, **changes})


CASES = {
    "radial": case_of(streaming(reduction="radial", wire={"kind": "fp32"}), 2),
    "median_norm": case_of(streaming(reduction="median_norm", wire={"kind": "bf16"}), 2),
    "token_weighted": case_of(choices("edit", 2, warmup_steps=1, reduction="token_weighted", offload=True), 2),
    "moments": case_of(choices("des_loc", 2, moments={"first": 1, "second": 2}), 2),
    "gpa": case_of(choices("gpa", 2, outer={"kind": "gpa", "decay": 0.7}, offload=True), 2),
    "muon": case_of(choices("muloco", 3, offload=True), 2, optim=MUON),
    "topk": case_of(choices("sparseloco", 3, offload=True), 2),
    "fp4": case_of(streaming(wire={"kind": "fp4", "error_feedback": True}), 2),
    "2bit": case_of(choices("diloco", 2, wire={"kind": "2bit", "error_feedback": True}), 2),
    "delayed": case_of(choices("co2", 2, warmup_steps=1, offload=True, wire={"kind": "int8"}), 2),
}
CLOSE = {"topk": 1e-3, "fp4": 1e-3, "2bit": 1e-3, "delayed": 1e-3}
"""Relative tolerances for losses where a last bit can decide how a value is rounded; 1e-4 elsewhere."""


@pytest.mark.parametrize("name", CASES)
def test_late_streams_change_no_bit_and_losses_are_those_of_a_cpu(ranks: RankPool, name: str) -> None:
    case = replace(CASES[name], steps=8)
    on_time, late = (ranks.run(train_to_bits, case, changes, world_size=2) for changes in ((), LATE))
    assert late == on_time
    on_cpu = ranks.run(train_to_bits, replace(case, device="cpu"), world_size=2)
    for ours, theirs in zip(on_time, on_cpu, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=CLOSE.get(name, 1e-4))
        assert ours.losses[-1] < ours.losses[0]
