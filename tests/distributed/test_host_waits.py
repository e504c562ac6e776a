"""Tests that training runs ahead of its device: between two log lines, nothing reads a number from the device, because the host
would wait for it.

The tests need no GPU. torch's profiler counts the operations whose result is a number or has a size that depends on values, and
calls that copy to the CPU are counted with them. The inner optimizer is SGD, because the fused AdamW reads its own step counts on
a CPU, which it does not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from llmtrain.sync.methods import METHODS
from tests.distributed.fake_engine import choices
from tests.distributed.real_engine import GPT_NEO, LLAMA, Case, build_case, mesh_of, micro_batches

READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "copy to the CPU"}
COPYING = ("cpu", "numpy", "tolist")
SGD = {"kind": "sgd", "lr": 1e-2, "clip_norm": 1.0}
OVERLAPPED = {"kind": "overlapped", "steps": 2, "fragments": 2, "alpha": 0.5}


@contextmanager
def copies_counted() -> Iterator[None]:
    def counted(copy: Callable[..., Any]) -> Callable[..., Any]:
        def copying(*args: Any, **kwargs: Any) -> Any:
            with record_function("copy to the CPU"):
                return copy(*args, **kwargs)

        return copying

    with ExitStack() as patches:
        for name in COPYING:
            patches.enter_context(mock.patch.object(torch.Tensor, name, counted(getattr(torch.Tensor, name))))
        yield


def reads_by_step(case: Case, steps: int) -> list[int]:
    """Return how often each of the first steps reads a value."""
    engine, method = build_case(case, mesh_of(case.replicas, case.shard), clock=lambda: step)
    batches_of = [micro_batches(case, engine.mesh, step) for step in range(1, steps + 1)]
    # One profiler for all steps, because a message that outlives the profiler crashes it.
    with copies_counted(), profile(use_kineto=False) as seen:
        for step, batches in enumerate(batches_of, start=1):
            with record_function(f"step {step}"):
                plan = method.begin_step(step, case.optim["lr"])
                if plan.computes_gradient:
                    engine.forward_backward(batches)
                    engine.step(plan.lr)
                method.end_step(step)
        method.finish()
    reads = [event.time_range.start for event in seen.function_events if event.name in READING]
    took = {event.name: event.time_range for event in seen.function_events if event.name.startswith("step ")}
    spans = [took[f"step {step}"] for step in range(1, steps + 1)]
    return [sum(span.start <= at <= span.end for at in reads) for span in spans]


@pytest.mark.parametrize(
    "read",
    [
        lambda values: bool((values > 0).all()),
        lambda values: values.sum().item(),
        lambda values: values[values > 0],
        lambda values: values.unique(),
        lambda values: values.cpu(),
        lambda values: values.tolist(),
        lambda values: values.numpy(),
    ],
    ids=["bool", "item", "mask", "unique", "cpu", "tolist", "numpy"],
)
def test_reading_is_noticed(read) -> None:
    with copies_counted(), profile(use_kineto=False) as seen:
        read(torch.ones(3))
    assert sum(event.name in READING for event in seen.function_events) >= 1


LOCAL = [name for name in METHODS if name not in ("wagma", "a_edit", "synchronous")]
FAST = [("local_sgd", LLAMA), ("palsgd", LLAMA), ("edit", GPT_NEO)]
"""Cases with a plain mean, a pull, and a layer-wise synchronization. Messages hidden behind training have a test of their own."""
DEEP = [pytest.param(name, LLAMA, marks=pytest.mark.deep) for name in LOCAL if (name, LLAMA) not in FAST]


@pytest.mark.parametrize(("method", "model"), [*FAST, *DEEP])
def test_local_steps_read_nothing(ranks, method, model):
    """The first local step, which follows a synchronous one, compares the anchors of methods that have them. WAGMA and A-EDiT are left
    out: WAGMA's messages are on the CPU in every step, and A-EDiT asks the replica's ranks for the time."""
    period = {"period": {"kind": "qsr", "base": 5, "alpha": 1e-9}} if method == "qsr" else {"every": 5}
    case = Case(choices(method, warmup_steps=1, **period), 2, 1, model, steps=20, optim=SGD, micro_batch=4)
    for reads in ranks.run(reads_by_step, case, 5, world_size=2):
        assert reads[1] == case.sync.needs_anchor and reads[2:] == [0, 0, 0]


@pytest.mark.parametrize("shard", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_synchronous_steps_read_nothing(ranks, shard):
    for reads in ranks.run(reads_by_step, Case(replicas=2, shard=shard, optim=SGD), 3, world_size=2 * shard):
        assert reads[1:] == [0, 0]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param("streaming_diloco", {"schedule": OVERLAPPED}, id="streaming_diloco"),
        pytest.param("co2", {}, id="co2", marks=pytest.mark.deep),
    ],
)
def test_what_is_hidden_behind_training_is_not_waited_for_on_the_device(ranks, method, changes):
    """This includes sending and using means."""
    case = Case(choices(method, every=3, warmup_steps=1, **changes), 2, 1, steps=20, optim=SGD, micro_batch=4)
    for reads in ranks.run(reads_by_step, case, 10, world_size=2):
        assert reads[1:] == [1] + [0] * 8
