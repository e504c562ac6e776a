"""Speed of a run directory that another host mounts with sshfs, with and without a larger read-ahead, beside a plain copy by ssh.

    python benchmarks/mounted_folder.py                                          # two minutes; root, sshd and sshfs
    python benchmarks/mounted_folder.py --mbit 1000 --round-trips 10 50 --turns 5

Two virtual hosts with limited bandwidth and latency. The second host writes a file to the folder and reads it back. The folder
is mounted anew for each of them, so that nothing is in the page cache.
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
DEFAULT, LARGER = 128, 4096
"""Linux's usual read-ahead in KiB, and the one that launch/two_sites.md recommends."""
COPIED, WRITTEN, READ, READ_AHEAD = "copied by ssh", "written", "read", f"read, read-ahead of {LARGER} KiB"
COLUMNS = ("round trip", COPIED, WRITTEN, READ, READ_AHEAD)
ON_THE_OTHER_HOST = """
import json, os, subprocess, sys, time
shared, options, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
file, block = os.path.join(shared, "file"), os.urandom(1 << 20)

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

def mounted(act, ahead=None):
    subprocess.run(["sshfs", "-o", options, f"root@host0:{shared}", shared], check=True)
    try:
        if ahead:
            number = os.stat(shared).st_dev
            with open(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb", "w") as setting:
                setting.write(ahead)
        return mbit(act)
    finally:
        subprocess.run(["umount", shared], check=True)

subprocess.run(["mount", "-o", "remount,rw", "/sys"], check=True)
print(json.dumps([mbit(copy), mounted(write), mounted(read), mounted(read, sys.argv[4])]))
"""


def measure(mbit: float, round_trip: float, megabytes: int, turns: int) -> list[list[float]]:
    """Return, per turn, the Mbit/s of a copy by ssh, of writing, and of reading with both read-aheads."""
    from llmtrain.compare.cluster.hosts import virtual_cluster
    from llmtrain.compare.cluster.limits import HostLimits
    from tests.multi_node.ssh import ssh_between
    from tests.multi_node.test_mounted_folder import documented_options

    limits = HostLimits(bandwidth_mbit=mbit, latency_ms=round_trip / 2)
    with tempfile.TemporaryDirectory() as folder, virtual_cluster([limits] * 2) as hosts:
        shared = Path(folder) / "shared"
        shared.mkdir()
        with ssh_between(hosts[:1], Path(folder)) as tools:
            task = (str(shared), documented_options(), str(megabytes), str(LARGER))
            found = []
            for _ in range(turns):
                asked = hosts[1].popen(
                    [sys.executable, "-c", ON_THE_OTHER_HOST, *task],
                    env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
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
            "The folder is mounted with the options of launch/two_sites.md, and anew before each column. *Read* has Linux's "
            f"read-ahead of {DEFAULT} KiB."
        )
        write_page(RESULTS / "mounted_folder", title, [markdown(COLUMNS, rows), notes])


if __name__ == "__main__":
    main()
