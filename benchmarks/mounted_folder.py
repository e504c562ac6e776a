"""Speed of a run directory that another host mounts with sshfs, beside a plain copy by ssh.

    python benchmarks/mounted_folder.py                                          # two minutes; root, sshd and sshfs
    python benchmarks/mounted_folder.py --mbit 1000 --round-trips 10 50 --turns 5

Two virtual hosts with limited bandwidth and latency. The second host writes a file to the folder and reads it back, first as any
program does and then as llmtrain reads checkpoints, with requests for the parts that follow (`llmtrain.files.PrefetchingFile`). The
folder is mounted anew each time, so that nothing is in the page cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

PATIENCE_SECONDS = 600
COLUMNS = ("round trip", "copied by ssh", "written", "read", "read by llmtrain")
ON_THE_OTHER_HOST = """
import json, os, subprocess, sys, time
from llmtrain.files import PrefetchingFile
shared, options, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
file, block = os.path.join(shared, "file"), os.urandom(1 << 20)
block_read = bytearray(len(block))

def mbit(act):
    began = time.perf_counter()
    act()
    return 8e-6 * megabytes * len(block) / (time.perf_counter() - began)

def copy():
    command = ["ssh", "root@host0", "cat > /dev/null"]
    subprocess.run(command, input=block * megabytes, check=True)

def write():
    with open(file, "wb") as stream:
        for _ in range(megabytes): stream.write(block)
        os.fsync(stream.fileno())

def read():
    with open(file, "rb") as stream:
        while stream.read(len(block)): pass

def read_by_llmtrain():
    with PrefetchingFile(file) as stream:
        while stream.readinto(block_read): pass

def mounted(act):
    subprocess.run(["sshfs", "-o", options, f"root@host0:{shared}", shared], check=True)
    try:
        return mbit(act)
    finally:
        subprocess.run(["umount", shared], check=True)

print(json.dumps([mbit(copy), mounted(write), mounted(read), mounted(read_by_llmtrain)]))
"""


def measure(mbit: float, round_trip: float, megabytes: int, turns: int) -> list[list[float]]:
    """Return, per turn, the Mbit/s of each column."""
    from llmtrain.compare.cluster.hosts import virtual_cluster
    from llmtrain.compare.cluster.limits import HostLimits
    from tests.multi_node.ssh import ssh_between
    from tests.multi_node.test_mounted_folder import documented_options

    limits = HostLimits(bandwidth_mbit=mbit, latency_ms=round_trip / 2)
    with tempfile.TemporaryDirectory() as folder, virtual_cluster([limits] * 2) as hosts:
        shared = Path(folder) / "shared"
        shared.mkdir()
        with ssh_between(hosts[:1], Path(folder)) as tools:
            task = (str(shared), documented_options(), str(megabytes))
            found = []
            for _ in range(turns):
                asked = hosts[1].popen(
                    [sys.executable, "-c", ON_THE_OTHER_HOST, *task],
                    env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                answer, _ = asked.communicate(timeout=PATIENCE_SECONDS)
                if asked.returncode:
                    raise SystemExit(
                        f"the other host's program failed with exit code {asked.returncode}; see its output"
                    )
                found.append(json.loads(answer))
        return found


def row_of(round_trip: float, turns: Sequence[Sequence[float]]) -> Row:
    """Return the row of a round-trip time: the medians over the turns, with their ranges."""
    columns = list(zip(*turns, strict=True))
    cells = [f"{statistics.median(each):.0f} ({min(each):.0f} to {max(each):.0f})" for each in columns]
    return (f"{round_trip:g} ms", *cells)


def main() -> None:
    """Measure, and show or write the table."""
    from llmtrain.compare.cluster.hosts import CONGESTION_CONTROL
    from llmtrain.files import PART_BYTES, PREFETCH_BYTES

    made = parser(__doc__)
    made.add_argument("--mbit", type=float, default=300.0, help="bandwidth of each host")
    made.add_argument("--round-trips", type=float, nargs="+", default=[2.0, 20.0, 100.0], metavar="MS")
    made.add_argument("--megabytes", type=int, default=60, help="size of the file in MiB")
    made.add_argument("--turns", type=int, default=3)
    options = made.parse_args()
    sys.path.insert(0, str(ROOT))
    rows = [row_of(each, measure(options.mbit, each, options.megabytes, options.turns)) for each in options.round_trips]
    title = f"Mbit/s of a folder mounted with sshfs, at {options.mbit:g} Mbit/s"
    show(title, COLUMNS, rows)
    if options.write:
        notes = (
            f"Medians of {options.turns} turns, with their ranges, for a file of {options.megabytes} MiB on two virtual hosts. "
            "The folder is mounted with the options of launch/two_sites.md, and anew for each number. TCP's congestion control is "
            f"{CONGESTION_CONTROL}, which starts slowly over long distances. *Read*: as any program reads a file, while Linux "
            f"reads {PART_BYTES // 1024} KiB ahead. *Read by llmtrain*: with requests for the following {PREFETCH_BYTES >> 20} MiB."
        )
        write_page(RESULTS / "mounted_folder", title, [markdown(COLUMNS, rows), notes])


if __name__ == "__main__":
    main()
