"""Tests of sums over a rounding wire: the same rounding in NumPy, the bound on the error, and the bytes that are counted.

These ranks are threads. test_threads.py compares threads with gloo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmtrain.parallel.comms import ALL_GATHER, Comms
from llmtrain.parallel.exchanges import CollectiveExchange
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.parallel.wire_format import WireFormat
from tests.distributed.oracle_wire import rounded_sum, whole_blocks
from tests.distributed.threads import ThreadComms, Threads, on_each
from tests.unit.test_wire import BLOCK, BYTES_PER_BLOCK, KINDS, LEVELS

SIZES = [1, 2, 127, 128, 129, 511, 512, 513, 1537, 5003]
WORLDS = [2, 3, 4]


@dataclass(frozen=True)
class Case:
    """Message on every rank. `broken` has values that are not finite, as (rank, index, value)."""

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
    counted: float  # bytes that Comms counts
    sent: float  # bytes to other ranks, by the tensors that the collectives get


class Watched(ThreadComms):
    """Comms that counts the bytes of the tensors that its collectives get."""

    sent = 0.0

    def start_work(self, what, counted, collective, *tensors):
        _, mine = tensors  # output, input
        assert mine.dtype == torch.uint8
        parts = {dist.all_to_all_single: self.size, ALL_GATHER: 1}[collective]
        self.sent += (self.size - 1) * mine.numel() / parts
        return super().start_work(what, counted, collective, *tensors)


class KeepsTarget(ThreadComms):
    """Comms that remembers where its last collective writes."""

    target: torch.Tensor

    def start_work(self, what, counted, collective, *tensors):
        self.target = tensors[0]
        return super().start_work(what, counted, collective, *tensors)


def reduce_each(comms: Watched, cases: list[Case]) -> list[Outcome]:
    """Reduce the messages of the cases one after another."""
    outcomes = []
    for case in cases:
        tensor = torch.from_numpy(case.message(comms.rank))
        counted, sent = comms.traffic.bytes, comms.sent
        pending = comms.start_all_reduce(tensor, "test", WireFormat(case.kind), keeps_error=True)
        result, lost = pending.wait().numpy(), pending.quantization_error().numpy()
        outcomes.append(Outcome(result, lost, comms.traffic.bytes - counted, comms.sent - sent))
    return outcomes


def by_case(cases: list[Case], world: int) -> dict[Case, list[Outcome]]:
    """Return each case's outcomes, by rank."""
    by_rank = on_each(world, reduce_each, cases, comms=Watched)
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))


@pytest.fixture(scope="module", params=WORLDS)
def sums(request) -> tuple[int, dict[Case, list[Outcome]]]:
    """Provide the number of ranks, and the outcomes of sums of every kind, size and precision over them."""
    cases = [Case(*choice) for choice in product(KINDS, SIZES, ["float32", "float64"], [False, True])]
    return request.param, by_case(cases, request.param)


class Noted(ThreadComms):
    """Comms that remembers its collectives."""

    def start_work(self, what, counted, collective, *tensors):
        self.begun = [*getattr(self, "begun", []), collective]
        return super().start_work(what, counted, collective, *tensors)


def begun_by_a_sum(comms: Noted) -> list:
    comms.all_reduce(torch.linspace(-comms.rank, 1, 700), "a sum", WireFormat("int8"))
    return comms.begun


def test_rounded_sums_are_two_collectives_unless_over_gloo() -> None:
    """Over gloo, they are messages between two ranks, which test_exchanges.py tests."""
    assert on_each(4, begun_by_a_sum, comms=Noted) == [[dist.all_to_all_single, ALL_GATHER]] * 4


def largest(values: np.ndarray) -> np.ndarray:
    """Return the largest magnitude in each value's block."""
    blocks = np.abs(whole_blocks(values)).reshape(*values.shape[:-1], -1, BLOCK)
    return blocks.max(axis=-1).repeat(BLOCK, axis=-1)[..., : values.shape[-1]]


def allowed(messages: np.ndarray, kind: str) -> np.ndarray:
    """Return the bound on the error of a sum: half a step of every message, and half a step of their sum."""
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


def bytes_of(case: Case, ranks: int) -> int:
    """Return the bytes that one rank sends: a chunk of whole blocks to each other rank, and as much for the sum."""
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
        if case.dtype == "float32" or case.heavy_tails:  # the order of additions changes the sum
            continue
        result, lost = rounded_sum(case.messages(world), case.kind)
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


