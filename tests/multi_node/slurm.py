"""A real Slurm cluster on this machine: munged, slurmctld and one slurmd per node, in a scratch folder.

The nodes are called 127.0.0.1, 127.0.0.2, ... so that a node's name is also an address that reaches it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtrain.parallel.network import unused_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "munged")
PACKAGES = "slurm-wlm and munge (Debian's names)"
MARK = "LLMTRAIN_TEST_SLURM"
"""Environment variable of all processes of a cluster, with the process id of the test run."""
START_SECONDS = 60
STOP_SECONDS = 20

CONFIGURATION = """\
ClusterName=llmtrain
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1
ReturnToService=2
KillWait=30
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
"""
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n"  # read at start, though nothing here uses cgroups


class Slurm:
    """Slurm's commands, for the cluster whose files are in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Daemons, jobs and ranks inherit the mark; they do not share a process group, nor even a session.
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), MARK: str(os.getpid())}

    def command(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands, which must succeed within 60 s, and return its output."""
        done = subprocess.run(
            words, cwd=cwd, env={**self.environment, **(env or {})}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints: JobState, Restarts, ExitCode and others."""
        shown = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(field.partition("=")[::2] for field in shown.split() if "=" in field)

    def wait_for_job(self, number: str, done: Callable[[dict[str, str]], bool], seconds: float, what: str) -> None:
        """Wait until `done` returns true for the job's fields. Fail with the last fields after `seconds`."""
        wait_until(lambda: done(self.job(number)), seconds, lambda: f"{what}; last: {self.job(number)}\n{self.logs()}")

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted(self.folder.glob("*.log"))
        )


def why_not() -> str | None:
    """Return why no Slurm cluster can be started here, or None if one can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"no {', '.join(missing)} here; install {PACKAGES}" if missing else None


@contextmanager
def slurm_cluster(folder: Path, nodes: int, cpus: int) -> Iterator[Slurm]:
    """Start a cluster of `nodes` nodes with `cpus` CPUs each, or skip the test with the reason why there is none.

    On exit, everything that it started is killed, jobs included.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason)
    _kill(_is_gone)  # processes that a killed test run has left
    slurm = Slurm(folder)
    daemons: list[subprocess.Popen] = []
    try:
        for command in _write_configuration(folder, nodes, cpus):
            with (folder / "daemons.log").open("a") as log:
                daemons.append(
                    subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                )
            if "munged" in command[0]:
                wait_until((folder / "munge.socket").exists, START_SECONDS, lambda: f"no munged\n{slurm.logs()}")
        wait_until(lambda: _idle(slurm) == nodes, START_SECONDS, lambda: f"not all nodes are idle\n{slurm.logs()}")
        yield slurm
    finally:
        _stop(slurm, daemons)


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Wait for a condition. Fail with `what()` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what()}"
        time.sleep(0.05)


def _write_configuration(folder: Path, nodes: int, cpus: int) -> list[list[str]]:
    """Write all files, and return the commands of the daemons in the order of their start."""
    controller, *ports = (unused_port() for _ in range(nodes + 1))
    names = [f"127.0.0.{1 + node}" for node in range(nodes)]
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    for name in names:
        (folder / f"spool-{name}").mkdir()
    lines = [CONFIGURATION.format(folder=folder, controller_port=controller)]
    lines += [
        f"NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} CPUs={cpus} State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    ]
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "cgroup.conf").write_text(CGROUP)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "seed", "log")]
    return [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)]


def _idle(slurm: Slurm) -> int:
    """Return the number of idle nodes; 0 while the controller does not answer."""
    words = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    shown = subprocess.run(words, env=slurm.environment, capture_output=True, text=True, timeout=60)
    return len(shown.stdout.split()) if shown.returncode == 0 else 0


def _stop(slurm: Slurm, daemons: list[subprocess.Popen]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    _kill(lambda owner: owner == os.getpid())


def _kill(whose: Callable[[int], bool]) -> None:
    """Kill the processes of clusters for whose test run's process id `whose` returns true."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_text(errors="replace").split("\0")
            owners = [int(value) for name, _, value in (entry.partition("=") for entry in variables) if name == MARK]
            if any(map(whose, owners)):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:  # gone, or not ours to read
            continue


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
