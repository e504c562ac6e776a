"""Utilization of the compute with each method, by bandwidth, latency and round length.

    python benchmarks/network.py --quick                              # 4 virtual hosts, root; five minutes on two cores
    python benchmarks/network.py                                      # cells that cover all pairs; an hour and a half
    python benchmarks/network.py --rows diloco streaming_diloco/int4 --every 20 --mbit 30 100 --latency-ms 0 100
    python benchmarks/network.py --rows 'delayed mean: sync.method=diloco sync.schedule=delayed' --every 20 --mbit 100

Each replica is a process (or several, `--shards`) on its own host of a virtual cluster: a network namespace whose cable has the
given bandwidth. Where packets have a latency or are lost, they pass a switch in user space. TCP and the messages are real, for
a model with `--parameters` parameters. A step is a sleep, so that processes do not compete for cores. Its spans end at times
fixed in advance, so that a late wake-up shortens the next span. Before each cell, the same steps are measured without a method
("alone").

A cell is measured in complete rounds after the first one. Utilization is the time that a round's steps take alone, divided by
the time of the round. The table also has the prediction of llmtrain/plan/network_time.py, for the bandwidth that Ethernet's and
TCP's headers leave. With `--write`, the table goes to benchmarks/results/network/, or with `--page NAME` to network_NAME/.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loops import ANSWER, TASK, RowFailed, is_asked
from network_ceiling import carried_mbit
from network_cells import METHODS, WIRES, Cell, pairwise, product, row_of
from network_page import COLUMNS, notes, off_sentence, off_summary
from network_ranks import BLOCKS, TIMEOUT_SECONDS, measure
from table import RESULTS, ROOT, Row, markdown, missing_sentence, parser, show, write_page

from llmtrain.errors import ClusterError

if TYPE_CHECKING:
    from llmtrain.compare.cluster.hosts import VirtualHost
    from llmtrain.plan.network_time import NetworkLink, RoundTime

PAYLOAD = 1448 / 1514
"""Payload's share of an Ethernet frame. The rest is the headers of Ethernet, IP and TCP."""
PORT = 29400
SLOW_START = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
PASSED = ("connections", "rounds", "gradient_rounds", "alone_steps", "jitter", "keep_window")
"""Options that are passed to the ranks unchanged."""
START_SECONDS = 20
"""Seconds that the processes of a cluster take to start on two cores."""
TOO_LONG_SECONDS = 400
"""Maximum predicted seconds to measure a cell that is chosen by default. In slower cells, utilization is close to 0."""
QUICK = {"methods": ["synchronous", "diloco", "edit", "streaming_diloco"], "wires": ["fp32", "int4"], "every": [5, 10]}
QUICK |= {"mbit": [30.0, 300.0], "latency_ms": [0.0, 20.0], "rounds": 2, "step_ms": 300.0, "parameters": 1_000_000}


def clusters_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells grouped by network, in the order of each network's first cell."""
    found: dict[tuple[float, float], list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.network, []).append(cell)
    return list(found.values())


def in_words(group: Sequence[Cell]) -> str:
    """Return the cells of one network in words."""
    mbit, latency_ms = group[0].network
    cells = ", ".join(" ".join(filter(None, (cell.method, cell.wire, str(cell.every)))) for cell in group)
    return f"{cells} at {mbit:g} Mbit/s and {latency_ms:g} ms"


def link_of(cell: Cell, options: Namespace) -> NetworkLink:
    """Return a rank's link to other replicas. The ranks of a host share its network card."""
    from llmtrain.parallel.connections import connections_for
    from llmtrain.plan.network_time import NetworkLink

    mbit = min(cell.mbit, options.downlink or cell.mbit)
    connections = options.connections or connections_for(2 * cell.latency_ms / 1000)
    return NetworkLink(
        PAYLOAD * mbit / options.shards, cell.latency_ms / 1000, not options.keep_window, connections=connections
    )


def prediction(cell: Cell, options: Namespace) -> RoundTime:
    """Return the predicted times of a cell's round. Raises ValueError if its rounds have no fixed length."""
    from llmtrain.plan.network_time import round_time, timed_round

    sync, step = cell.sync(), options.step_ms / 1000
    link, values = link_of(cell, options), [values_of(options)] * BLOCKS
    if sync.period.is_timed:
        return timed_round(sync, values, options.replicas, step, link)
    every = 1 if sync.period.averages_gradients else getattr(sync.period, "every", None)
    if every is None:
        raise ValueError(
            f"row {cell.method!r}: {sync.period.kind} has no rounds of one length; choose steps or seconds"
        )
    return round_time(sync, values, options.replicas, step, every, link)


