"""Recovery of a run whose ranks, hosts or network fail, with launch/train.sh and with torchrun's elastic c10d rendezvous.

    sudo python benchmarks/restarts.py                        # needs root for virtual hosts; about half an hour
    sudo python benchmarks/restarts.py --only 'rank dies'

Three virtual hosts train a small model with one rank per host. `train.sh` is started on each host as
launch/README.md says. `c10d` is the alternative in torch: `torchrun --rdzv-backend c10d --nnodes 2:3 --max-restarts 1` with
`llmtrain train`, which resumes from the last checkpoint of the same folder. Its timeouts are shorter than the defaults, so
that it does not wait 30 s for nodes that may still come (`last_call_timeout`). Once all ranks have logged ten steps, a fault
is injected. *Continues* is the time from the fault to the fifth logged step after it. *Ends* is the time to the end of the last
launcher, with the exit codes of hosts 0 to 2. If the fault precedes the start, both times begin at the start, and *continues* ends
at step 5. With `--write`, the table goes to benchmarks/results/restarts/.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

from llmtrain.compare.cluster.hosts import VirtualHost, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits

PORT, TIMEOUT, FAULT_AT, BEYOND = 29533, 20, 10, 5
"""Port of host 0; run.timeout_seconds; step of the fault; steps logged after it for a run to count as continued."""
START_SECONDS, WATCH_SECONDS = 100.0, 150.0
"""Maximum seconds until the step of the fault, and after the fault."""
KEYS = [
    "train.steps=100000",
    "train.sequence_length=64",
    "train.global_batch=12",
    "train.micro_batch=2",
    "sync.warmup_steps=0",
    "parallel.on_cpu=null",
    "parallel.replicas=auto",
    "parallel.shards=1",
    "checkpoint.every=5",
    "log.every=1",
    "log.tensorboard=false",
    "eval.every=null",
    "eval.tokens=1000",
    "eval.sample_prompt=null",
    "run.restarts=1",
    "run.on_replica_loss=continue",
    f"run.timeout_seconds={TIMEOUT}",
]
C10D = "join_timeout=120,last_call_timeout=5"
"""Rendezvous settings of torchrun."""
COLUMNS = ("fault", "launcher", "continues after", "ends after", "exit codes", "last error line")

NOTES = """\
One trial per row. *Continues*: from the fault to the fifth logged step beyond it, or, for a host that never comes and a refused
recipe, from the start of the launchers to step 5. *Ends*: from the same time to the end of the last launcher, with the exit codes of
hosts 0 to 2.

What all trials at a296909 showed: both launchers resume from the last checkpoint, and neither survives the loss of host 0, whose
store all others use. What c10d does better: it continues sooner after a host is lost or its network is cut, because it does
not first wait until the host has been silent for some time; and it starts without a host that never comes.
What it does not do: a frozen rank costs more, because torchrun waits 30 s before it kills it and starts
interpreters anew; after a signal to stop on one host (a preemption), the run does not stop with a checkpoint, and the other
hosts continue; a
recipe that ranks refuse ends with 1 after a restart in vain, not with 2; no line names the host that is missing or lost; and
ranks may come back on other hosts, which moves replicas and shards. Launchers also meet for what comes before training: the
first node prepares data, and counts and numbers of nodes are compared. With c10d that meeting would still be needed, and only
the exchange of exits and the heartbeats, about 120 lines, would go. So launch/train.sh keeps its own rendezvous
(`llmtrain/launch/node_rendezvous.py`). `llmtrain train` also runs under torchrun's c10d rendezvous, for those who prefer that.
"""


@dataclass
class Trial:
    """One run with its launchers and their output."""

    hosts: list[VirtualHost]
    folder: Path
    launcher: str
    processes: list[subprocess.Popen | None] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "restarts"

    def start(self, absent: int | None = None, *overrides: str) -> None:
        """Start a launcher on each host but `absent`."""
        for rank, host in enumerate(self.hosts):
            if rank == absent:
                self.processes.append(None)
                continue
            keys = [*KEYS, f"run.out_dir={self.folder / 'runs'}", "run.name=restarts", *overrides]
            recipe = [str(ROOT / "recipes/edit_llama_stdlib.yaml"), *keys]
            first, count = self.hosts[0].addresses[0], str(len(self.hosts))
            if self.launcher == "train.sh":
                command = ["bash", str(ROOT / "launch/train.sh"), *recipe]
                env = {"NNODES": count, "NODE_RANK": str(rank), "MASTER_ADDR": first, "MASTER_PORT": str(PORT)}
            else:
                options = f"--nnodes 2:{count} --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {first}:{PORT} --rdzv-id one"
                options += (
                    f" --max-restarts 1 --rdzv-conf {C10D},is_host={int(rank == 0)} --local-addr {host.addresses[0]}"
                )
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    *options.split(),
                    "-m",
                    "llmtrain",
                    "train",
                    *recipe,
                ]
                env = {}
            output = (self.folder / f"host-{rank}.log").open("w")
            variables = {
                **os.environ,
                **env,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
            self.processes.append(host.popen(command, env=variables, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))

    def step(self) -> int:
        """Return the last logged step, 0 before the first."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def ranks(self, host: int) -> list[psutil.Process]:
        """Return the ranks on a host: the processes that train."""
        found = []
        for pid in self.hosts[host].pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                words = process.cmdline()
                if process.name().startswith("llmtrain-") or (words[1:3] == ["-u", "-m"] and "train" in words):
                    found.append(process)
        return found

    def is_running(self) -> bool:
        return any(process is not None and process.poll() is None for process in self.processes)

    def codes(self) -> list[int | None]:
        return [None if process is None else process.poll() for process in self.processes]

    def last_error(self) -> str:
        """Return the last line of output that names an error, from host 0 or else the next host with one."""
        for rank in range(len(self.hosts)):
            with contextlib.suppress(OSError):
                lines = (self.folder / f"host-{rank}.log").read_text().splitlines()
                named = [
                    line.strip()
                    for line in lines
                    if "error" in line.lower() and "elastic/multiprocessing/errors" not in line
                ]
                if named:
                    return f"host {rank}: {named[-1][:300]}"
        return ""


