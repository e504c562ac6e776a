"""Tests of `llmtrain doctor` on one machine, and between hosts whose network has a known fault or speed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from llmtrain.compare.cluster.hosts import Host, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import RECIPE, TINY, environment, start
from tests.mother import run_llmtrain
from tests.multi_node.runs import ends, needs_hosts, start_rank

SECONDS = 200
"""Timeout of the doctor on a busy machine."""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [f"run.out_dir={tmp_path / 'runs'}", f"data.cache_dir={tmp_path / 'data'}"]


def lines_of(output: str) -> str:
    """Return an output as one line, because the table wraps long findings."""
    return re.sub(r"\s+", " ", output)


def doctor(*arguments: str) -> tuple[int, str]:
    """Run the doctor on this machine alone, and return the exit code and the output."""
    process = start([sys.executable, "-m", "llmtrain", "doctor", RECIPE, *arguments], environment())
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def test_alone_it_looks_at_this_machine_and_the_recipe(folders):
    code, output = doctor(*TINY, *folders)
    shown = lines_of(output)
    assert code == 0, output
    assert "ok llmtrain launch would start 4 processes on this machine alone" in shown
    assert "ok mesh: 2 replicas x 2 shards (no GPU: parallel.on_cpu)" in shown
    assert "lo (127.0.0.1)" in shown


def test_a_problem_is_exit_code_1_and_a_bad_recipe_2(folders):
    code, output = doctor(*TINY, *folders, "parallel.replica_network=wlan7")
    assert code == 1 and "problem parallel.replica_network is wlan7" in lines_of(output)
    code, output = doctor("optim.speed=3")
    assert code == 2 and "optim.speed" in output
    assert output.startswith("error: ") and output.count("\n") == 1, "the output holds more than the reason"


def examine(pair: list[Host], arguments: list[str], *of_the_second: str) -> tuple[list[int], str]:
    """Run the doctor on two hosts, the second with more arguments. Return the exit codes and the first host's output."""
    started = []
    for rank, host in enumerate(pair):
        words = [*arguments, *(of_the_second if rank else ())]
        started.append(start_rank(host, rank, 2, pair[0].address, run_llmtrain, "doctor", RECIPE, *words))
    ended = ends(started, SECONDS)
    return [code for code, _ in ended], ended[0][1]


@needs_hosts
@pytest.mark.deep
def test_between_hosts_it_measures_the_network(folders):
    with virtual_cluster([HostLimits(bandwidth_mbit=80)] * 2) as pair:
        codes, output = examine(pair, [*TINY, *folders, "parallel.shards=1"])
    shown = lines_of(output)
    assert codes == [0, 0], output
    assert "host0 (10.77.0.1), eth0: rank 0 on cpu" in shown and "host1 (10.77.0.2), eth0: rank 1 on cpu" in shown
    assert "the same llmtrain, torch, transformers, python, recipe on all 2 ranks" in shown
    assert "clocks agree to" in shown
    # 80 Mbit/s are 10 MB/s. What a token bucket lets through at once after a pause adds only a little.
    number = r"([\d.]+) MB/s"
    (link,) = re.findall(
        rf"host1 \(10.77.0.2\) to host0 \(10.77.0.1\): [\d.]+ ms round trip, {number} sent, {number}", shown
    )
    (replicas,) = re.findall(
        rf"replica axis, between replicas: all-reduce over 2 ranks sends .*? round trip, {number}", shown
    )
    for rate in (*link, replicas):
        assert 1 < float(rate) < 13, output
    assert "a synchronization of this model: " in shown
    assert re.search(
        r"predicted for this recipe \(.*?\): a step computes for \S+ \S+ and waits for the network for", shown
    )
    assert "shard axis: one rank, nothing to send inside a replica" in shown


@needs_hosts
def test_hosts_that_differ_or_can_not_talk_are_problems_on_all_ranks(folders):
    with virtual_cluster([HostLimits()] * 2, networks=2) as pair:
        pair[1].unplug(1)
        replicas_over_eth1 = [*TINY, *folders, "parallel.shards=1", "parallel.replica_network=eth1"]
        codes, output = examine(pair, replicas_over_eth1, "optim.lr=2e-3")
    shown = lines_of(output)
    assert codes == [1, 1], output
    assert re.search(r"problem recipe differs: optim\.lr is \S+ for rank 0, 0\.002 for rank 1", shown)
    assert "problem host1 (10.77.1.2) can't reach host0 (10.77.1.1): " in shown
    assert "warning not measured, because of the problems found" in shown
