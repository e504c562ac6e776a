"""Estimate of the time per round for which replicas wait for the network, from a method's choices and the link between replicas.

A local step takes `step_seconds` regardless of the network, and a round has `every` local steps. All replicas are equally fast,
and the arithmetic of a synchronization takes no time, so the exposed time is only the network's. Utilization is compute /
(compute + exposed). The time of a message, and what a schedule exposes of it, is

    ring all-reduce     2 (N-1) hops of 1/N of the message. A hop takes bytes / bandwidth + a round trip, because gloo first
                        waits until it has heard that the receiver is ready. gloo sends a hop in two halves, so that the round
                        trip of one half passes while the other one is sent, and cuts hops at 2 MiB. Two messages are sent at
                        once on each connection, the others after them
    rounded message     its bytes to all others, then the rounded sums in the same way; the largest values alone need only the
                        first of these exchanges. It takes the latency twice, because receivers say that they are ready when it
                        starts; the second exchange takes it once. Any number of messages is sent at once
    blocking            all messages, and N-1 hops without bytes in which the replicas agree on the round
    layer-wise          as for blocking, minus the forward passes of the blocks before the one that waits
    every step          all messages, minus the backward passes of the blocks that come after the one that waits. A pause before
                        the first one delays the first message on each connection. Under ZeRO, as for blocking
    overlapped          per fragment: its messages, minus d steps; or per round: all messages, minus the round, if that is more
    delayed             as for overlapped, with the steps of a round as d
    wait-avoiding       in every step, the round trips that wake the group's threads, and the group's messages; in the last step of
                        a round, the messages of all replicas
    timed rounds        as for a round of as many steps as `timed_round` counts
    averaged moments    all messages of the moments that are due, unrounded, at the end of a round; Muon's matrices count as if
                        they had second moments

TCP starts slowly after a pause. `NetworkLink.restart_seconds` is added to the first message after a pause.

If the reduction weights replicas, an overlapped or delayed message is sent one step later, when the weights are known, which
leaves d - 1 steps to hide it. The second exchange of a rounded message starts halfway through these steps. In timed rounds,
and in steps that average gradients, it starts only when the mean is needed, and nothing hides it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmtrain.config import (
    PREFETCH,
    BlockingSection,
    DelayedSection,
    LayerwiseSection,
    OverlappedSection,
    SyncSection,
    WaitAvoidingSection,
    WireSection,
)
from llmtrain.parallel.comms import HOP_BYTES
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.parallel.wire_format import WireFormat

PREDICTION_ERROR = 4.0
"""Largest difference between these predictions and measurements, in points of utilization, rounded up: 36 measurements in
benchmarks/results/network and 8 in docs/network.md."""
FORWARD_SHARE = 1 / 3
"""Fraction of a step's time that its forward pass takes, without recomputation."""
VALUE_BYTES = 4
"""Bytes of an unrounded value, unless it is in fp64."""
STREAMS = 2
"""Number of all-reduces that gloo carries out at once on one connection. Others wait until one of gloo's two threads is free."""
INITIAL_WINDOW = 14_480
"""Bytes that TCP sends in the first round trip after a long pause: ten segments."""
WAKE_ROUND_TRIPS = 1.5
"""Round trips until the threads of a wait-avoiding group begin: half a round trip until a waiting thread hears of the key that
wakes it, and one to read the key."""
TIMED_ROUNDS = 100
"""Maximum number of rounds that `timed_round` follows, until a round has as many steps as the one before."""
TIMEOUT_SECONDS = 0.2
"""Minimum difference between TCP's retransmission timeout and a steady round trip (Linux)."""


