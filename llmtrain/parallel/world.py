"""Rank of this process among the others, and the endpoint at which ranks find each other.

Ranks come from torchrun's and DeepSpeed's environment variables, or else from Slurm's. Without either, this process is
the only rank.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import dataclass

from llmtrain.errors import RecipeError
from llmtrain.waiting import announced

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
INTERACTIVE_STEP = "4294967290"
"""Number of the step in which Slurm runs the shell of `salloc`. The shell is one process, however many tasks the job has."""
MAX_PORT = 65_535
STEP_PORTS = range(15_000, 32_000)
"""Ports on which the ranks of a Slurm step meet, below the ephemeral ports of Linux (32768 to 60999 by default)."""
PORTS_BETWEEN_STEPS = 1009
"""Distance between the ports of consecutive steps of a Slurm job. It is large, because jobs with the next numbers use
the next ports."""
SCONTROL_SECONDS = 20.0
"""Maximum seconds to wait for Slurm's controller."""
SHARE_GPU = "LLMTRAIN_SHARE_GPU"
"""Environment variable. If it is 1, a node may have more ranks than GPUs, each a replica of its own. This is for trying
synchronization on one GPU, not for speed."""
NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID", "CROSS_RANK")
"""Variables in which torchrun, Slurm and DeepSpeed's launcher pass a node's number to its processes."""
RANK_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_PREFIXES = (
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "CROSS_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MV2_",
    "PET_",
)
"""Names and name prefixes of the environment variables with which launchers mark a process as one rank of many."""
OTHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PET_NNODES")
"""Variables in which mpirun and Kubeflow, which do not number ranks as torch or Slurm do, pass the number of processes or nodes."""


@dataclass(frozen=True)
class World:
    """One rank among all ranks, as the launcher numbers it. `local_rank` and `local_size` count this node's ranks only."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> World:
        """Read the launcher's variables. Raises RecipeError if they contradict one another, or if an unknown launcher has started
        several processes."""
        env = os.environ
        if "RANK" in env or "WORLD_SIZE" in env:
            of_node = env.get("LOCAL_SIZE") or env.get("WORLD_SIZE")  # the first is what DeepSpeed's launcher calls it
            names, defaults = TORCH, {"LOCAL_RANK": env.get("RANK"), "LOCAL_WORLD_SIZE": of_node}
            given = {name: env.get(name) or defaults.get(name) or "nothing" for name in names}
        elif is_slurm_task() and env["SLURM_STEP_NUM_TASKS"] != "1":
            # Not what the job asks for (SLURM_NTASKS, SLURM_NTASKS_PER_NODE), because steps may be smaller, and the job's shell
            # is no step.
            given = {name: env.get(name) or "nothing" for name in SLURM}
            given[SLURM[-1]] = _entry_of_node(given[SLURM[-1]])
        else:
            check_is_alone(
                "start with llmtrain launch, torchrun or srun, or give each process RANK, WORLD_SIZE and LOCAL_RANK"
            )
            return cls(0, 1, 0, 1)
        try:
            rank, size, local_rank, local_size = map(int, given.values())
        except ValueError:
            rank = size = -1
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            told = ", ".join(f"{name}={value}" for name, value in given.items())
            raise RecipeError(
                f"environment: {told} do not describe one rank of several; start with llmtrain launch, torchrun or srun"
            )
        return cls(rank, size, local_rank, local_size)


def check_is_alone(advice: str) -> None:
    """Raise RecipeError, with `advice` in its message, if an unknown launcher started this process as one of several.
    Otherwise, each process would train by itself."""
    for name in OTHER_SIZES:
        size = os.environ.get(name, "").strip()
        if size not in ("", "0", "1"):
            raise RecipeError(
                f"{name}={size} in the environment says that this process is one of several; {advice}, or unset {name}"
            )


def environment_without_rank() -> dict[str, str]:
    """Return this process's environment without the variables that mark a rank, for a child process that is not a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_NAMES and not name.startswith(RANK_PREFIXES)
    }