def values_of(options: Namespace) -> int:
    """Return the number of values per block on one rank."""
    return max(1, round(options.parameters / BLOCKS / options.shards))


def seconds_of(cell: Cell, options: Namespace) -> float:
    """Return the predicted seconds to measure a cell."""
    rounds = options.rounds if not cell.sync().period.averages_gradients else options.gradient_rounds
    one = prediction(cell, options)
    return (rounds + 2) * (one.compute + one.exposed) + options.alone_steps * options.step_ms / 1000


def cells_of(options: Namespace) -> list[Cell]:
    """Return the chosen cells: all combinations of `--rows` with rounds and networks, or a selection that covers all pairs."""
    network = {"every": options.every, "mbit": options.mbit, "latency_ms": options.latency_ms}
    if options.rows:
        rows = list(map(row_of, options.rows))
        cells = [Cell(**row, **rest) for row in rows for rest in product(network)]
    else:
        factors = {"method": options.methods, "wire": options.wires, **network}
        known: dict[str, float] = {}

        def cost(one: Mapping[str, object]) -> float:
            key = json.dumps(one)
            return known.setdefault(key, seconds_of(Cell(**one), options))

        candidates = [one for one in product(factors) if cost(one) <= TOO_LONG_SECONDS]
        cells = [Cell(**one) for one in pairwise(candidates, cost)]
    return list(dict.fromkeys(cells))[: options.cells]


