"""Speed of training over a slow network: llmtrain's methods compared with torch's and torchft's.

    make peers                                                 # all rows; torchft in an environment of its own
    python benchmarks/peers.py                                 # the same without torchft's rows, unless it is installed
    python benchmarks/peers.py --loops ddp diloco torchft_diloco --bandwidth 50 none --turns 3
    python benchmarks/peers.py --row "EDiT, int8" sync.method=edit sync.wire.kind=int8
    python benchmarks/peers.py --real --bandwidth none --turns 1 --rounds 14      # trains on text; adds the loss

Hosts in network namespaces (which need root and iproute2), joined by links of a given bandwidth, train one replica each of a
Llama with 2.56 M parameters, on 8 sequences of 128 tokens per step, in fp32 with AdamW. All loops take the same steps and differ
in how they synchronize. By default, a step's forward and backward sleep, because the machine may have fewer cores than replicas,
and yield gradients drawn in advance, block by block (benchmarks/emulated_model.py); optimizers and messages are real. With
--real, everything is real, and the table also has the validation loss of the replicas' mean after the same number of tokens.

In each turn, every loop runs once from the start: a first round, then the measured rounds. Speeds are relative to a loop that
never communicates ("alone") in the same turn. Bytes are counted at the hosts' network cards, with headers. With the defaults, a
turn takes about 7 minutes per bandwidth. With --write, the table goes to benchmarks/results/peers/ or, with --real, to
peers_real/.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peer_measure
from hosts import HostRanks, open_hosts
from loops import RowFailed
from peer_measure import FRAGMENTS, OURS, recipe_of
from table import RESULTS, Row, markdown, parser, show, write_page
from wires import BYTES, theory

ALONE = "alone"
PEERS = {
    "ddp": "torch DDP",
    "ddp_small": "torch DDP, buckets of 1 MB",
    "post_local_sgd": "torch post-local SGD",
    "torchft_diloco": "torchft DiLoCo",
    "torchft_streaming": "torchft Streaming DiLoCo",
}
"""Name in the table of each loop of benchmarks/peer_loops.py that communicates."""
PATIENCE_SECONDS = 3600.0
"""Timeout of one loop in one turn."""
COLUMNS = (
    "bandwidth",
    "loop",
    "tokens/s",
    "of alone",
    "min to max",
    "MB per round and host",
    "minimum, MB",
    "beyond it",
    "validation loss",
)
NOTES = """\
A Llama of 2.56 M parameters in fp32, 8 sequences of 128 tokens per step and host, AdamW. Unless steps are computed, their
forward and backward sleep and yield gradients drawn beforehand, block after block; clipping, optimizers, rounding and
messages are real.

Speeds are medians over the turns; *min to max* is that of *of alone*. A row lacks the turns in which its loop or `alone` failed, and
then its name says how many it has. *Tokens/s*: of all replicas. *MB per round*: mean over hosts and turns, sent by a host's
network card, with all headers, acknowledgments and, for torchft, the heartbeats of its managers. *Minimum*: what a
ring all-reduce of the model's parameters sends, 2 (N-1)/N x parameters x 4 bytes (or 1/2 + 4/128 in int4), once per round,
or in every step where gradients are averaged.

`torch DDP` is DistributedDataParallel with its defaults, but for `broadcast_buffers=False`, and in the next row for
buckets of 1 MB instead of 25, which are larger than the model; `torch post-local SGD` its hook
with PeriodicModelAverager, which averages once per round. torchft's DiLoCo has a lighthouse on the first host and
one Manager per host, with the defaults that its classes have: one all-reduce per parameter, and a quorum per
synchronization. Streaming DiLoCo has 4 fragments everywhere, and applies a mean as many local steps later as torchft
allows in rounds this short: its fragment must be back before the next one is sent. torchft's quantized
all-reduce needs Triton, and is not measured. Outer optimizers are equal in the two DiLoCos and in the two
fp32 Streaming DiLoCos. `llmtrain, never` never synchronizes, either: it differs from `alone` by llmtrain's trainer in
the place of a loop by hand, as all rows of llmtrain do. No loop has a warm-up of synchronous steps. *Validation loss* (with
`--real` only): that of the replicas' mean after the last step, and the mean over turns; a mean that is still in flight then,
or due in the next
forward (EDiT), is not applied."""


# ---- the table


def minimum_bytes(task: Mapping[str, Any], parameters: int) -> float | None:
    """Return the bytes that a loop's messages need per round and host. Return None for rounds without a fixed number of steps,
    for averages within groups, and for wire formats without fixed BYTES per value."""
    replicas = task["replicas"]
    if task["overrides"] is None:
        return theory(parameters, replicas, "fp32") * (task["every"] if task["loop"] in ("ddp", "ddp_small") else 1)
    sync = recipe_of(task).sync
    if sync.period.averages_gradients:
        return theory(parameters, replicas, sync.wire.kind if sync.wire.gradients else "fp32") * task["every"]
    if sync.period.kind != "steps" or sync.schedule.kind == "wait_avoiding" or sync.wire.kind not in BYTES:
        return None
    if sync.period.every > task["every"] * (1 + task["rounds"]):  # never
        return 0.0
    return theory(parameters, replicas, sync.wire.kind) * task["every"] / sync.period.every


def rate_of(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens per second of all replicas, from their common start to the end of the last one."""
    return sum(answer["tokens"] for answer in answers) / max(answer["seconds"] for answer in answers)