FAULTS: dict[str, Callable[[Trial], None] | None] = {
    "rank dies": lambda trial: trial.ranks(1)[0].kill(),
    "rank freezes": lambda trial: trial.ranks(1)[0].suspend(),
    "host 2 is lost": lambda trial: trial.hosts[2].kill(),
    "host 0 is lost": lambda trial: trial.hosts[0].kill(),
    "network of host 1 is cut": lambda trial: trial.hosts[1].unplug(),
    "SIGTERM on host 1": lambda trial: trial.processes[1].send_signal(signal.SIGTERM),
    "host 1 never comes": None,
    "ranks refuse the recipe": None,
}


def attempt(fault: str, launcher: str, keep: Path | None) -> Row:
    """Make one trial, and return its row. The launchers' output is also written to `keep`, if given."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        virtual_cluster([HostLimits()] * 3) as hosts,
    ):
        trial = Trial(hosts, Path(folder), launcher)
        never, refused = fault == "host 1 never comes", fault == "ranks refuse the recipe"
        began = time.monotonic()
        trial.start(1 if never else None, *(["train.global_batch=10"] if refused else []))
        if FAULTS[fault] is not None:
            while trial.step() < FAULT_AT:
                assert time.monotonic() - began < START_SECONDS, (trial.last_error(), trial.codes())
                time.sleep(0.2)
            began = time.monotonic()
            FAULTS[fault](trial)
        reached, continued = trial.step(), None
        while time.monotonic() - began < WATCH_SECONDS:
            if continued is None and trial.step() >= reached + BEYOND and time.monotonic() - began > 2:
                continued = time.monotonic() - began
                break
            if not trial.is_running():
                break
            time.sleep(0.2)
        ended, codes = time.monotonic() - began, trial.codes()
        left = sum(len(trial.ranks(number)) for number in range(3)) if continued is None else 0
        if keep is not None:
            for log in Path(folder).glob("*.log"):
                (keep / f"{fault.replace(' ', '-')}.{launcher}.{log.name}").write_bytes(log.read_bytes())
        error, waiting = trial.last_error(), trial.is_running()
        for host in hosts:
            host.kill()
    if continued is not None:
        return fault, launcher, f"{continued:.0f} s", "", "", ""
    listed = ", ".join("-" if code is None else str(code) for code in codes) + (f"; {left} ranks left" if left else "")
    return fault, launcher, "no", f"not in {ended:.0f} s" if waiting else f"{ended:.0f} s", listed, error


def main() -> None:
    """Make the trials, print the table, and write the page if `--write` is given."""
    options = parser(__doc__)
    options.add_argument("--only", choices=list(FAULTS))
    options.add_argument("--logs", type=Path, help="folder for what launchers wrote")
    chosen = options.parse_args()
    if chosen.logs:
        chosen.logs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for fault in [chosen.only] if chosen.only else FAULTS:
        for launcher in ("train.sh", "c10d"):
            rows.append(attempt(fault, launcher, chosen.logs))
            print(" | ".join(rows[-1]), flush=True)
    show("Restarts and lost hosts", COLUMNS, rows, words=len(COLUMNS))
    if chosen.write:
        table = markdown(COLUMNS, rows, words=len(COLUMNS))
        write_page(RESULTS / "restarts", "Restarts and lost hosts", [table, NOTES])


if __name__ == "__main__":
    main()
