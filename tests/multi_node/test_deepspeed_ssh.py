"""Test of DeepSpeed's launcher, which starts a run on two hosts over ssh, from a hostfile."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmtrain.compare.cluster.hosts import virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import Runs, environment, exact_lines
from tests.multi_node.runs import PORT, SIX_STEPS, arguments, ends, needs_hosts, start
from tests.multi_node.ssh import ssh_between

MISSING = [name for name in ("sshd", "ssh-keygen", "ssh", "pdsh") if shutil.which(name) is None]
pytestmark = [
    needs_hosts,
    pytest.mark.deep,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (packages openssh-server, pdsh)"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def test_two_ranks_on_each_of_two_hosts(runs: Runs, tmp_path: Path):
    hostfile, variables = tmp_path / "hostfile", tmp_path / "deepspeed_env"
    hostfile.write_text("host0 slots=2\nhost1 slots=2\n")
    carried = ("PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
    lines = [f"{name}={environment()[name]}" for name in carried]
    variables.write_text("\n".join([*lines, "HF_HUB_OFFLINE=1", "DS_ACCELERATOR=cpu"]) + "\n")
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(hostfile), "--master_port", PORT]
    run = arguments(runs, "deepspeed", *SIX_STEPS, "parallel.on_cpu=null")
    with virtual_cluster([HostLimits()] * 2) as made, ssh_between(made, tmp_path) as tools:
        command = [*deepspeed, "--master_addr", made[0].addresses[0], "launch/train.sh", *run]
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        launcher = start(made[0], command, PATH=path, DS_ENV_FILE=str(variables), DS_ACCELERATOR="cpu")
        [(code, output)] = ends([launcher], 240)
    assert code == 0, output
    assert "host0: mesh: 2 replicas x 2 shards on cpu (2 nodes of 2: a node is a shard group)" in output
    assert runs.exact("deepspeed") == exact_lines(runs.reference(2, 2, *SIX_STEPS))
