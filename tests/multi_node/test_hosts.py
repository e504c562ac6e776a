"""Tests of one run on several hosts, each with its own torchrun: it logs what the same mesh logs on one host."""

from __future__ import annotations

import sys

import pytest

from llmtrain.compare.cluster.hosts import Host, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import Runs, exact_lines
from tests.multi_node.runs import PORT, SIX_STEPS, arguments, ends, needs_hosts, start

pytestmark = needs_hosts
SECONDS = 240
"""Timeout of a run on a busy machine."""


def torchrun(made: list[Host], run: list[str], **variables: str) -> list[tuple[int, str]]:
    """Run one rank on each host, with a c10d rendezvous on the first host. Return the exit codes and outputs."""
    meeting = ["--nnodes", str(len(made)), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].name}:{PORT}"]
    options = [*meeting, "--rdzv-id", "hosts", "--nproc-per-node", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "llmtrain", "train", *run]
    return ends([start(host, command, **variables) for host in made], SECONDS)


@pytest.mark.deep
def test_two_hosts_by_torchrun(runs: Runs):
    keys = [*SIX_STEPS, "parallel.replicas=auto", "parallel.shards=auto"]
    with virtual_cluster([HostLimits()] * 2) as made:
        ended = torchrun(made, arguments(runs, "torchrun", *keys))
    assert [code for code, _ in ended] == [0, 0], ended
    assert any("mesh: 2 replicas x 1 shard on cpu (2 nodes of 1: a node is a shard group)" in out for _, out in ended)
    assert runs.exact("torchrun") == exact_lines(runs.reference(2, 1, *SIX_STEPS))


@pytest.mark.deep
def test_two_hosts_by_train_sh(runs: Runs):
    with virtual_cluster([HostLimits()] * 2) as made:
        run = arguments(runs, "train-sh", "parallel.replicas=2", "parallel.shards=1")
        variables = {"NNODES": "2", "MASTER_ADDR": made[0].addresses[0], "MASTER_PORT": PORT}
        started = [
            start(host, ["bash", "launch/train.sh", *run], fresh=True, NODE_RANK=str(rank), **variables)
            for rank, host in enumerate(made)
        ]
        ended = ends(started, SECONDS)
    assert [code for code, _ in ended] == [0, 0], ended
    assert runs.exact("train-sh") == exact_lines(runs.reference(2, 1))


@pytest.mark.deep
def test_replicas_and_shards_have_a_network_each(runs: Runs):
    """Four hosts have one rank each, so every message passes a network card, and the cards' counters show which. There
    are so many steps that the messages of training outweigh those of the rendezvous."""
    length = [*SIX_STEPS, "train.steps=30"]
    keys = [*length, "parallel.replicas=2", "parallel.shards=2", "parallel.shard_across_nodes=true"]
    networks = ["parallel.replica_network=nic9,eth1", "parallel.shard_network=eth0"]
    with virtual_cluster([HostLimits()] * 4, networks=2) as made:
        ended = torchrun(made, arguments(runs, "networks", *keys, *networks))
        sent = [{network: host.sent(network) for network in (0, 1)} for host in made]
    assert [code for code, _ in ended] == [0] * 4, ended
    assert runs.exact("networks") == exact_lines(runs.reference(2, 2, *length))
    between_replicas = max(line.get("comm/bytes_total", 0) for line in runs.exact("networks")) / 4
    for host in sent:
        assert between_replicas < host[1] < 2 * between_replicas
        assert host[0] > 10 * between_replicas