def may_share_gpu() -> bool:
    """Return whether SHARE_GPU lets several ranks of a node compute on the same GPU. Raises RecipeError unless it is 0 or 1."""
    return environment_number(SHARE_GPU, 0, 0, 1) == 1


def ranks_per_device(world: World) -> int:
    """Return the number of ranks that compute on this rank's device: on a CPU, all ranks of the node; on a GPU, one,
    unless ranks share GPUs."""
    import torch  # here, because launchers read ranks without it

    if not torch.cuda.is_available():
        return world.local_size
    return -(-world.local_size // torch.cuda.device_count()) if may_share_gpu() else 1


def gpu_count() -> int:
    """Return the number of GPUs that CUDA can use: none if the driver counts some but is too old for this torch."""
    import torch  # here, because launchers read ranks without it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def node_name() -> str:
    """Return a name that is equal on all ranks that one launcher started on this machine, and different on other nodes.

    Two launchers on one machine count as two nodes. So do two containers with the same host name.
    """
    number = next((os.environ[name] for name in NODE_NUMBERS if name in os.environ), "")
    return f"{socket.gethostname()}:{number}"


def master_endpoint() -> tuple[str, str]:
    """Return rank 0's (address, port): MASTER_ADDR and MASTER_PORT, or the first host of the Slurm step and a port derived from
    the numbers of the job and the step. Raises RecipeError if neither is available, or if the values are not a valid endpoint."""
    env = os.environ
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")  # a step need not have the job's first node
    if nodes is not None and (address is None or port is None):
        address = _first_host(nodes) if address is None else address
        step = environment_number("SLURM_STEP_ID", 0)
        number = environment_number("SLURM_JOB_ID", 0) + PORTS_BETWEEN_STEPS * step
        port = port or str(STEP_PORTS[number % len(STEP_PORTS)])
    if address is None or port is None:
        raise RecipeError(
            f"environment: MASTER_ADDR={address}, MASTER_PORT={port}; give both (rank 0's host and a free port on it), "
            "or start with llmtrain launch, torchrun or srun, which do"
        )
    if not address.strip():
        raise RecipeError("MASTER_ADDR is empty in the environment; set it to rank 0's host")
    return address, str(environment_number("MASTER_PORT", port, 1, MAX_PORT))


def is_slurm_task() -> bool:
    """Return whether srun started this process as a task of a step. The shell of a job, interactive or not, does not count."""
    return "SLURM_STEP_NUM_TASKS" in os.environ and os.environ.get("SLURM_STEP_ID") != INTERACTIVE_STEP


def slurm_step() -> str:
    """Return the number of this process's Slurm step as text; empty outside of Slurm. It separates steps of a job that
    run at the same time and share a MASTER_PORT, which the job has set."""
    return os.environ.get("SLURM_STEP_ID", "")


def environment_number(name: str, default: int | str, minimum: int = 0, maximum: int | None = None) -> int:
    """Return an environment variable, or `default` if it is not set, as an integer from `minimum` to `maximum`. Raises
    RecipeError for any other value."""
    text = os.environ.get(name, str(default)).strip()
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < minimum or (maximum is not None and number > maximum):
        allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise RecipeError(f"{name}={text!r} in the environment is not a whole number {allowed}")
    return number


def _entry_of_node(counts: str) -> str:
    """Return this node's entry (SLURM_NODEID) of Slurm's list with a number for each node, such as "4(x2),3" for 4, 4 and 3.
    Return the list itself if it has no such entry."""
    node = environment_number("SLURM_NODEID", 0)
    for entry in counts.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", entry)
        if found is None:
            break
        nodes = int(found[2] or 1)
        if node < nodes:
            return found[1]
        node -= nodes
    return counts


def _first_host(nodes: str) -> str:
    if "[" not in nodes:
        return nodes.partition(",")[0]
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        with announced("Slurm's controller to list the job's nodes", SCONTROL_SECONDS):
            answer = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=SCONTROL_SECONDS
            )
        return answer.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise RecipeError(
            f"environment: rank 0's host is not known: scontrol could not be asked for the first of {nodes} ({error}); in a "
            "container without Slurm's programs set MASTER_ADDR to that host before it starts"
        ) from error
