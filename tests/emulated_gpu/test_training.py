"""Tests of training on GPUs: runs have the bits of a CPU, no stream overtakes another, and the host seldom waits."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.config import CheckpointSection, ParallelSection, SyncSection
from llmtrain.parallel.comms import ALL_GATHER, Comms
from llmtrain.parallel.ranks import replica_backend
from llmtrain.train.checkpoint import Checkpointer
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pool import RankFailure, RankPool
from tests.distributed.real_engine import Case, Outcome, build_case, mesh_of, micro_batches, train
from tests.distributed.test_in_process import assert_same, process_of, train_in_process
from tests.emulated_gpu import as_cuda, streams
from tests.emulated_gpu.races import looked_for
from tests.gpu.on_gpu import CHANGES, PENALTY

pytestmark = pytest.mark.deep
OVERLAPPED = {"kind": "overlapped", "steps": 2, "fragments": 2, "alpha": 0.5}
WAIT_AVOIDING = {"kind": "wait_avoiding", "group_size": 2}
SPARSE = {"kind": "topk", "keep": 1024, "error_feedback": True}
ZERO_3 = {"precision": "fp32", "engine": "zero", "zero_stage": 3}


def gpu(sync: SyncSection, replicas: int = 2, shard: int = 2, **changes: Any) -> Case:
    case = Case(sync, replicas, shard, device="cuda", steps=9, **changes)
    return replace(case, network=replica_backend(ParallelSection(**case.parallel)))


CASES = {
    "edit, offloaded": gpu(edit(every=2, warmup_steps=2, penalty=PENALTY, offload=True)),
    "edit, rounded": gpu(edit(every=2, penalty=PENALTY, wire={"kind": "int8", "error_feedback": True})),
    "diloco, offloaded": gpu(choices("diloco", 3, offload=True)),
    "streaming, offloaded": gpu(
        choices("streaming_diloco", 4, warmup_steps=1, schedule=OVERLAPPED, offload=True, wire={"kind": "int4"}),
    ),
    "co2, offloaded": gpu(choices("co2", 2, warmup_steps=1, offload=True)),
    "palsgd": gpu(choices("palsgd", 3, warmup_steps=1)),
    "a_edit": gpu(edit(every=2, period={"kind": "seconds", "every": 2.0})),
    "synchronous, recomputed": gpu(
        choices("synchronous"), parallel={"precision": "fp32", "activation_checkpointing": "selective"}
    ),
    "synchronous, rounded": gpu(choices("synchronous", wire={"kind": "int8", "gradients": True})),
    "edit, bf16": gpu(edit(every=2, penalty=PENALTY), 2, 1, parallel={"precision": "bf16"}),
    "edit, ZeRO-3": gpu(edit(every=2, warmup_steps=2, penalty=PENALTY, offload=True), parallel=ZERO_3),
    "diloco, Muon": gpu(choices("diloco", 3), optim={"kind": "muon", "lr": 1e-2, "muon": {"precision": "bf16"}}),
    "sparse, offloaded": gpu(choices("sparseloco", 3, offload=True, wire={**SPARSE, "values": "fp32"})),
    "sparse, delayed": gpu(choices("co2", 2, warmup_steps=1, wire=SPARSE)),
    "edit, ZeRO-1, all offloaded": gpu(
        edit(every=2, warmup_steps=1, penalty=PENALTY, offload=True),
        parallel=ZERO_3 | {"zero_stage": 1, "zero_offload": True},
    ),
    "tokens, ZeRO-1, offloaded": gpu(
        choices("diloco", 2, warmup_steps=1, reduction="token_weighted"),
        parallel=ZERO_3 | {"zero_stage": 1, "zero_offload": True},
    ),
    "radial": gpu(choices("streaming_diloco", 4, warmup_steps=1, schedule=OVERLAPPED, reduction="radial")),
    "gpa, offloaded": gpu(choices("gpa", 2, outer={"kind": "gpa", "decay": 0.7}, offload=True)),
    "moments": gpu(choices("des_loc", 2, moments={"first": 1, "second": 2})),
    "moments, ZeRO-1, offloaded": gpu(
        choices("des_loc", 2, moments={"first": 1, "second": 2}),
        parallel=ZERO_3 | {"zero_stage": 1, "zero_offload": True},
    ),
}


def train_unfused(cases: list[Case]) -> list[Outcome]:
    """Train with the attention kernel that both devices have."""
    with sdpa_kernel(SDPBackend.MATH):
        return train(cases)


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_gpus_is_the_run_on_a_cpu(gpu_ranks: RankPool, cpu_ranks: RankPool, name: str) -> None:
    case = CASES[name]
    size = case.replicas * case.shard
    [on_gpus, on_cpus] = (
        pool.run(train_unfused, [replace(case, device=device)], world_size=size)
        for pool, device in ((gpu_ranks, "cuda"), (cpu_ranks, "cpu"))
    )
    for [on_gpu], [on_cpu] in zip(on_gpus, on_cpus, strict=True):
        assert on_gpu.losses == on_cpu.losses and on_gpu.norms == on_cpu.norms
        assert on_gpu.rounds == on_cpu.rounds
        for parameter, values in on_cpu.weights.items():
            assert values.equal(on_gpu.weights[parameter]), parameter


IN_PROCESS = ("edit, offloaded", "streaming, offloaded", "synchronous, rounded", "sparse, delayed")


def train_in_turns(case: Case) -> list[Outcome]:
    assert process_of(1).device.type == case.device
    with sdpa_kernel(SDPBackend.MATH):
        return train_in_process(case)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_replicas_that_take_turns_on_a_gpu_train_as_on_a_cpu(
    gpu_ranks: RankPool, cpu_ranks: RankPool, name: str
) -> None:
    case = replace(CASES[name], shard=1)
    [on_gpu], [on_cpu] = (
        pool.run(train_in_turns, replace(case, device=device), world_size=1)
        for pool, device in ((gpu_ranks, "cuda"), (cpu_ranks, "cpu"))
    )
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert_same(ours, theirs)


# ---- streams

OFFLOADED = replace(CASES["edit, offloaded"], steps=6)


def train_and_look(cases: list[Case]) -> None:
    with looked_for():
        train(cases)


def train_carelessly(cases: list[Case], careless: str) -> None:
    with CHANGES[careless]():
        train_and_look(cases)


def test_no_stream_overtakes_another(gpu_ranks: RankPool) -> None:
    gpu_ranks.run(train_and_look, [OFFLOADED])


@pytest.mark.parametrize("careless", [name for name in CHANGES if name.startswith("without")])
def test_a_wait_left_out_is_seen(gpu_ranks: RankPool, careless: str) -> None:
    with pytest.raises(RankFailure, match="CUDASanitizerErrors"):
        gpu_ranks.run(train_carelessly, [OFFLOADED], careless)


# ---- NCCL


def collectives_of_a_mesh() -> tuple[list[tuple[str, str]], float]:
    """Return axis and name of each collective that begins while a mesh is built, and the bytes counted for them."""
    begun, begin = [], Comms.start_work

    def noted(self: Comms, what: str, sent: float, collective: Any, *tensors: Any) -> Any:
        begun.append((self.axis, collective.__name__))
        return begin(self, what, sent, collective, *tensors)

    with mock.patch.object(Comms, "start_work", noted):
        mesh = mesh_of(2, 2, "cuda", "nccl")
    return begun, sum(comms.traffic.bytes for comms in (mesh.shard_comms, mesh.replica_comms, mesh.all_ranks))


def test_nccl_connects_before_training_and_counts_nothing(gpu_ranks: RankPool) -> None:
    kinds = ("all_reduce", ALL_GATHER.__name__, "all_to_all_single")
    for begun, counted in gpu_ranks.run(collectives_of_a_mesh):
        assert begun == [(axis, kind) for axis in ("shard", "replica") for kind in kinds] and counted == 0


# ---- the host


def reads_by_step(case: Case) -> list[int]:
    """Return how often the host waits for the GPU in each step."""
    emulated, waits = as_cuda.loaded(), []
    engine, method = build_case(case, mesh_of(case.replicas, case.shard, case.device, case.network), clock=lambda: step)
    reads = []
    streams.listeners.append(lambda what, *ids: waits.append(ids) if what == "host waits" else None)
    for step in range(1, case.steps + 1):
        before = emulated.host_reads() + len(waits)
        plan = method.begin_step(step, case.optim["lr"])
        engine.forward_backward(micro_batches(case, engine.mesh, step))
        engine.step(plan.lr)
        method.end_step(step)
        reads.append(emulated.host_reads() + len(waits) - before)
    method.finish()
    streams.listeners.clear()
    return reads


@pytest.mark.parametrize(
    ("sync", "reading"),
    [
        (choices("synchronous"), set()),
        (choices("diloco", 4, warmup_steps=1, offload=True), {5, 9}),
        (edit(every=4, warmup_steps=1, penalty=PENALTY, offload=True), {6}),
        (choices("streaming_diloco", 4, warmup_steps=1, schedule=OVERLAPPED, offload=True), set()),
        (choices("co2", 2, warmup_steps=1, offload=True), set()),
        (choices("gpa", outer={"kind": "gpa", "decay": 0.7}), set()),
    ],
    ids=lambda given: getattr(given, "method", ""),
)
def test_the_host_waits_for_the_gpu_only_where_replicas_wait_for_each_other(
    gpu_ranks: RankPool, sync: SyncSection, reading: set[int]
) -> None:
    """The host also waits when the first anchor is taken, in step 2. GPA has one replica, which waits for no other."""
    replicas = 1 if sync.method == "gpa" else 2
    for reads in gpu_ranks.run(reads_by_step, gpu(sync, replicas), world_size=2 * replicas):
        assert {step for step, count in enumerate(reads, start=1) if count and step != 2} == reading


def test_the_host_waits_once_for_a_message_of_wagma(gpu_ranks: RankPool) -> None:
    """The host waits once for all blocks in a group average. Step 4 ends a round, and step 1 takes the anchor."""
    for reads in gpu_ranks.run(reads_by_step, gpu(choices("wagma", 4, schedule=WAIT_AVOIDING), 2, 1), world_size=2):
        assert [reads[step - 1] for step in (2, 3, 5, 6, 7)] == [1] * 5


def host_reads_of(kinds: dict[str, bool]) -> dict[str, int]:
    """Count the host's waits while a tensor is copied to the GPU, by kind. `kinds` says which are non-blocking."""
    emulated, reads = as_cuda.loaded(), {}
    for kind, non_blocking in kinds.items():
        before = emulated.host_reads()
        torch.ones(3).to("cuda", non_blocking=non_blocking)
        reads[kind] = emulated.host_reads() - before
    return reads


