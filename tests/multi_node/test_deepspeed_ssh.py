"""Test of DeepSpeed's launcher, which starts a run on two hosts over ssh, from a hostfile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmtrain.compare.cluster.hosts import Host, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from tests.end_to_end.runs import Runs, environment, exact_lines
from tests.multi_node.runs import PORT, SIX_STEPS, arguments, ends, needs_hosts, start

MISSING = [name for name in ("sshd", "ssh-keygen", "ssh", "pdsh") if shutil.which(name) is None]
pytestmark = [
    needs_hosts,
    pytest.mark.deep,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (packages openssh-server, pdsh)"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
SEPARATION = Path("/run/sshd")
"""Folder that sshd requires. The package of sshd creates it at boot."""


@contextmanager
def ssh_between(made: list[Host], folder: Path) -> Iterator[Path]:
    """Run sshd on every host. Yields a folder with an `ssh` that logs in to all hosts without a question."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    server = folder / "sshd_config"
    server.write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPermitRootLogin prohibit-password\n"
        "StrictModes no\nUsePAM no\nPidFile none\nSubsystem sftp internal-sftp\n"
    )
    client = folder / "ssh_config"
    client.write_text(
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\nConnectTimeout 20\n"
    )
    tools = folder / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {client} "$@"\n')
    (tools / "ssh").chmod(0o755)
    made_here = not SEPARATION.exists()
    SEPARATION.mkdir(exist_ok=True)
    log = folder / "sshd.log"
    servers = [host.popen([shutil.which("sshd"), "-D", "-f", str(server), "-E", str(log)]) for host in made]
    try:
        deadline = time.monotonic() + 20
        while (log.read_text() if log.exists() else "").count("Server listening on 0.0.0.0") < len(made):
            assert time.monotonic() < deadline, f"sshd does not listen after 20 s: {log.read_text()}"
            time.sleep(0.05)
        yield tools
    finally:
        for process in servers:
            process.terminate()
            process.wait(timeout=20)
        if made_here:
            SEPARATION.rmdir()


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
