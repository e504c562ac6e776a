"""Tests of collectives that fail: the error tells their purpose, the reason, and whether a peer was lost."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms, is_lost_peer

NCCL_SAYS = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


@pytest.mark.parametrize(
    ("said", "reason", "is_lost"),
    [
        ("NCCL error\nLast error:\nsocket closed", "NCCL error Last error: socket closed", True),
        (NCCL_SAYS, " ".join(NCCL_SAYS.split()), False),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", None, False),
        ("NCCL timeout\n" + 100 * "frame of C++\n", ("NCCL timeout " + 100 * "frame of C++ ")[:400], True),
    ],
    ids=["lost", "out of memory", "invalid usage", "stack"],
)
def test_what_nccl_says_last_is_shown_and_only_a_lost_peer_is_called_one(
    monkeypatch: pytest.MonkeyPatch, said: str, reason: str | None, is_lost: bool
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    error = dist.DistBackendError(said)
    failure = str(Comms(None).failure("averaging block 2", error))
    lost = "; a peer died or took longer than run.timeout_seconds" if is_lost else ""
    assert failure.endswith(f" on {socket.gethostname()}: {reason or said}{lost}")
    assert is_lost_peer(error) == is_lost


def test_a_collective_that_can_not_begin_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [192.0.2.1]:4711\nand more")

    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(TrainingError) as failed:
        Comms(None, axis="replica").start_work("averaging block 2", 0.0, refuse)
    assert str(failed.value) == (
        f"averaging block 2 over the replica axis failed on rank 3 (replica 0 of 1) on {socket.gethostname()}: "
        "Connection closed by peer [192.0.2.1]:4711 and more; a peer died or took longer than run.timeout_seconds"
    )


@pytest.mark.parametrize(
    ("exchange", "collective"),
    [("all_gather_object", "all_gather_object"), ("broadcast_object", "broadcast_object_list")],
)
def test_an_exchange_of_objects_that_fails_says_what_it_was_for(
    monkeypatch: pytest.MonkeyPatch, exchange: str, collective: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Timed out waiting 2000ms for recv operation to complete\nand more")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, collective, refuse)
    comms = Comms(None, axis="world")
    comms.rank, comms.size = 1, 2
    with pytest.raises(TrainingError) as failed:
        getattr(comms, exchange)("mine", "comparing token shards")
    assert str(failed.value) == (
        f"comparing token shards over the world axis failed on rank 1 (world 1 of 2) on {socket.gethostname()}: "
        "Timed out waiting 2000ms for recv operation to complete and more; a peer died or took longer than run.timeout_seconds"
    )