def measured(cells: Sequence[Cell], options: Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the answers for the cells of one network, and the counters of its switch, if it has one. Raises RowFailed."""
    from llmtrain.compare.cluster.hosts import virtual_cluster
    from llmtrain.compare.cluster.limits import HostLimits

    mbit, latency_ms = cells[0].network
    limits = HostLimits(
        bandwidth_mbit=mbit, downlink_mbit=options.downlink, latency_ms=latency_ms or None, loss=options.loss or None
    )
    task = {
        "replicas": options.replicas,
        "shards": options.shards,
        "cells": [asdict(cell) for cell in cells],
        "values": values_of(options),
        "step_seconds": options.step_ms / 1000,
        **{key: getattr(options, key) for key in PASSED},
    }
    expected = START_SECONDS + sum(seconds_of(cell, options) for cell in cells)
    with virtual_cluster([limits] * options.replicas) as hosts, tempfile.TemporaryDirectory() as folder:
        run_ranks(hosts, task, Path(folder), 4 * expected + TIMEOUT_SECONDS)
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            raise RowFailed(f"network.py at {mbit:g} Mbit/s and {latency_ms:g} ms:", "no answer; see the ranks' output")
        switches = [asdict(switch.counters()) for switch in hosts[0].switches]
        return json.loads(answer.read_text()), switches[0] if switches else {}


def run_ranks(hosts: Sequence[VirtualHost], task: dict[str, Any], folder: Path, patience: float) -> None:
    """Start every host's ranks with the task, and wait for them. Raises RowFailed if one fails or takes too long."""
    shards, size = task["shards"], task["shards"] * len(hosts)
    started, deadline = [], time.monotonic() + patience
    if task["keep_window"]:
        for host in hosts:
            host.popen(["sh", "-c", f"echo 0 > {SLOW_START}"]).wait(TIMEOUT_SECONDS)
    task = task | {"interface": hosts[0].interface, "progress": str(folder / "progress")}
    for rank in range(size):
        host, log = hosts[rank // shards], folder / f"{rank}.log"
        own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % shards, "LOCAL_WORLD_SIZE": shards}
        own |= {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": PORT,
            "GROUP_RANK": rank // shards,
            "OMP_NUM_THREADS": 1,
        }
        own |= {"GLOO_SOCKET_IFNAME": host.interface, TASK: json.dumps(task), ANSWER: folder / "answer.json"}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {key: str(value) for key, value in own.items()} | {"PYTHONPATH": path}
        with log.open("w") as output:
            started.append(host.popen([sys.executable, __file__], env=env, stdout=output, stderr=output, cwd=ROOT))
    while True:
        codes = [process.poll() for process in started]
        if not any(codes) and None not in codes:
            return
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or time.monotonic() > deadline:
            why = f"rank {failed[0]} failed" if failed else f"took longer than {patience:.0f} s"
            tail = "\n".join((folder / f"{failed[0] if failed else 0}.log").read_text().splitlines()[-20:])
            raise RowFailed(f"network.py: {why};", f"its last lines:\n{tail}")
        time.sleep(0.2)


def table_row(answer: Mapping[str, Any], options: Namespace) -> tuple[Row, str | None]:
    """Return a cell's row of the table, and a phrase that names the row if it is far off the prediction."""
    cell = Cell(**answer["cell"] | {"keys": tuple(answer["cell"]["keys"])})
    ranks, expected = answer["ranks"], prediction(cell, options)
    rounds = range(len(ranks[0]["seconds"]))

    def mean(of: str, n: int) -> float:
        return statistics.mean(rank[of][n] for rank in ranks)

    alone = [statistics.mean(rank["alone"] * rank["steps"][n] for rank in ranks) for n in rounds]
    used = [100 * alone[n] / mean("seconds", n) for n in rounds]
    exposed = statistics.median(mean("seconds", n) - alone[n] for n in rounds)
    waited = statistics.median(mean("waited", n) for n in rounds)
    sent = statistics.median(mean("sent", n) for n in rounds)
    used_in_all, formula = statistics.median(used), options.shards * expected.sent
    off = used_in_all - 100 * expected.utilization
    row = (
        cell.method,
        cell.sync().wire.kind,
        f"{statistics.mean(mean('steps', n) for n in rounds):.0f}",
        f"{cell.mbit:g}",
        f"{cell.latency_ms:g}",
        f"{used_in_all:.1f} %",
        f"{min(used):.1f} to {max(used):.1f}",
        f"{100 * expected.utilization:.1f} %",
        f"{off:+.1f}",
        f"{exposed:.2f}",
        f"{waited:.2f}",
        f"{expected.exposed:.2f}",
        f"{sent / 1e6:.2f}",
        f"{100 * (sent / formula - 1):+.1f} %" if formula else "",
    )
    return row, off_sentence(row, off, exposed, waited)


def add_options(to: ArgumentParser) -> None:
    """Add the options that choose the cells and how they are measured."""
    rows = to.add_argument_group("cells")
    rows.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    rows.add_argument("--wires", nargs="+", choices=WIRES, metavar="WIRE", help=", ".join(WIRES))
    rows.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="instead of --methods and --wires: METHOD, METHOD/WIRE, or 'NAME: KEY=VALUE ...' with keys of a recipe's sync "
        "section; all of them with all of the following, and not a choice that covers all pairs",
    )
    rows.add_argument("--every", type=int, nargs="+", help="steps in a round")
    rows.add_argument("--mbit", type=float, nargs="+", help="bandwidths of a host's cable in each direction")
    rows.add_argument("--latency-ms", type=float, nargs="+", help="one way; 0: that of this machine")
    rows.add_argument(
        "--cells", type=int, metavar="N", help="the first N alone; the choice has those first that cover most"
    )
    rows.add_argument(
        "--quick", action="store_true", help="few cells of a small model with short steps, for a first look"
    )
    rows.add_argument("--list", action="store_true", help="print the cells with what is predicted, and measure nothing")
    run = to.add_argument_group("how they are measured")
    run.add_argument("--replicas", type=int, default=4, help="a power of two for wagma")
    run.add_argument("--shards", type=int, default=1, help="processes of a replica, all in its host")
    run.add_argument("--parameters", type=float, help=f"of the model, in {BLOCKS} equal blocks (2.5 million)")
    run.add_argument("--step-ms", type=float, help="what a step takes (600)")
    run.add_argument("--connections", type=int, metavar="N", help="between two ranks; without it, by latency")
    run.add_argument("--rounds", type=int, help="measured, after a first one (5)")
    run.add_argument("--gradient-rounds", type=int, default=6, help="the same where every step averages gradients")
    run.add_argument("--alone-steps", type=int, default=10, help="with no method, before each cell")
    run.add_argument("--downlink", type=float, metavar="MBIT", help="what a host's cable receives, if not --mbit")
    run.add_argument("--loss", type=float, default=0.0, help="share of packets that are lost, one by one")
    run.add_argument("--keep-window", action="store_true", help="TCP without its slow start after a pause")
    run.add_argument("--jitter", type=float, default=0.0, help="standard deviation of a step's time, in steps")
    run.add_argument("--page", metavar="NAME", help="with --write: the page's folder is network_NAME")


