"""Mistakes in what clusters do to a run: lost hosts, late names, limits of containers and uneven Slurm steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "roll call: a meeting point that may work later is a wrong recipe",
        "llmtrain/launch/node_rendezvous.py",
        'is_taken = nodes.rank == 0 and "EADDRINUSE" in reason',
        "is_taken = True",
        ("tests/unit/test_launch.py",),
    ),
    Mutant(
        "roll call: a port that is taken may be free later",
        "llmtrain/launch/node_rendezvous.py",
        'is_taken = nodes.rank == 0 and "EADDRINUSE" in reason',
        "is_taken = False",
        ("tests/unit/test_launch.py",),
    ),
    Mutant(
        "world: each node has the tasks of the first",
        "llmtrain/parallel/world.py",
        "        if node < nodes:\n",
        "        if True:\n",
        ("tests/unit/test_world.py",),
    ),
    Mutant(
        "limits: only the innermost cgroup counts",
        "llmtrain/process_limits.py",
        "for folder in (innermost, *innermost.parents) if folder.is_relative_to(root)]",
        "for folder in (innermost,)]",
        ("tests/unit/test_process_limits.py",),
    ),
    Mutant(
        "limits: a quota below one core leaves none",
        "llmtrain/process_limits.py",
        "max(1, quota // period)",
        "quota // period",
        ("tests/unit/test_process_limits.py",),
    ),
    Mutant(
        "run dir: a lost host's lock is this host's",
        "llmtrain/files.py",
        'return text != "" and not text.endswith(_this_host())',
        "return False",
        ("tests/unit/test_rundir.py",),
    ),
    Mutant(
        "doctor: a host without an address is measured at its loopback",
        "llmtrain/doctor/run_checks.py",
        "host.leader.interface == UNKNOWN and self.peers.ranks[host.leader.rank].address is None",
        "False",
        ("tests/unit/test_doctor_ranks.py",),
    ),
]
