"""Mistakes in the engine for replicas of one device."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ONE_DEVICE = ("tests/distributed/test_single_device.py",)

MUTANTS = [
    Mutant(
        "single device: the rounded weights are those of the last step",
        "llmtrain/parallel/single_device.py",
        "        self._refresh_all()\n        return norm",
        "        return norm",
        ONE_DEVICE,
    ),
    Mutant(
        "single device: a synchronization does not reach the rounded weights",
        "llmtrain/parallel/single_device.py",
        "        if rounded is not None:\n            rounded.copy_(block.flat)",
        "        if rounded is not None and not self._in_forward:\n            rounded.copy_(block.flat)",
        ONE_DEVICE,
    ),
    Mutant(
        "single device: a micro-batch's gradient replaces the earlier ones",
        "llmtrain/parallel/single_device.py",
        "master.grad += gradient",
        "master.grad.copy_(gradient)",
        ONE_DEVICE,
    ),
    Mutant(
        "engine: averages go to the blocks in forward order",
        "llmtrain/parallel/torch_engine.py",
        "zip(reversed(self.masters), self._averaging, strict=True)",
        "zip(self.masters, self._averaging, strict=True)",
        ONE_DEVICE,
    ),
    Mutant(
        "engine: gradients are averaged in every micro-batch",
        "llmtrain/parallel/torch_engine.py",
        "if not (self._is_last and self.average_gradients",
        "if not (self.average_gradients",
        ("tests/distributed/test_pairs.py",),
    ),
    Mutant(
        "single device: optimizer moments not restored",
        "llmtrain/parallel/single_device.py",
        'value.copy_(local(state[f"optimizer.{name}.{key}"]))',
        "pass",
        ONE_DEVICE,
    ),
    Mutant(
        "single device: loaded masters do not reach the rounded weights",
        "llmtrain/parallel/single_device.py",
        "        self._refresh_all()\n\n    def to_dtensors",
        "\n    def to_dtensors",
        ONE_DEVICE,
    ),
    Mutant(
        "checkpointing: attention with dropout is kept",
        "llmtrain/parallel/wrapping.py",
        "name.startswith(ATTENTION) and not _has_dropout(args, kwargs)",
        "name.startswith(ATTENTION)",
        ("tests/unit/test_model.py",),
    ),
    Mutant(
        "engine: bf16 gradients have a norm in bf16",
        "llmtrain/parallel/engine.py",
        "elif gradients[0].dtype == wide:",
        "elif True:",
        ("tests/distributed/test_engine.py",),
    ),
    Mutant(
        "zero: a validation leaves gathered weights behind",
        "llmtrain/parallel/zero.py",
        "self._engine.optimizer.parameter_offload.partition_all_parameters()",
        "pass",
        ("tests/distributed/test_zero.py",),
    ),
    Mutant(
        "library: synchronous steps may become fewer than were made",
        "llmtrain/sync/local_updates.py",
        "        self._method.keep_warmup(self.step)\n",
        "",
        ("tests/distributed/test_local_updates_state.py",),
    ),
    Mutant(
        "plan: validation copies nothing to CPU memory",
        "llmtrain/plan/memory.py",
        "in_turns * shard_of_all if validates_others else 0",
        "0",
        ("tests/unit/test_plan_memory.py",),
    ),
]
