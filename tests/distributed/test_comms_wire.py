"""Sums over a rounding wire on real ranks: against the rounding in NumPy, what it promises, and what it says it sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.wire import Wire
from tests.unit.test_wire import BLOCK, BYTES_PER_BLOCK, KINDS, LEVELS, rounded

SIZES = [1, 2, 127, 128, 129, 511, 512, 513, 1537, 5003]
WORLDS = [2, 3, 4]
BITS = {"bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Case:
    """A message on every rank; `broken` puts values that are not finite at (rank, index)."""

    kind: str
    numel: int
    dtype: str = "float64"
    heavy_tails: bool = False
    broken: tuple[tuple[int, int, float], ...] = ()

    def message(self, rank: int) -> np.ndarray:
        rng = np.random.default_rng([rank, self.numel])
        values = rng.standard_t(1.5, self.numel) if self.heavy_tails else rng.normal(size=self.numel)
        for where, index, value in self.broken:
            if where == rank:
                values[index] = value
        return values.astype(self.dtype)

    def messages(self, ranks: int) -> np.ndarray:
        return np.stack([self.message(rank) for rank in range(ranks)])


@dataclass
class Outcome:
    result: np.ndarray
    lost: np.ndarray
    counted: float  # bytes, by Comms
    sent: float  # bytes to other ranks, seen where the collectives start


class Watched(Comms):
    """A Comms that looks at what its collectives are given."""

    sent = 0.0

    def begin(self, what, counted, collective, *tensors):
        _, mine = tensors  # what comes in, what goes out
        assert mine.dtype == torch.uint8
        parts = {dist.all_to_all_single: self.size, dist.all_gather: 1}[collective]
        self.sent += (self.size - 1) * mine.numel() / parts
        return super().begin(what, counted, collective, *tensors)


def reduce_each(cases: list[Case]) -> list[Outcome]:
    """On every rank: one reduction after the other."""
    outcomes = []
    for case in cases:
        comms, tensor = Watched(dist.group.WORLD), torch.from_numpy(case.message(dist.get_rank()))
        pending = comms.all_reduce(tensor, "test", Wire(case.kind))
        assert pending.wait() is tensor
        outcomes.append(Outcome(tensor.numpy(), pending.lost().numpy(), comms.traffic.bytes, comms.sent))
    return outcomes


def by_case(ranks, cases: list[Case], world: int) -> dict[Case, list[Outcome]]:
    """Each case's outcomes, by rank."""
    return dict(zip(cases, zip(*ranks.run(reduce_each, cases, world_size=world), strict=True), strict=True))


@pytest.fixture(scope="module", params=WORLDS)
def sums(ranks, request) -> tuple[int, dict[Case, list[Outcome]]]:
    """Ranks, and every kind, size and precision summed over them."""
    cases = [Case(*choice) for choice in product(KINDS, SIZES, ["float32", "float64"], [False, True])]
    return request.param, by_case(ranks, cases, request.param)


def whole_blocks(values: np.ndarray) -> np.ndarray:
    """[..., n] with zeros after it, up to a multiple of BLOCK."""
    missing = -values.shape[-1] % BLOCK
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])


def largest(values: np.ndarray) -> np.ndarray:
    """The largest magnitude of each value's block."""
    blocks = np.abs(whole_blocks(values)).reshape(*values.shape[:-1], -1, BLOCK)
    return blocks.max(axis=-1).repeat(BLOCK, axis=-1)[..., : values.shape[-1]]


def allowed(messages: np.ndarray, kind: str) -> np.ndarray:
    """How far from the true sum the wire may end: half a step of every message, and half a step of their sum."""
    epsilon = np.finfo(messages.dtype).eps
    messages = messages.astype(np.longdouble)
    if kind == "bf16":
        first = (np.abs(messages) * 2.0**-8).sum(0)
        second = (np.abs(messages.sum(0)) + first) * 2.0**-8
    else:
        first = (largest(messages) / LEVELS[kind] / 2).sum(0)
        # The sum whose largest value sets the step is that of the rounded messages.
        second = (largest(messages.sum(0)) + largest(first)) / LEVELS[kind] / 2
    # A step is kept as a float32, off by 2^-24 of itself. The arithmetic adds an epsilon of a block's largest value for
    # each rounding's quotient and product, and half of one for each of at most 3 additions.
    return (first + second) * (1 + 2.0**-23) + 4 * epsilon * largest(messages).sum(0)