NOT_FINITE = [(np.nan,), (np.inf,), (-np.inf,), (np.inf, -np.inf)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_broken_rank_breaks_the_block_on_every_rank_and_no_other(kind, world):
    """If there are two bad values, two ranks have them at the same index, where they must not cancel."""
    cases = [
        Case(kind, 1000, broken=tuple(((rank + i) % world, at, value) for i, value in enumerate(bad)))
        for bad, rank, at in product(NOT_FINITE, range(world), (0, 127, 450, 896, 999))
    ]
    healthy, _ = rounded_sum(Case(kind, 1000).messages(world), kind)
    for case, outcomes in by_case(cases, world).items():
        at = case.broken[0][1]
        block = np.arange(1000) // BLOCK
        broken = np.arange(1000) == at if kind == "bf16" else block == block[at]
        assert_equal_bits([outcome.result for outcome in outcomes])
        assert not np.isfinite(outcomes[0].result[broken]).any(), case
        np.testing.assert_array_equal(outcomes[0].result[~broken], healthy[~broken], err_msg=str(case))


def sum_too_large(comms: Comms, kind: str) -> np.ndarray:
    tensor = torch.ones(300)
    tensor[130] = 2e38
    return comms.all_reduce(tensor, "test", WireFormat(kind)).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_that_overflows_is_not_finite(kind):
    for result in on_each(4, sum_too_large, kind):
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


def act(comms: Comms, script: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Run the script, and return the results, the rounding errors and the bytes counted."""
    pending, results = {}, {}
    for verb, name in (line.split() for line in script.split(", ")):
        case = (ROUNDED | OTHERS)[name]
        tensor = torch.from_numpy(case.message(comms.rank))
        if verb in ("begin", "plain"):
            pending[name] = comms.start_all_reduce(
                tensor, name, WireFormat(case.kind) if verb == "begin" else None, True
            )
            assert verb == "plain" or not pending[name].is_done
        elif verb == "gather":
            pending[name] = comms.start_all_gather(tensor, name)
        elif verb == "proceed":
            pending[name].start_second_phase()
        else:
            results[name] = pending[name].wait().numpy().copy()
            assert pending[name].is_done
    return results, {name: pending[name].quantization_error().numpy() for name in ROUNDED}, comms.traffic.bytes


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_several_under_way_are_what_each_is_alone(script, world):
    for rank, (results, lost, counted) in enumerate(on_each(world, act, script)):
        for name, case in ROUNDED.items():
            result, losses = rounded_sum(case.messages(world), case.kind)
            np.testing.assert_array_equal(results[name], result)
            np.testing.assert_array_equal(lost[name], losses[rank])
        if "x" in results:
            np.testing.assert_allclose(results["x"], OTHERS["x"].messages(world).sum(0), rtol=1e-12, atol=1e-14)
            np.testing.assert_array_equal(results["y"], OTHERS["y"].messages(world))
            counted -= 2 * (world - 1) / world * 321 * 8 + (world - 1) * 7 * 8
        assert counted == pytest.approx(sum(bytes_of(case, world) for case in ROUNDED.values()), rel=1e-12)


def reduce_part_of_a_buffer(comms: Comms, kind: str) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Reduce the middle of a buffer, as two dimensions. Return the buffer, the shape of the sum, and the sum."""
    buffer = torch.arange(1000, dtype=torch.float64)
    total = comms.all_reduce(buffer[5:905].view(30, 30), "test", WireFormat(kind))
    return buffer.numpy(), tuple(total.shape), total.numpy().ravel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_sum_has_memory_of_its_own(kind):
    values = np.arange(1000, dtype=np.float64)
    total, _ = rounded_sum(np.stack([values[5:905]] * 4), kind)
    for after, shape, found in on_each(4, reduce_part_of_a_buffer, kind):
        np.testing.assert_array_equal(after, values)
        np.testing.assert_array_equal(found, total)
        assert shape == (30, 30)


def bytes_held(pending: Any) -> int:
    """Return the bytes of the tensors of a reduction and of its exchanges."""
    parts = [value for value in vars(pending).values() if value is not None]
    inner = [part for one in parts if isinstance(one, CollectiveExchange) for part in vars(one).values()]
    return sum(part.untyped_storage().nbytes() for part in [*parts, *inner] if isinstance(part, torch.Tensor))


def memory_in_flight(comms: Comms, wire: WireFormat | SparseFormat, keeps_error: bool) -> list[int]:
    """Return the bytes held after each call: the start, the second phase, the wait, and the return of the error."""
    pending = comms.start_all_reduce(torch.ones(4 * 4096), "test", wire, keeps_error)
    held = [bytes_held(pending)]
    for call in (pending.start_second_phase, pending.wait, pending.quantization_error):
        call()
        held.append(bytes_held(pending))
    return held


IN_FLIGHT = [
    (WireFormat("int8"), False),
    (WireFormat("int8"), True),
    (WireFormat("bf16"), False),
    (SparseFormat(9, "2bit"), True),
]


@pytest.mark.parametrize(("wire", "keeps_error"), IN_FLIGHT)
def test_a_message_in_flight_holds_what_was_received_and_its_errors(wire, keeps_error):
    values = 4 * 4096
    encoded = 4 * wire.size(values) if isinstance(wire, SparseFormat) else wire.size(values)
    error = 4 * values if keeps_error else 0
    for held in on_each(4, memory_in_flight, wire, keeps_error):
        assert held == [error + encoded, error + encoded, error + 4 * values, 4 * values]


def reduce_nothing(comms: Comms, kind: str) -> tuple[tuple[int, ...], float, float]:
    empty, sent = comms.all_reduce(torch.empty(0, 3), "test", WireFormat(kind)), comms.traffic.bytes
    return tuple(empty.shape), sent, float(comms.all_reduce(torch.ones(1), "test", WireFormat(kind)))


def test_an_empty_tensor_sends_nothing_and_is_in_nobodys_way():
    assert on_each(4, reduce_nothing, "int8") == [((0, 3), 0.0, 4.0)] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_rounds_nothing_and_sends_nothing(kind):
    """This holds in a group of one rank, and without a group."""
    case = Case(kind, 700, "float32")
    for comms in (ThreadComms(Threads(1), [0], 0), Comms(None)):
        tensor = torch.from_numpy(case.message(0))
        pending = comms.start_all_reduce(tensor, "test", WireFormat(kind))
        pending.start_second_phase()
        assert pending.is_done and pending.wait() is tensor
        assert_equal_bits([case.message(0), tensor.numpy()])
        assert comms.traffic.bytes == 0


ROUNDS = (1, 10, 100)


def means_over_rounds(comms: Comms, case: Case, error_feedback: bool) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Send the same message in many rounds. Return, after each number of ROUNDS, the mean of the sums and the last message sent."""
    message = torch.from_numpy(case.message(comms.rank))
    lost, total, reached = torch.zeros_like(message), torch.zeros_like(message), {}
    for k in range(1, max(ROUNDS) + 1):
        tensor = message + lost
        sent = tensor.clone()
        pending = comms.start_all_reduce(tensor, "test", WireFormat(case.kind), keeps_error=error_feedback)
        total += pending.wait()
        if error_feedback:
            lost = pending.quantization_error()
        if k in ROUNDS:
            reached[k] = ((total / k).numpy(), sent.numpy())
    return reached


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.deep), 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_lost_is_made_up_for_in_later_rounds(kind, world):
    """With error feedback, K sums together miss only the loss of the last round, so the error of their mean is at most 1/K of one
    round's bound. Without it, every round has the same error."""
    case = Case(kind, 700)
    true = case.messages(world).sum(0)
    with_it, without = (on_each(world, means_over_rounds, case, flag) for flag in (True, False))
    np.testing.assert_array_equal(with_it[0][1][0], without[0][1][0])
    for k in ROUNDS:
        error, bias = with_it[0][k][0] - true, without[0][k][0] - true
        last_messages = np.stack([reached[k][1] for reached in with_it])
        assert (np.abs(error) <= allowed(last_messages, kind) / k + 1e-12).all()
        np.testing.assert_allclose(bias, without[0][1][0] - true, rtol=0, atol=1e-12)
    assert np.abs(bias).mean() > 30 * np.abs(error).mean()


def test_a_gather_is_written_where_its_result_is_read():
    """If the result were a list of tensors, NCCL would gather into a second buffer and copy from it."""

    def gather(comms: KeepsTarget) -> tuple[bool, torch.Tensor]:
        pending = comms.start_all_gather(torch.arange(6.0).view(2, 3).T + 10 * comms.rank)
        return pending.result.data_ptr() == comms.target.data_ptr(), pending.wait()

    for in_place, result in on_each(3, gather, comms=KeepsTarget):
        assert in_place
        assert torch.equal(result, torch.stack([torch.arange(6.0).view(2, 3).T + 10 * rank for rank in range(3)]))