def rows_of(
    bandwidth: float | None,
    names: Mapping[str, str],
    turns: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]],
    minima: Mapping[str, float | None],
) -> list[Row]:
    """Return the rows of one bandwidth. `turns` has the answers of all hosts by loop, without loops that failed. If a row lacks
    turns, its name says how many it has."""
    rows = []
    for loop, name in names.items():
        pairs = [(turn[loop], turn[ALONE]) for turn in turns if loop in turn and ALONE in turn]
        if len(pairs) < len(turns):
            name = f"{name} ({len(pairs)} of {len(turns)} turns)"
        if not pairs:
            rows.append((limit_in_words(bandwidth), name, *[""] * (len(COLUMNS) - 2)))
            continue
        shares = [rate_of(answers) / rate_of(alone) for answers, alone in pairs]
        bytes_sent = [answer["bytes"] for answers, _ in pairs for answer in answers]
        losses = [answers[0]["loss"] for answers, _ in pairs]
        sent = None if None in bytes_sent else statistics.mean(bytes_sent)
        needed = minima.get(loop)
        rows.append(
            (
                limit_in_words(bandwidth),
                name,
                f"{statistics.median(rate_of(answers) for answers, _ in pairs):,.0f}",
                f"{100 * statistics.median(shares):.1f} %",
                f"{100 * min(shares):.1f} to {100 * max(shares):.1f}",
                "" if sent is None else f"{sent / 1e6:.2f}",
                "" if needed is None else f"{needed / 1e6:.2f}",
                "" if not needed or sent is None else f"{100 * (sent / needed - 1):+.1f} %",
                "" if None in losses else f"{statistics.mean(losses):.4f}",
            )
        )
    return rows


def limit_in_words(bandwidth: float | None) -> str:
    """Return a bandwidth in words, for the table."""
    return "no limit" if bandwidth is None else f"{bandwidth:g} Mbit/s"


# ---- the main process


def bandwidth_option(text: str) -> float | None:
    """Return the bandwidth that a word of the command line gives, or None for `none`."""
    try:
        value = None if text == "none" else float(text)
    except ValueError:
        value = 0.0
    if value is not None and not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a bandwidth; give Mbit/s, or none for no limit")
    return value


def options_of(arguments: ArgumentParser) -> Namespace:
    """Add the options, and return the parsed command line."""
    available = [*PEERS, *OURS]
    arguments.add_argument(
        "--loops", nargs="+", choices=available, default=available, metavar="LOOP", help=", ".join(available)
    )
    arguments.add_argument(
        "--row",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME KEY=VALUE", "KEY=VALUE"),
        help="one more row: a name, and what llmtrain's recipe gets for it; may be given several times",
    )
    arguments.add_argument(
        "--override", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe, for all loops"
    )
    arguments.add_argument("--replicas", type=int, default=4, help="hosts, one replica each")
    arguments.add_argument(
        "--bandwidth",
        nargs="+",
        type=bandwidth_option,
        default=[100.0, 300.0, None],
        metavar="MBIT",
        help="of each host in each direction; none: no limit",
    )
    arguments.add_argument("--latency-ms", type=float, help="added to each packet that a host sends")
    arguments.add_argument("--every", type=int, default=20, help="local steps per round, a multiple of 4 of at least 8")
    arguments.add_argument("--rounds", type=int, default=1, help="measured after a first one")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument(
        "--step-ms", type=float, default=600, help="forward and backward of a step, which sleep for it"
    )
    arguments.add_argument("--real", action="store_true", help="compute them instead, and report the loss")
    options = arguments.parse_args()
    if options.every < 2 * FRAGMENTS or options.every % FRAGMENTS:
        arguments.error(f"--every is {options.every}, expected a multiple of {FRAGMENTS} of at least {2 * FRAGMENTS}")
    if any(len(words) < 2 or not all("=" in word for word in words[1:]) for words in options.row):
        arguments.error("--row needs a name and at least one KEY=VALUE")
    return options