def expected(messages: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The sum and what each rank lost, from NumPy's rounding. In float64 the sum of a few rounded values has no error, so
    the order of adding does not show."""
    ranks, numel = messages.shape
    padded = whole_blocks(messages)
    total = rounded(padded, kind).sum(0)
    result = rounded(total, kind)
    lost = padded - rounded(padded, kind)
    chunk = math.ceil(padded.shape[1] // BLOCK / ranks) * BLOCK
    for rank in range(ranks):
        part = slice(rank * chunk, (rank + 1) * chunk)
        lost[rank, part] += (total - result)[part]
    return result[:numel], lost[:, :numel]


def bytes_of(case: Case, ranks: int) -> int:
    """What one rank sends: a chunk, in whole blocks, to each other rank, and as much for the sum."""
    return 2 * (ranks - 1) * math.ceil(math.ceil(case.numel / BLOCK) / ranks) * BYTES_PER_BLOCK[case.kind]


def assert_equal_bits(arrays: list[np.ndarray]) -> None:
    for other in arrays[1:]:
        np.testing.assert_array_equal(other.view(np.uint8), arrays[0].view(np.uint8))


def test_the_sum_is_within_the_bound_and_the_same_bits_on_every_rank(sums):
    world, outcomes_of = sums
    for case, outcomes in outcomes_of.items():
        messages = case.messages(world)
        error = np.abs(outcomes[0].result - messages.astype(np.longdouble).sum(0))
        assert (error <= allowed(messages, case.kind)).all(), case
        assert outcomes[0].result.dtype == case.dtype
        assert_equal_bits([outcome.result for outcome in outcomes])


def test_sum_and_losses_are_the_references_to_the_last_bit(sums):
    world, outcomes_of = sums
    for case, outcomes in outcomes_of.items():
        if case.dtype == "float32" or case.heavy_tails:  # where the order of adding shows
            continue
        result, lost = expected(case.messages(world), case.kind)
        for rank, outcome in enumerate(outcomes):
            np.testing.assert_array_equal(outcome.result, result, err_msg=str(case))
            np.testing.assert_array_equal(outcome.lost, lost[rank], err_msg=str(case))


def test_what_arrived_and_what_was_lost_make_the_true_sum(sums):
    world, outcomes_of = sums
    for case, outcomes in outcomes_of.items():
        messages, lost = case.messages(world), np.stack([outcome.lost for outcome in outcomes])
        assert lost.shape == messages.shape and lost.dtype == case.dtype
        assert np.abs(lost).max() > 1e-4 or case.numel <= 2
        missing = np.abs(messages.astype(np.longdouble).sum(0) - outcomes[0].result - lost.astype(np.longdouble).sum(0))
        # At most 3 additions, each off by half an epsilon of at most the sum of the largest; the losses are far smaller.
        assert (missing <= 2 * np.finfo(case.dtype).eps * largest(messages).sum(0)).all(), case


def test_bytes_are_those_of_the_chunks(sums):
    world, outcomes_of = sums
    for case, outcomes in outcomes_of.items():
        assert {outcome.counted for outcome in outcomes} == {outcome.sent for outcome in outcomes}
        assert outcomes[0].counted == bytes_of(case, world), case


def send_much(kind: str) -> float:
    comms = Comms(dist.group.WORLD)
    comms.all_reduce(torch.ones(10**6), "test", Wire(kind)).wait()
    return comms.traffic.bytes


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_million_values_are_within_2_percent_of_the_theory(ranks, kind, world):
    scales = 0 if kind == "bf16" else 4 / BLOCK
    theory = 2 * (world - 1) / world * 10**6 * (BITS[kind] / 8 + scales)
    assert ranks.run(send_much, kind, world_size=world) == [pytest.approx(theory, rel=0.02)] * world


NOT_FINITE = [(np.nan,), (np.inf,), (-np.inf,), (np.inf, -np.inf)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_broken_rank_breaks_the_block_on_every_rank_and_no_other(ranks, kind, world):
    """Two bad values are those of two ranks, at the same place: they must not cancel."""
    cases = [
        Case(kind, 1000, broken=tuple(((rank + i) % world, at, value) for i, value in enumerate(bad)))
        for bad, rank, at in product(NOT_FINITE, range(world), (0, 127, 450, 896, 999))
    ]
    healthy, _ = expected(Case(kind, 1000).messages(world), kind)
    for case, outcomes in by_case(ranks, cases, world).items():
        at = case.broken[0][1]
        block = np.arange(1000) // BLOCK
        broken = np.arange(1000) == at if kind == "bf16" else block == block[at]
        assert_equal_bits([outcome.result for outcome in outcomes])
        assert not np.isfinite(outcomes[0].result[broken]).any(), case
        np.testing.assert_array_equal(outcomes[0].result[~broken], healthy[~broken], err_msg=str(case))


def sum_too_large(kind: str) -> np.ndarray:
    tensor = torch.ones(300)
    tensor[130] = 2e38
    return Comms(dist.group.WORLD).all_reduce(tensor, "test", Wire(kind)).wait().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_that_overflows_is_not_finite(ranks, kind):
    for result in ranks.run(sum_too_large, kind):
        assert not np.isfinite(result[130])
        np.testing.assert_allclose(result[[*range(128), *range(256, 300)]], 4.0, rtol=1e-6)


SCRIPTS = [
    "begin a, begin b, begin c, proceed a, proceed b, proceed c, wait a, wait b, wait c",
    "begin a, begin b, proceed a, begin c, proceed b, wait a, proceed c, wait b, wait c",
    "begin a, begin b, begin c, wait a, wait b, wait c",
    "begin a, begin b, begin c, proceed c, proceed a, wait c, wait b, wait a",
    "begin a, proceed a, begin b, begin c, proceed a, wait a, wait a, proceed b, wait b, wait c",
    "begin a, plain x, proceed a, begin b, gather y, begin c, wait a, wait x, proceed b, wait b, wait y, wait c",
]
ROUNDED = {"a": Case("int8", 5003), "b": Case("int4", 700), "c": Case("bf16", 1)}
OTHERS = {"x": Case("fp32", 321), "y": Case("fp32", 7)}


def act(script: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Results, losses, and bytes counted."""
    comms, pending, results = Comms(dist.group.WORLD), {}, {}
    for verb, name in (line.split() for line in script.split(", ")):
        case = (ROUNDED | OTHERS)[name]
        tensor = torch.from_numpy(case.message(comms.rank))
        if verb in ("begin", "plain"):
            pending[name] = comms.all_reduce(tensor, name, Wire(case.kind) if verb == "begin" else None)
            assert verb == "plain" or not pending[name].is_done
        elif verb == "gather":
            pending[name] = comms.gather(tensor, name)
        elif verb == "proceed":
            pending[name].proceed()
        else:
            results[name] = pending[name].wait().numpy().copy()
            assert pending[name].is_done
    return results, {name: pending[name].lost().numpy() for name in ROUNDED}, comms.traffic.bytes


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_several_under_way_are_what_each_is_alone(ranks, script, world):
    for rank, (results, lost, counted) in enumerate(ranks.run(act, script, world_size=world)):
        for name, case in ROUNDED.items():
            result, losses = expected(case.messages(world), case.kind)
            np.testing.assert_array_equal(results[name], result)
            np.testing.assert_array_equal(lost[name], losses[rank])
        if "x" in results:
            np.testing.assert_allclose(results["x"], OTHERS["x"].messages(world).sum(0), rtol=1e-12, atol=1e-14)
            np.testing.assert_array_equal(results["y"], OTHERS["y"].messages(world))
            counted -= 2 * (world - 1) / world * 321 * 8 + (world - 1) * 7 * 8
        assert counted == pytest.approx(sum(bytes_of(case, world) for case in ROUNDED.values()), rel=1e-12)


def reduce_in_halves(case: Case) -> tuple[int, np.ndarray, np.ndarray]:
    """Ranks 0 and 2, and ranks 1 and 3, as with two shards: this one's rank among its own, and what it got."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    comms = Comms(groups[dist.get_rank() % 2])
    pending = comms.all_reduce(torch.from_numpy(case.message(dist.get_rank())), "test", Wire(case.kind))
    return comms.rank, pending.wait().numpy(), pending.lost().numpy()


def test_a_group_of_some_ranks_sums_its_own(ranks):
    case = Case("int4", 700)
    for rank, (place, result, lost) in enumerate(ranks.run(reduce_in_halves, case)):
        assert place == rank // 2
        total, losses = expected(case.messages(4)[rank % 2 :: 2], case.kind)
        np.testing.assert_array_equal(result, total)
        np.testing.assert_array_equal(lost, losses[place])


def reduce_part_of_a_buffer(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The buffer after a reduction of its middle, as two dimensions, was begun; and after it was done."""
    buffer = torch.arange(1000, dtype=torch.float64)
    pending = Comms(dist.group.WORLD).all_reduce(buffer[5:905].view(30, 30), "test", Wire(kind))
    before = buffer.clone()
    pending.wait()
    return before.numpy(), buffer.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_is_written_in_place_when_it_is_waited_for_and_nowhere_else(ranks, kind):
    values = np.arange(1000, dtype=np.float64)
    total, _ = expected(np.stack([values[5:905]] * 4), kind)
    for before, after in ranks.run(reduce_part_of_a_buffer, kind):
        np.testing.assert_array_equal(before, values)
        np.testing.assert_array_equal(after, np.concatenate([values[:5], total, values[905:]]))


def reduce_nothing(kind: str) -> tuple[tuple[int, ...], float, float]:
    comms = Comms(dist.group.WORLD)
    empty, sent = comms.all_reduce(torch.empty(0, 3), "test", Wire(kind)).wait(), comms.traffic.bytes
    return tuple(empty.shape), sent, float(comms.all_reduce(torch.ones(1), "test", Wire(kind)).wait())


def test_an_empty_tensor_sends_nothing_and_is_in_nobodys_way(ranks):
    assert ranks.run(reduce_nothing, "int8") == [((0, 3), 0.0, 4.0)] * 4


def reduce_alone(case: Case) -> list[tuple[np.ndarray, float]]:
    """Over a group of one, and over no group."""
    outcomes = []
    for comms in (Comms(dist.group.WORLD), Comms(None)):
        tensor = torch.from_numpy(case.message(0))
        pending = comms.all_reduce(tensor, "test", Wire(case.kind))
        pending.proceed()
        assert pending.is_done and pending.wait() is tensor
        outcomes.append((tensor.numpy(), comms.traffic.bytes))
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_rounds_nothing_and_sends_nothing(ranks, kind):
    case = Case(kind, 700, "float32")
    [outcomes] = ranks.run(reduce_alone, case, world_size=1)
    assert_equal_bits([case.message(0), *(values for values, _ in outcomes)])
    assert [sent for _, sent in outcomes] == [0, 0]


ROUNDS = (1, 10, 100)


def means_over_rounds(case: Case, feedback: bool) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """After so many rounds of the same message: the mean of the sums, and the last message as it was sent."""
    comms, message = Comms(dist.group.WORLD), torch.from_numpy(case.message(dist.get_rank()))
    lost, total, reached = torch.zeros_like(message), torch.zeros_like(message), {}
    for k in range(1, max(ROUNDS) + 1):
        tensor = message + lost
        sent = tensor.clone()
        pending = comms.all_reduce(tensor, "test", Wire(case.kind))
        total += pending.wait()
        if feedback:
            lost = pending.lost()
        if k in ROUNDS:
            reached[k] = ((total / k).numpy(), sent.numpy())
    return reached


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_lost_is_made_up_for_in_later_rounds(ranks, kind, world):
    """Fed back, K sums together miss only the last round's loss, so their mean is off by 1/K of one round's bound. Without
    it every round is off alike."""
    case = Case(kind, 700)
    true = case.messages(world).sum(0)
    with_it, without = (ranks.run(means_over_rounds, case, flag, world_size=world) for flag in (True, False))
    np.testing.assert_array_equal(with_it[0][1][0], without[0][1][0])
    for k in ROUNDS:
        error, bias = with_it[0][k][0] - true, without[0][k][0] - true
        last_messages = np.stack([reached[k][1] for reached in with_it])
        assert (np.abs(error) <= allowed(last_messages, kind) / k + 1e-12).all()
        np.testing.assert_allclose(bias, without[0][1][0] - true, rtol=0, atol=1e-12)
    assert np.abs(bias).mean() > 30 * np.abs(error).mean()


def reduce_without_peer(exchanges: int) -> str:
    """Rank 1 takes part in so many of the two exchanges, then leaves."""
    comms = Comms(dist.group.WORLD)
    if comms.rank == 1:
        if exchanges:
            sent = Wire("int8").encode(torch.ones(2, 256))
            comms.begin("its part", 0, dist.all_to_all_single, torch.empty_like(sent), sent).wait()
        return ""
    try:
        comms.all_reduce(torch.ones(300), "the message", Wire("int8")).wait()
    except TrainingError as error:
        return str(error)
    return "summed without rank 1"


@pytest.mark.parametrize("exchanges", [0, 1])
def test_a_peer_that_leaves_is_an_error_that_names_the_message(ranks, exchanges):
    said, _ = ranks.run(reduce_without_peer, exchanges, world_size=2, timeout=20)
    assert said.startswith("the message over the replica axis failed on rank 0 (replica 0 of 2) on ")
