"""sshd on virtual hosts, and an `ssh` that logs in to them without a question."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmtrain.compare.cluster.hosts import Host

SEPARATION = Path("/run/sshd")
"""Folder that sshd requires. The package of sshd creates it at boot."""


@contextmanager
def ssh_between(made: Sequence[Host], folder: Path) -> Iterator[Path]:
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