def test_the_host_waits_for_a_blocking_copy_to_a_gpu(gpu_ranks: RankPool) -> None:
    [reads] = gpu_ranks.run(host_reads_of, {"blocking": False, "non-blocking": True}, world_size=1)
    assert reads == {"blocking": 1, "non-blocking": 0}


# ---- times


def timed(case: Case) -> tuple[int, float, float]:
    """Return how often the host's clock timed the GPU, and the exposed seconds of synchronizations and gradients."""
    calls = mock.Mock(side_effect=time.monotonic)
    with mock.patch("llmtrain.parallel.device_time.time", SimpleNamespace(monotonic=calls)):
        engine, method = build_case(
            case, mesh_of(case.replicas, case.shard, case.device, case.network), clock=lambda: step
        )
        for step in range(1, case.steps + 1):
            plan = method.begin_step(step, case.optim["lr"])
            engine.forward_backward(micro_batches(case, engine.mesh, step))
            engine.step(plan.lr)
            method.end_step(step)
        method.finish()
    return calls.call_count, method.stats.exposed_seconds, engine.gradient_wait.seconds


@pytest.mark.parametrize("name", ["edit, offloaded", "streaming, offloaded", "edit, ZeRO-3"])
def test_the_gpu_is_timed_and_not_the_host(gpu_ranks: RankPool, name: str) -> None:
    """All three begin with synchronous steps."""
    for by_host, exposed, averaging in gpu_ranks.run(timed, CASES[name]):
        assert by_host == 0
        assert exposed > 0 and averaging > 0


