"""Tests of ranks that die on one of several hosts, and of hosts that go away. Each host has its own launch/train.sh."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from llmtrain.compare.cluster.hosts import Host, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.config import DataSection
from llmtrain.data.dataset import TOKENIZER
from llmtrain.data.prepare import prepare
from tests.end_to_end.runs import Runs, exact_lines, ranks_of
from tests.mother import Process
from tests.multi_node.runs import PORT, ends, errors, fork, needs_hosts, start

pytestmark = needs_hosts
SECONDS = 240
"""Timeout of a run on a busy machine."""
LONG = ("train.steps=30", "train.global_batch=12", "train.micro_batch=2")
TIMEOUT = 20
"""Value of run.timeout_seconds, which is short because several runs end only after it."""


def train_sh(
    hosts: list[Host], runs: Runs, name: str, *overrides: str, held_after: int | None = None
) -> list[Process | subprocess.Popen]:
    """Start launch/train.sh with one rank on each host. With `held_after`, return once rank 1 waits after that step."""
    variables = {"NNODES": str(len(hosts)), "MASTER_ADDR": hosts[0].addresses[0], "MASTER_PORT": PORT}
    keys = ("parallel.shards=1", f"parallel.replicas={len(hosts)}", f"run.timeout_seconds={TIMEOUT}", *overrides)
    if held_after is None:
        command = runs.command(name, *keys)
        return [start(host, command, NODE_RANK=str(rank), **variables) for rank, host in enumerate(hosts)]
    held = runs.held(name, held_after, *keys)
    launchers = [fork(host, *held, NODE_RANK=str(rank), **variables) for rank, host in enumerate(hosts)]
    runs.wait_until_held(name, launchers[0])
    return launchers


@pytest.mark.deep
def test_a_rank_that_dies_is_started_again_with_all_others_of_all_hosts(runs: Runs) -> None:
    with virtual_cluster([HostLimits()] * 2) as hosts:
        launchers = train_sh(hosts, runs, "rank-dies", "run.restarts=1", held_after=4)
        runs.wait_for("rank-dies", 3)  # the checkpoint is written in the background
        (victim,) = ranks_of(launchers[1])
        victim.kill()
        ended = ends(launchers, SECONDS)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "the run failed; its ranks are started again (0 of 1 restarts left)" in ended[0][1]
    assert runs.exact("rank-dies") == exact_lines(runs.reference(2, 1))


@pytest.mark.deep
def test_a_frozen_rank_ends_the_run_on_all_hosts_and_leaves_no_process(runs: Runs) -> None:
    with virtual_cluster([HostLimits()] * 2) as hosts:
        launchers = train_sh(hosts, runs, "frozen", "run.restarts=0", "train.steps=100000")
        runs.wait_for("frozen", 6)
        (frozen,) = ranks_of(launchers[1])
        frozen.suspend()
        began = time.monotonic()
        ended = ends(launchers, SECONDS)
        assert time.monotonic() - began < TIMEOUT + 10
        assert all(host.pids() == [] for host in hosts)
    assert [code for code, _ in ended] == [1, 1], ended
    (said,) = errors(ended[0][1])
    in_a_collective = (
        "failed on rank 0 (" in said and " on host0: " in said and "took longer than run.timeout_seconds" in said
    )
    assert in_a_collective or "step-00000006 was not written within" in said  # frozen before it confirmed its part


@pytest.mark.deep
def test_a_network_that_is_cut_ends_the_run_on_both_sides(runs: Runs) -> None:
    with virtual_cluster([HostLimits()] * 2) as hosts:
        launchers = train_sh(hosts, runs, "cut", "run.restarts=0", "train.steps=100000")
        runs.wait_for("cut", 6)
        hosts[1].popen(["ip", "link", "set", "eth0", "down"]).wait(timeout=10)
        began = time.monotonic()
        ended = ends(launchers, SECONDS)
        assert time.monotonic() - began < 3 * TIMEOUT + 20, "ranks, then launchers, waited too long"
        assert all(host.pids() == [] for host in hosts)
    assert [code for code, _ in ended] == [1, 1], ended
    for rank, (_, output) in enumerate(ended):
        # The error depends on the message in flight: llmtrain's own, or one inside a library, such as a checkpoint's.
        named = (f"failed on rank {rank} (", f"rank {rank} (replica {rank}, shard 0) lost a peer in step")
        named += ("check that the disk and all other ranks respond",)
        assert any(words in line for line in errors(output) for words in named), output


@pytest.mark.deep
def test_a_network_that_fails_for_a_while_costs_only_time(runs: Runs) -> None:
    """The link is restored within half of run.timeout_seconds, because TCP may pause for about as long as it was down."""
    steps, name = 300, "outage"
    keys = ("run.restarts=0", f"train.steps={steps}", "schedule.warmup_steps=2", "checkpoint.every=50")

    def last_step() -> int:
        return max((line["step"] for line in runs.lines(name) if "train/loss" in line), default=0)

    with virtual_cluster([HostLimits()] * 2) as hosts:
        launchers = train_sh(hosts, runs, name, *keys)
        runs.wait_for(name, 50)
        hosts[1].unplug()
        time.sleep(1)  # for what has been sent
        before = last_step()
        time.sleep(TIMEOUT / 3 - 1)
        assert last_step() == before < steps, "the run did not need the network"
        hosts[1].plug_in()
        ended = ends(launchers, SECONDS)
    assert [code for code, _ in ended] == [0, 0], ended
    assert [line["step"] for line in runs.lines(name) if "train/loss" in line] == list(range(1, steps + 1))


@pytest.mark.deep
@pytest.mark.parametrize(("choice", "batch"), [("continue", 12), ("continue", 18), ("stop", 12)])
def test_a_host_that_goes_away(runs: Runs, choice: str, batch: int) -> None:
    """Three replicas can share a batch of 12 or 18 sequences. Two replicas can share 12, but of 18 only 16."""
    name = f"host-{choice}-{batch}"
    with virtual_cluster([HostLimits()] * 3) as hosts:
        keys = (*LONG, f"train.global_batch={batch}", f"run.on_replica_loss={choice}", "run.restarts=1")
        launchers = train_sh(hosts, runs, name, *keys, held_after=7)
        runs.wait_for(name, 6)
        hosts[1].kill()
        first, _, third = ends(launchers, SECONDS)
    if choice == "continue":
        assert first[0] == third[0] == 0, (first, third)
        assert "its ranks are started again on 2 of 3 nodes" in first[1]
        change = ", with 16 sequences per step instead of 18" if batch == 18 else ""
        assert f"{change}, written by 3 replicas x 1 shard: 2 replicas start from their mean" in first[1]
        steps = [line["step"] for line in runs.lines(name) if "train/loss" in line]
        assert steps == list(range(1, 31)), "a step is missing or logged twice"
    else:
        assert first[0] == third[0] == 1, (first, third)
        assert "node 1 on host1: no heartbeat from its launcher" in first[1]
        assert "error: node 0 on host0 failed: node 1 on host1: no heartbeat" in third[1]
        assert (runs.path(name) / "checkpoints/step-00000006").exists()


@pytest.mark.deep
def test_a_site_that_goes_away_leaves_the_others_to_their_own_texts(runs: Runs, tmp_path: Path) -> None:
    """The site's text is gone, too, but the site's position in it stays in the checkpoint."""
    library = Path(sysconfig.get_path("stdlib"))
    for site, modules in {"a": ("heapq", "textwrap"), "b": ("queue", "shlex"), "c": ("bisect", "argparse")}.items():
        text = "".join((library / f"{module}.py").read_text() for module in modules)
        (tmp_path / f"{site}.txt").write_text("\n<|endoftext|>\n".join(text.split("\n\n")))
    trained = prepare(
        DataSection(source=f"{tmp_path}/a.txt", tokenizer="train:400", cache_dir=f"{tmp_path}/data"), 1, 1
    )
    entries = ", ".join(f"{{source: {tmp_path}/{site}.txt}}" for site in "abc")
    texts = (
        "data.source=null",
        f"data.per_replica=[{entries}]",
        f"data.tokenizer={trained.directory / TOKENIZER}",
        f"data.cache_dir={tmp_path}/tokens",
        "data.validation_fraction=0.2",
    )
    with virtual_cluster([HostLimits()] * 3) as hosts:
        keys = (*LONG, *texts, "run.on_replica_loss=continue", "run.restarts=1")
        launchers = train_sh(hosts, runs, "sites", *keys, held_after=7)
        runs.wait_for("sites", 6)
        hosts[1].kill()
        (tmp_path / "b.txt").unlink()
        for folder in (tmp_path / "tokens").glob("b-*"):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        first, _, third = ends(launchers, SECONDS)
    assert first[0] == third[0] == 0, (first, third)
    assert "its ranks are started again on 2 of 3 nodes" in first[1]
    assert [line["step"] for line in runs.lines("sites") if "train/loss" in line] == list(range(1, 31))
    texts_read = json.loads((runs.path("sites") / "summary.json").read_text())["texts"]
    read = {name: text["sequences"] for name, text in texts_read.items()}
    assert sum(read.values()) == 30 * 12 and read["a"] == read["c"] > 2 * read["b"] > 0
    assert texts_read["a"]["eval_loss"] > 0 and texts_read["b"]["eval_loss"] is None


@pytest.mark.deep
def test_signals_are_no_failures(runs: Runs) -> None:
    """SIGTERM to one host's launcher stops all ranks with a checkpoint, and no launcher restarts them."""
    with virtual_cluster([HostLimits()] * 2) as hosts:
        launchers = train_sh(hosts, runs, "stopped", "train.steps=100000")
        runs.wait_for("stopped", 6)
        launchers[0].send_signal(signal.SIGTERM)
        ended = ends(launchers, SECONDS)
    assert [code for code, _ in ended] == [3, 3], ended
    assert Path(runs.path("stopped") / "summary.json").exists()