def options_of(arguments: ArgumentParser, words: Sequence[str] | None = None) -> Namespace:
    """Return the parsed command line (or `words`), with the defaults that depend on `--quick`."""
    options = arguments.parse_args(words)
    methods = [name for name in METHODS if name != "local_sgd"]
    defaults = {"methods": methods, "wires": list(WIRES), "every": [10, 20, 50], "rounds": 5, "step_ms": 600.0}
    defaults |= {"mbit": [10.0, 30.0, 100.0, 300.0, 1000.0], "latency_ms": [0.0, 20.0, 100.0], "parameters": 2_500_000}
    for name, value in (QUICK if options.quick else defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    """Measure one network after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    add_options(arguments)
    options = options_of(arguments)
    try:
        cells = cells_of(options)
        seconds = sum(seconds_of(cell, options) for cell in cells)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    groups, rows, far = clusters_of(cells), [], []
    minutes = (seconds + START_SECONDS * len(groups)) / 60
    print(f"{len(cells)} cells on {len(groups)} networks, about {minutes:.0f} minutes", flush=True)
    if options.list:
        for cell in cells:
            print(cell.method, cell.wire, cell.every, *cell.network, prediction(cell, options))
        return
    alone, debts, switches, missing = [], [], [], {}
    for group in groups:
        try:
            answers, switch = measured(group, options)
        except (RowFailed, ClusterError, TimeoutError) as why:  # continue with the other networks
            print(why, flush=True)
            missing[in_words(group)] = " ".join(str(why).partition("; its last lines:")[0].split())
            continue
        switches += [switch] if switch else []
        for answer in answers:
            row, named = table_row(answer, options)
            rows.append(row)
            far += [named] if named is not None else []
            alone += [1000 * rank["alone"] for rank in answer["ranks"]]
            debts += [1000 * rank["debt"] for rank in answer["ranks"]]
            print(*row, sep="  ", flush=True)
    if not rows:
        raise SystemExit("no cell could be measured")
    said = resolution(alone, debts, switches, options) + ([ceiling(max(options.mbit), options)] if switches else [])
    said += [missing_sentence(missing)] if missing else []
    finish(rows, far, said, options)


def resolution(
    alone: Sequence[float], debts: Sequence[float], switches: Sequence[Mapping[str, float]], options: Namespace
) -> list[str]:
    """Return sentences about the resolution of the measurement."""
    said = [
        f"A step alone took {min(alone):.3f} to {max(alone):.3f} ms where {options.step_ms:g} ms were asked for; the last span of "
        f"a cell ended at most {max(debts):.2f} ms late."
    ]
    if switches:
        frames = sum(one["forwarded"] for one in switches)
        said.append(
            f"The switch in user space forwarded {frames:,.0f} frames, on average "
            f"{1000 * sum(one['late_seconds'] for one in switches) / max(1, frames):.2f} ms later than it should "
            f"(at most {1000 * max(one['latest_seconds'] for one in switches):.1f} ms), lost {sum(one['lost'] for one in switches):,.0f} "
            f"and dropped {sum(one['dropped'] for one in switches):,.0f} for a full queue, in "
            f"{sum(one['cpu_seconds'] for one in switches):.0f} s of processor time."
        )
    return said


def ceiling(mbit: float, options: Namespace) -> str:
    """Return a sentence about the throughput of the switch in user space."""
    from llmtrain.compare.cluster.limits import HostLimits

    delayed = HostLimits(latency_ms=0.01)  # just enough for packets to pass the switch
    try:
        free = carried_mbit(delayed, options.replicas)
        limited = carried_mbit(delayed.model_copy(update={"bandwidth_mbit": mbit}), options.replicas)
    except (ClusterError, subprocess.TimeoutExpired, ValueError) as why:  # the cells are measured by now
        return f"What the switch can carry could not be measured ({why})."
    return (
        f"Without a limit of bandwidth it carries {free:,.0f} Mbit/s of messages from each of {options.replicas} hosts at once, and "
        f"with cables of {mbit:g} Mbit/s {limited:,.0f} of the {PAYLOAD * mbit:,.0f} that headers leave."
    )


def finish(rows: Sequence[Row], far: Sequence[str], said: Sequence[str], options: Namespace) -> None:
    """Print the table and the rows far off the prediction, and write the page if `--write` is given."""
    extras = {"loss": options.loss, "jitter": options.jitter, "downlink": options.downlink}
    named = "".join(f", {name} {value:g}" for name, value in extras.items() if value)
    named += ", no slow start after a pause" if options.keep_window else ""
    title = (
        f"{options.replicas} replicas x {options.shards} shards, {options.parameters:,.0f} parameters, {options.step_ms:g} ms a "
        f"step, {options.rounds} rounds after the first{named}"
    )
    show(title, COLUMNS, rows, words=2)
    off = off_summary(far)
    print(*said, off, sep="\n")
    if options.write:
        folder = RESULTS / "_".join(filter(None, ("network", options.page)))
        table = markdown(COLUMNS, rows, words=2)
        write_page(
            folder,
            "Utilization by bandwidth, latency and round length",
            [f"{title}.", table, off, " ".join(said), notes(BLOCKS, PAYLOAD)],
        )


if __name__ == "__main__" and not is_asked(measure):
    main()
