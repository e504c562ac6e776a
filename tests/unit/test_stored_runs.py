"""Tests of the comparison of stored runs: it sees a difference of one bit, and knows names that have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.stored_runs import differences


def run_of(folder: Path, line: dict[str, Any], state: dict[str, Any], weights: torch.Tensor) -> Path:
    checkpoint = folder / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, **line}) + "\n")
    (checkpoint / "state.json").write_text(json.dumps(state))
    dcp.save({"model": {"w": weights}}, storage_writer=dcp.FileSystemWriter(checkpoint), no_dist=True)
    return folder


LINE = {"train/loss": 0.1, "comm/seconds": 7.0, "sync/late": None}
STATE = {"position": 4, "ranks": [{"rng": [1, 2]}], "files": {"a": "b"}}
WEIGHTS = torch.tensor([0.0, float("nan"), 2.0])


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return run_of(tmp_path / "before", LINE, STATE, WEIGHTS)


def test_only_clocks_and_digests_may_differ(tmp_path: Path, before: Path) -> None:
    after = run_of(tmp_path / "after", {**LINE, "comm/seconds": 8.0}, {**STATE, "files": {}}, WEIGHTS.clone())
    assert differences(before, after, {}) == []


def test_a_bit_a_type_and_a_name_are_seen(tmp_path: Path, before: Path) -> None:
    line, state = {**LINE, "train/loss": 0.1 + 2**-56}, {"global_step": 4.0, "ranks": [{"rng": [1, 3]}]}
    after = run_of(tmp_path / "after", line, state, WEIGHTS * torch.tensor([-1.0, 1.0, 1.0]))
    at = "at step-00000004"
    assert differences(before, after, {"state": [["^position ", "global_step "]]}) == [
        "metrics: train/loss at 4 was 0.1, is 0.10000000000000002",
        f"state: global_step {at} was 4, is 4.0",
        f"state: ranks/0/rng/1 {at} was 2, is 3",
        f"tensors: model/w {at} was [3] torch.float32, [0.0, nan, 2.0], is [3] torch.float32, [-0.0, nan, 2.0]",
    ]
    assert f"state: global_step {at} is new" in differences(before, after, {})
    assert f"state: position {at} is gone" in differences(before, after, {})
    assert f"state: ranks/0/rng/1 {at} was 2, is 3" not in differences(before, after, {"state": [["/rng/", None]]})