@dataclass(frozen=True)
class NetworkLink:
    """Network between replicas, as seen by one rank."""

    mbit: float
    """Megabits of messages per second that a rank can send while it receives as many."""
    latency_seconds: float = 0.0
    """One-way latency."""
    slow_start: bool = True
    """True if TCP's window is halved for each retransmission timeout within a pause, as by default on Linux."""
    connections: int = 1
    """Number of connections to each peer, for all-reduces that are in flight at once."""

    @property
    def round_trip(self) -> float:
        """Seconds from one replica to another and back."""
        return 2 * self.latency_seconds

    def transfer_seconds(self, sent: float) -> float:
        """Return the seconds that `sent` bytes take without latency."""
        return 8 * sent / (self.mbit * 1e6)

    def restart_seconds(self, in_flight: float, pause: float) -> float:
        """Return the seconds that TCP's slow start adds if a connection has been idle for `pause` seconds and then has
        `in_flight` bytes to send per round trip. It is one round trip for each doubling of the window until the window has
        that size. The window doubles at most as many times as the pause has halved it."""
        if not (self.slow_start and self.latency_seconds and in_flight):
            return 0.0
        window = min(in_flight, self.mbit * 1e6 / 8 * self.round_trip)
        doublings = max(0.0, math.log2(1 + window / INITIAL_WINDOW) - 1)
        return self.round_trip * min(doublings, pause // (self.round_trip + TIMEOUT_SECONDS))


@dataclass(frozen=True)
class Exchange:
    """Collective over the replicas in which each rank sends `sent` bytes in `hops` hops, one after another."""

    sent: float
    hops: float
    peers: int = 1
    """Number of ranks to which a rank sends at once."""
    is_ring: bool = True
    """True for gloo's all-reduce, in which a hop's second half is sent while the first one is on its way. False for messages to all
    others at once."""
    receivers_ready: bool = False
    """True if the receivers of messages to all others are ready when they are sent. Otherwise, the sender first waits for their
    signal, which takes the latency."""
    parts: int = 1
    """Number of equal parts on different connections, each with `hops` hops."""

    @property
    def in_flight(self) -> float:
        """Bytes that are on their way to one peer at a time, per connection."""
        return self.sent / self.parts / max(self.hops, 1) / self.peers

    def streams(self, link: NetworkLink) -> float:
        """Return the number of parts of exchanges of this kind that run at once."""
        return STREAMS * link.connections if self.is_ring else math.inf

    def seconds(self, link: NetworkLink) -> float:
        """Return the seconds that each part of the exchange takes if nothing else is sent."""
        hop = link.transfer_seconds(self.sent / self.parts) / max(self.hops, 1)
        if self.is_ring:
            return self.hops * max(hop, hop / 2 + link.round_trip)
        return self.hops * (hop + self.delay(link))

    def delay(self, link: NetworkLink) -> float:
        """Return the seconds from the start of a message to all others until its first bytes arrive."""
        return link.latency_seconds * (1 if self.receivers_ready else 2)


@dataclass(frozen=True)
class BlockMessage:
    """Exchanges by which replicas sum one block: one, or two if its values are rounded."""

    first: Exchange
    second: Exchange | None = None

    @property
    def sent(self) -> float:
        """Bytes that each rank sends."""
        return self.first.sent + (self.second.sent if self.second is not None else 0.0)


def block_message(
    values: int,
    replicas: int,
    wire: WireSection,
    rounded: bool = True,
    connections: int = 1,
    value_bytes: int = VALUE_BYTES,
) -> BlockMessage:
    """Return the exchanges for a block of `values` values per rank. If not `rounded`, values are sent as they are, with
    `value_bytes` bytes each. `connections` is the link's number."""
    others = replicas - 1
    if wire.kind == "fp32" or not rounded:
        chunk = value_bytes * values / replicas
        parts = connections if chunk > HOP_BYTES else 1
        hops = 2 * others * max(1.0, chunk / parts / HOP_BYTES)
        return BlockMessage(Exchange(2 * others * chunk, hops, parts=parts))
    if wire.kind == "topk":
        sparse = SparseFormat(wire.keep, wire.values)
        return BlockMessage(Exchange(others * sparse.size(values, value_bytes), 1, peers=others, is_ring=False))
    encoded = WireFormat(wire.kind)
    sent = others * encoded.size(encoded.padded_chunk(values, replicas))
    first, second = (Exchange(sent, 1, others, is_ring=False, receivers_ready=ready) for ready in (False, True))
    return BlockMessage(first, second)


def concurrent_seconds(exchanges: Sequence[Exchange], link: NetworkLink, started: int | None = None) -> float:
    """Return the seconds that exchanges of one kind take if `started` of them, by default all, start at once, and each of the
    others when an earlier one is done. Together they take at least the transfer time of their bytes."""
    if not exchanges:
        return 0.0
    first = exchanges[0]
    streams = [0.0] * int(min(first.streams(link), first.parts * (started or len(exchanges))))
    for exchange in exchanges:
        for _ in range(exchange.parts):
            heapq.heappush(streams, heapq.heappop(streams) + exchange.seconds(link))
    return max(_least_seconds(sum(exchange.sent for exchange in exchanges), first, link), *streams)


def _least_seconds(sent: float, first: Exchange, link: NetworkLink) -> float:
    """Return the seconds until the last of `sent` bytes has arrived if a rank sends without a pause, from the `first` exchange
    on. No delay is added for a ring, where a rank sends only a part of its bytes after others' bytes have arrived."""
    return link.transfer_seconds(sent) + (0.0 if first.is_ring else first.delay(link))


def slow_start_seconds(
    exchanges: Sequence[Exchange], link: NetworkLink, pause: float, started: int | None = None
) -> float:
    """Return the seconds that TCP's slow start adds to exchanges, `started` of which (by default all) start at once after `pause`
    seconds."""
    at_once = exchanges[: STREAMS if exchanges and exchanges[0].is_ring else started]  # on each connection
    return link.restart_seconds(sum(exchange.in_flight for exchange in at_once), pause) if at_once else 0.0


def sequence_seconds(messages: Sequence[BlockMessage], link: NetworkLink, in_flight: int = PREFETCH + 1) -> float:
    """Return the seconds that messages take if their blocks are finished one after another, with `in_flight` on their way."""
    second = _second(messages)
    if not second:
        return concurrent_seconds(_first(messages), link, in_flight)
    arrived: list[float] = []  # times at which the blocks' first exchanges arrive
    sent: list[float] = []  # times at which their second exchanges start
    done = 0.0
    for index, message in enumerate(messages):
        arrived += [done + ahead.first.seconds(link) for ahead in messages[len(arrived) : index + in_flight]]
        for near in range(len(sent), min(index + 2, len(arrived))):  # of this block and, at the same time, the next one
            sent.append(max([done, arrived[near], *sent[-1:]]))
        done = max(done, sent[index] + message.second.seconds(link))
    return max(_least_seconds(sum(message.sent for message in messages), messages[0].first, link), done)


@dataclass(frozen=True)
class RoundTime:
    """Estimated times of one round (or of one step that averages gradients) in seconds, and its bytes."""

    compute: float
    exposed: float
    sent: float
    """Bytes that each rank sends to other replicas."""

    @property
    def utilization(self) -> float:
        """Fraction of the time that is not spent waiting for the network."""
        return self.compute / (self.compute + self.exposed)


def gradient_time(
    wire: WireSection,
    block_values: Sequence[int],
    replicas: int,
    step_seconds: float,
    link: NetworkLink,
    backward_share: float = 1 - FORWARD_SHARE,
    value_bytes: int = VALUE_BYTES,
) -> RoundTime:
    """Return the times of a step that averages gradients, as `round_time` does. `backward_share` is the fraction of a step in
    which gradients are sent; 0 if the engine sends them afterwards, PREFETCH + 1 blocks at once."""
    connections, is_rounded = link.connections, wire.gradients
    messages = [
        block_message(values, replicas, wire, is_rounded, connections, value_bytes) for values in reversed(block_values)
    ]
    sent = sum(message.sent for message in messages)
    if not backward_share:
        started = slow_start_seconds(_first(messages), link, step_seconds, PREFETCH + 1)
        return RoundTime(step_seconds, started + sequence_seconds(messages, link), sent)
    backward = backward_share * step_seconds / len(messages)
    first, exposed = _first(messages), 0.0
    for after in range(len(messages)):  # blocks whose messages start with this one's, or later
        seconds = concurrent_seconds(first[after:], link)
        if after < (connections if first[0].is_ring else 1):
            seconds += slow_start_seconds(first[after:], link, (1 - backward_share) * step_seconds + backward)
        exposed = max(exposed, seconds - (len(messages) - 1 - after) * backward)
    exposed += concurrent_seconds(_second(messages), link)
    return RoundTime(step_seconds, exposed, sent)


def round_time(
    sync: SyncSection,
    block_values: Sequence[int],
    replicas: int,
    step_seconds: float,
    every: float,
    link: NetworkLink,
    forward_share: float = FORWARD_SHARE,
    value_bytes: int = VALUE_BYTES,
) -> RoundTime:
    """Return the times of a round of `every` steps after the warm-up. `block_values` has the number of values per rank of each
    block. `forward_share` is the fraction of a step in which blocks are synchronized layer by layer; 0 if the engine gathers all
    blocks first."""
    if replicas == 1:
        return RoundTime(every * step_seconds, 0.0, 0.0)
    if sync.period.averages_gradients:
        return gradient_time(sync.wire, block_values, replicas, step_seconds, link, value_bytes=value_bytes)

    def to_all(rounded: bool) -> list[BlockMessage]:
        return [
            block_message(values, replicas, sync.wire, rounded, link.connections, value_bytes)
            for values in block_values
        ]

    messages = to_all(rounded=True)
    compute = every * step_seconds
    sent = sum(message.sent for message in messages)
    in_flight = sync.schedule.blocks_in_flight
    started = (replicas - 1) * link.round_trip + slow_start_seconds(_first(messages), link, compute, in_flight)
    match sync.schedule:
        case BlockingSection():
            exposed = started + sequence_seconds(messages, link)
        case LayerwiseSection():
            forward = forward_share * step_seconds / len(messages)
            # A block shares the network with the next ones, which are sent at the same time.
            shared = min(messages[0].first.streams(link), in_flight) - 1
            arrivals = [sequence_seconds(messages[: r + shared], link, in_flight) for r in range(1, len(messages) + 1)]
            exposed = started + max(arrival - r * forward for r, arrival in enumerate(arrivals))
        case OverlappedSection() | DelayedSection() as late:
            fragments = [[messages[b] for b in blocks] for blocks in late.blocks_of_fragments(len(messages))]
            exposed = sum(_fragment_exposed(sync, late, own, step_seconds, every, link) for own in fragments)
            # Several fragments may be in flight at once, but together they have no more time than the round takes.
            exposed = max(exposed, sequence_seconds(messages, link) - compute)
        case WaitAvoidingSection() as avoiding:
            members = avoiding.resolve_group_size(replicas) or replicas
            group = [block_message(values, members, sync.wire, value_bytes=value_bytes) for values in block_values]
            exposed = (
                (every - 1) * _group_exposed(group, members, replicas, step_seconds, link)
                + sequence_seconds(messages, link)
                + slow_start_seconds(_first(messages), link, compute, in_flight)
            )
            sent += (every - 1) * sum(message.sent for message in group)
        case other:
            raise NotImplementedError(f"no time is known for {type(other).__name__}")
    periods_of_moments = () if sync.moments is None else (sync.moments.first, sync.moments.second)
    for due in periods_of_moments:
        if due is not None:
            of_moments = to_all(rounded=False)
            exposed += sequence_seconds(of_moments, link) / due
            sent += sum(message.sent for message in of_moments) / due
    return RoundTime(compute, exposed, sent)


def timed_round(
    sync: SyncSection,
    block_values: Sequence[int],
    replicas: int,
    step_seconds: float,
    link: NetworkLink,
    forward_share: float = FORWARD_SHARE,
    value_bytes: int = VALUE_BYTES,
) -> RoundTime:
    """Return the times of a timed round, as `round_time` does. Replicas exchange step counts every `sync.period.every`
    seconds, including the wait for the last round's messages, until they have taken `sync.period.min_steps` steps together."""
    period, found, steps = sync.period, RoundTime(0.0, 0.0, 0.0), 0
    in_later_ones = max(1, math.ceil(period.every / step_seconds))
    for _ in range(TIMED_ROUNDS):
        last, steps = steps, max(1, math.ceil((period.every - found.exposed) / step_seconds))
        steps += in_later_ones * max(0, math.ceil((period.min_steps / replicas - steps) / in_later_ones))
        if steps == last:
            break
        found = round_time(sync, block_values, replicas, step_seconds, steps, link, forward_share, value_bytes)
    return found


def _first(messages: Sequence[BlockMessage]) -> list[Exchange]:
    return [message.first for message in messages]


def _second(messages: Sequence[BlockMessage]) -> list[Exchange]:
    return [message.second for message in messages if message.second is not None]


def _group_exposed(
    messages: Sequence[BlockMessage], members: int, replicas: int, step_seconds: float, link: NetworkLink
) -> float:
    """Return the exposed seconds of a wait-avoiding average within a group. Groups change from step to step. Each group has its
    own connection, which is idle until the group's turn comes again."""
    one = replace(link, connections=1)
    first, second = _first(messages), _second(messages)
    exposed = WAKE_ROUND_TRIPS * link.round_trip + concurrent_seconds(first, one) + concurrent_seconds(second, one)
    bits = replicas.bit_length() - 1
    turns = bits // math.gcd(bits, members.bit_length() - 1)
    return exposed + slow_start_seconds(first, one, turns * step_seconds + (turns - 1) * exposed)


def _fragment_exposed(
    sync: SyncSection,
    section: OverlappedSection | DelayedSection,
    messages: Sequence[BlockMessage],
    step_seconds: float,
    every: float,
    link: NetworkLink,
) -> float:
    """Return the exposed seconds of one fragment in a round."""
    steps = section.steps if isinstance(section, OverlappedSection) else every
    # In timed rounds, replicas agree on weights and send at once. The second exchange waits until they meet again.
    before = 0 if sync.period.is_timed else sync.reduction.steps_before_sending
    middle = 0 if sync.period.is_timed else (before + steps) // 2 - before
    hidden, halfway = (steps - before) * step_seconds, middle * step_seconds
    first, second = concurrent_seconds(_first(messages), link), concurrent_seconds(_second(messages), link)
    pause = max(0.0, every / section.fragments * step_seconds - first - second)
    first += slow_start_seconds(_first(messages), link, pause)
    second += slow_start_seconds(_second(messages), link, max(0.0, (halfway or hidden) - first))
    if not second or not halfway:  # with fewer than two steps, the second exchange starts when the mean is needed
        return max(0.0, first - hidden) + second
    return max(0.0, first - halfway) + max(0.0, second - (hidden - halfway))
