"""How many processes launch/train.sh starts."""

import pytest
import torch

from llmtrain.launch import processes_here


@pytest.mark.parametrize(
    ("gpus", "replicas", "shard", "nodes", "expected"),
    [
        (0, 2, 2, 1, 4),
        (0, "auto", "auto", 1, 1),
        (0, "auto", 4, 1, 4),
        (0, 2, 2, 2, 2),
        (8, "auto", "auto", 1, 8),
        (8, "auto", 4, 1, 8),
        (8, 2, 2, 1, 4),
        (8, 8, 8, 8, 8),
        (1, 2, 2, 1, 1),
    ],
)
def test_one_process_a_gpu_or_as_the_mesh_asks(monkeypatch, gpus, replicas, shard, nodes, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert processes_here(replicas, shard, nodes) == expected