# ---- checkpoints


def checkpointed(case: Case, folder: Path, background: bool) -> tuple[int, int, int]:
    """Return (bytes that a checkpoint needs on the GPU, bytes of the offloaded tensors, number of times that the host
    waits for the GPU before training continues)."""
    emulated = as_cuda.loaded()
    device = f"cuda:{torch.cuda.current_device()}"
    engine, method = build_case(case, mesh_of(case.replicas, case.shard, device, case.network), clock=lambda: 0.0)
    for step in (1, 2, 3):
        method.begin_step(step, case.optim["lr"])
        engine.forward_backward(micro_batches(case, engine.mesh, step))
        engine.step(case.optim["lr"])
        method.end_step(step)
    resting = [flat for flats in method.shared_state().values() for flat in flats if flat is not None]
    checkpoints = Checkpointer(folder, engine.mesh, engine, method, CheckpointSection(background=background), 60.0)
    emulated.forget_peak()
    before, reads = emulated.allocated(), emulated.host_reads()
    waits: list[str] = []
    streams.listeners.append(lambda what, *ids: waits.append(what) if what == "host waits" else None)
    checkpoints.save(3, dict)
    waited = len(waits) + emulated.host_reads() - reads
    streams.listeners.pop()
    needed = emulated.peak() - before
    checkpoints.wait()
    method.finish()
    return needed, sum(flat.numel() * flat.element_size() for flat in resting), waited


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_does_not_bring_all_that_is_offloaded_to_the_gpu(
    gpu_ranks: RankPool, tmp_path: Path, background: bool
) -> None:
    case = gpu(choices("diloco", 4, warmup_steps=1, offload=True))
    for needed, resting, _ in gpu_ranks.run(checkpointed, case, tmp_path, background):
        assert needed < resting / 2


def test_the_host_waits_once_for_a_checkpoint(gpu_ranks: RankPool, tmp_path: Path) -> None:
    for _, _, waited in gpu_ranks.run(checkpointed, gpu(choices("diloco", 4, warmup_steps=1)), tmp_path, True):
        assert waited == 1
