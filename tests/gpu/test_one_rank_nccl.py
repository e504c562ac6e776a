"""Tests of NCCL with one rank, the most that one GPU allows: a result is right on the stream that waits, and the host
does not wait."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.device_time import clock_of
from llmtrain.parallel.mesh import open_process_mesh
from llmtrain.parallel.world import World
from llmtrain.trace import open_trace, step_span
from tests.distributed.fake_engine import choices
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import build_case, micro_batches
from tests.gpu.on_gpu import CYCLES, IS_EMULATED, case_of
from tests.inside_torch import occupy_stream


def reduce_after_a_delay() -> tuple[float, float, float, float, float]:
    """Start an all-reduce on a busy GPU. Return the smallest and the largest value, and the seconds until `wait`
    returned, until the future's callback ran, and until the GPU was done."""
    group = dist.new_group([0], backend="nccl", timeout=timedelta(seconds=60))
    comms, device = Comms(group, torch.device("cuda")), torch.device("cuda")
    comms.start_work("warming up", 0, dist.all_reduce, torch.zeros(1, device=device)).wait()
    tensor = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    called: list[float] = []
    began = time.perf_counter()
    occupy_stream(10 * CYCLES)
    tensor += 3
    work = comms.start_work("reducing", 0, dist.all_reduce, tensor)
    work.get_future().add_done_callback(lambda future: called.append(time.perf_counter() - began))
    result = PendingCollective(comms, "reducing", work, tensor).wait()
    waited = time.perf_counter() - began
    doubled = 2 * result
    torch.cuda.synchronize()
    done = time.perf_counter() - began
    return float(doubled.min()), float(doubled.max()), waited, called[0] if called else -1.0, done


def test_a_result_is_right_on_the_waiting_stream(ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    [(least, most, waited, called, done)] = ranks.run(reduce_after_a_delay, world_size=1)
    assert (least, most) == (6.0, 6.0)
    with capsys.disabled():
        print(f"\nseconds until wait returned {waited:.4f}, the callback ran {called:.4f}, the GPU was done {done:.4f}")
    if not IS_EMULATED:
        assert waited < done / 2, "the host has waited for the GPU"


@dataclass(frozen=True)
class LateMessage:
    """Times, in seconds, of a message that starts late while the GPU has nothing else to do."""

    late: float
    """Delay of the message, as the GPU measured it."""
    host: float
    """Time that the host spent in `wait`."""
    counted: float
    """Counted time that the GPU waited for the message, read at the end."""
    counted_at_once: float
    """The same counter, read as soon as `wait` returned."""
    span: float
    """Time from the message's start to its end in the timeline."""


def wait_for_a_late_message(folder: Path) -> LateMessage:
    """Send a message from a stream that is busy, and wait for it in the main stream."""
    device = torch.device("cuda")
    comms, side = Comms(dist.new_group([0], backend="nccl", timeout=timedelta(seconds=60)), device), torch.cuda.Stream()
    tensor, path = torch.ones(1 << 20, device=device), folder / "rank.jsonl"
    comms.start_work("warming up", 0, dist.all_reduce, tensor).wait()
    began, sent = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with open_trace(path, first=1, last=1, clock=clock_of(device)), step_span(1):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            began.record()
            work = comms.start_work("busy", 0, busy_all_reduce, tensor)
            sent.record()
        started = time.perf_counter()
        PendingCollective(comms, "reducing", work, tensor).wait()
        host, counted_at_once = time.perf_counter() - started, comms.traffic.waiting.seconds
        torch.cuda.synchronize()
    [line] = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "message"]
    counted, late = comms.traffic.waiting.seconds, began.elapsed_time(sent) / 1e3
    return LateMessage(late, host, counted, counted_at_once, line["end"] - line["start"])


def busy_all_reduce(tensor: torch.Tensor, **options: Any) -> dist.Work:
    """Delay the current stream, then start an all-reduce in it."""
    occupy_stream(10 * CYCLES)
    return dist.all_reduce(tensor, **options)


def test_waiting_is_timed_on_the_gpu(ranks: RankPool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The host does not wait, so its clock can't show the wait. The emulation's NCCL does not wait for streams."""
    [found] = ranks.run(wait_for_a_late_message, tmp_path, world_size=1)
    with capsys.disabled():
        print(f"\n{found}")
    assert found.counted >= found.counted_at_once and found.span >= 0
    if not IS_EMULATED:
        assert found.counted_at_once == 0.0, "the wait was counted before the GPU was done"
        assert found.host < found.late / 2, "the host has waited for the GPU"
        assert found.counted > found.late / 2 and found.span > found.late / 2


def train_in_a_mesh_of_its_own() -> list[float]:
    """Leave the pool's group, and train as a run of one process does, with its own store and NCCL."""
    dist.destroy_process_group()
    case = case_of(choices("synchronous"), parallel={"precision": "bf16"})
    with open_process_mesh(
        World(0, 1, 0, 1), replicas=1, shards=1, replica_backend="auto", timeout_seconds=60.0
    ) as mesh:
        engine, method = build_case(case, mesh, clock=lambda: 0.0)
        losses = []
        for step in (1, 2, 3):
            method.begin_step(step, 1e-2)
            losses.append(float(engine.forward_backward(micro_batches(case, mesh, step))))
            engine.step(1e-2)
            method.end_step(step)
        return losses


def test_a_run_of_one_process(ranks: RankPool) -> None:
    [losses] = ranks.run(train_in_a_mesh_of_its_own, world_size=1)
    assert losses[-1] < losses[0]


def sum_over_gloo() -> float:
    """Return the mean of a GPU tensor that gloo has summed over the ranks."""
    tensor = torch.full((1000,), float(dist.get_rank() + 1), device="cuda")
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    dist.all_reduce(tensor, group=group)
    return float(tensor.mean())


def test_gloo_sums_what_is_on_a_gpu(ranks: RankPool) -> None:
    assert ranks.run(sum_over_gloo, world_size=2) == [3.0, 3.0]