def tasks_of(options: Namespace) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the task of each loop, and its name in the table."""
    common = {
        "replicas": options.replicas,
        "every": options.every,
        "rounds": options.rounds,
        "step_ms": None if options.real else options.step_ms,
        "common": options.override,
    }
    added = {f"row {number}": (words[0], words[1:]) for number, words in enumerate(options.row, 1)}
    ours = {loop: OURS[loop] for loop in options.loops if loop in OURS} | added
    names = {ALONE: ALONE} | {loop: PEERS[loop] for loop in options.loops if loop in PEERS}
    names |= {loop: name for loop, (name, _) in ours.items()}
    overrides = {loop: keys for loop, (_, keys) in ours.items()}
    return {loop: {"loop": loop, "overrides": overrides.get(loop), **common} for loop in names}, names


def take_turns(
    ranks: HostRanks, tasks: Mapping[str, Mapping[str, Any]], turns: int, words: str
) -> list[dict[str, list[dict[str, Any]]]]:
    """Return the answers by turn and loop. Every other turn has the reverse order. A loop that fails is reported, and left out
    of its turn."""
    found: list[dict[str, list[dict[str, Any]]]] = []
    for turn in range(turns):
        found.append({})
        for loop in list(tasks)[:: -1 if turn % 2 else 1]:
            if sys.stderr.isatty():
                print(f"\r{words}, turn {turn + 1} of {turns}: {loop}\033[K", end="", file=sys.stderr)
            try:
                found[-1][loop] = ranks.ask(tasks[loop], PATIENCE_SECONDS)
            except RowFailed as why:
                print(f"\r{words}, turn {turn + 1}: {why}\033[K" if sys.stderr.isatty() else str(why), file=sys.stderr)
    return found


def main() -> None:
    """Measure all loops in turn, print the table, and write the page if `--write` is given."""
    options = options_of(parser(__doc__))
    os.environ["OMP_NUM_THREADS"] = "1"

    from peer_loops import OF_TORCHFT, torchft_release

    from llmtrain.errors import UserError
    from llmtrain.recipe_check import check
    from llmtrain.train.prepare_data import prepare_texts

    release = torchft_release()
    if not release and OF_TORCHFT & set(options.loops):
        print(
            "torchft is not installed here, so its rows are left out; `make peers` installs it in an environment of its own"
        )
        options.loops = [loop for loop in options.loops if loop not in OF_TORCHFT]
    tasks, names = tasks_of(options)
    rows: list[Row] = []
    failed = 0
    with tempfile.NamedTemporaryFile("w", prefix="peers-", suffix=".log", delete=False) as log:
        try:
            for task in tasks.values():
                check(recipe_of(task), options.replicas)
            prepare_texts(recipe_of(tasks[ALONE]), show_progress=True)  # once, before all ranks need the text
            for bandwidth in options.bandwidth:
                with (
                    open_hosts(options.replicas, bandwidth, options.latency_ms) as hosts,
                    HostRanks(peer_measure.__file__, hosts, log) as ranks,
                ):
                    turns = take_turns(ranks, tasks, options.turns, limit_in_words(bandwidth))
                failed += sum(len(tasks) - len(turn) for turn in turns)
                measured = [answers for turn in turns for answers in turn.values()]
                minima = {
                    loop: minimum_bytes(task, measured[0][0]["parameters"])
                    for loop, task in tasks.items()
                    if measured and loop != ALONE
                }
                rows += rows_of(bandwidth, names, turns, minima)
        except UserError as error:
            Path(log.name).unlink()
            raise SystemExit(f"error: {error}") from None
    if failed:
        print(f"{failed} measurements failed; what the processes printed is in {log.name}")
    else:
        Path(log.name).unlink()
    if not any(tokens for _, _, tokens, *_ in rows):
        raise SystemExit("no loop could be measured")
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    title = title_of(options, release)
    columns = COLUMNS if options.real else COLUMNS[:-1]
    rows = [row[: len(columns)] for row in rows]
    show(title, columns, rows, words=2)
    if options.write:
        folder = "peers_real" if options.real else "peers"
        table = markdown(columns, rows, words=2)
        write_page(RESULTS / folder, "Methods and peers over a slow network", [f"{title}.", table, NOTES])


def title_of(options: Namespace, torchft: str) -> str:
    """Return one line that says what was measured."""
    step = "computed" if options.real else f"of {options.step_ms:g} ms that sleep"
    latency = f", {options.latency_ms:g} ms of latency" if options.latency_ms else ""
    versions = f", torchft {torchft}" if torchft else ", without torchft"
    return (
        f"{options.replicas} hosts{latency}, rounds of {options.every} steps {step}, medians of {options.turns} turns of "
        f"{options.rounds} rounds after a first one{versions}"
    )


if __name__ == "__main__":
    main()
