"""Mistakes in communication and in the engines."""

from __future__ import annotations

from tests.mutants.mutant import SCENARIOS, WIRE, Mutant

MUTANTS = [
    Mutant(
        "comms: sign of the rounding error",
        "llmtrain/parallel/comms.py",
        "lost = self._message - self._decoded(self._sent)",
        "lost = self._decoded(self._sent) - self._message",
        WIRE,
    ),
    Mutant(
        "comms: the second rounding is not in the error",
        "llmtrain/parallel/comms.py",
        "lost[self._comms.rank] += (self._total - self._decoded(self._mine)).view(-1)",
        "lost[self._comms.rank] += 0.0",
        WIRE,
    ),
    Mutant(
        "comms: bytes of the first exchange count the own part",
        "llmtrain/parallel/comms.py",
        "sent = (comms.size - 1) * self._sent.shape[1]",
        "sent = comms.size * self._sent.shape[1]",
        WIRE,
    ),
    Mutant(
        "comms: bytes of an all-reduce without (N-1)/N",
        "llmtrain/parallel/comms.py",
        "sent = 2 * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()",
        "sent = 2 * tensor.numel() * tensor.element_size()",
        SCENARIOS,
    ),
    Mutant(
        "comms: a lost gloo peer is taken for a defect",
        "llmtrain/parallel/comms.py",
        'isinstance(error, dist.DistError) or "gloo" in str(error)',
        "isinstance(error, dist.DistError)",
        ("tests/distributed/test_threads.py",),
    ),
    Mutant(
        "wire: truncates instead of rounding",
        "llmtrain/parallel/wire_format.py",
        "codes = quotients.round_()",
        "codes = quotients.trunc_()",
        WIRE,
    ),
    Mutant(
        "wire: rounds halves up, not to even",
        "llmtrain/parallel/wire_format.py",
        "codes = quotients.round_()",
        "codes = quotients.add_(0.5).floor_()",
        WIRE,
    ),
    Mutant(
        "wire: a block of zeros divides by zero",
        "llmtrain/parallel/wire_format.py",
        "torch.where(scales > 0, scales, 1.0)",
        "scales",
        WIRE,
        equivalent="0 / 0 is NaN, which becomes code 0 on CPUs and on CUDA devices, and means 0 times a scale of 0",
    ),
    Mutant("wire: int8 has 128 levels", "llmtrain/parallel/wire_format.py", '"int8": 127', '"int8": 128', WIRE),
    Mutant(
        "fsdp: gradients summed over replicas, not averaged",
        "llmtrain/parallel/fsdp.py",
        "pending.wait().div_(self.mesh.replica.size)",
        "pending.wait()",
        (
            "tests/distributed/test_engine.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "fsdp: loss divided by the tokens of one shard",
        "llmtrain/parallel/fsdp.py",
        "for batch in micro_batches) * self.mesh.shard.size",
        "for batch in micro_batches)",
        (
            "tests/distributed/test_engine.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "fsdp: the learning rate never changes",
        "llmtrain/parallel/fsdp.py",
        '            group["lr"] = lr',
        "            pass",
        ("tests/distributed/test_plain_loop.py",),
    ),
    Mutant(
        "fsdp: no gradient clipping",
        "llmtrain/parallel/fsdp.py",
        "torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)",
        "pass",
        ("tests/distributed/test_plain_loop.py",),
    ),
    Mutant(
        "engine: gradient norm of the local shard",
        "llmtrain/parallel/engine.py",
        "return squares.wait().sqrt().to(gradients[0].dtype)",
        "return torch.stack(norms).norm().to(gradients[0].dtype)",
        (
            "tests/distributed/test_plain_loop.py",
            "tests/distributed/test_engine.py",
        ),
    ),
    Mutant(
        "fsdp: gathered parameters stay after a change",
        "llmtrain/parallel/fsdp.py",
        "unit.reshard()  # whatever was gathered before the change is stale",
        "pass",
        (
            "tests/distributed/test_engine.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "fsdp: forward hooks also run in validation and recomputation",
        "llmtrain/parallel/fsdp.py",
        "            if self._in_forward:\n                for hook",
        "            if True:\n                for hook",
        (
            "tests/distributed/test_engine.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "fsdp: optimizer moments not restored",
        "llmtrain/parallel/fsdp.py",
        'name: {key: state[f"optimizer.{name}.{key}"] for key in slot}',
        "name: {key: slot[key] for key in slot}",
        ("tests/distributed/test_zero.py",),
    ),
    Mutant(
        "zero: clips to ten times the norm",
        "llmtrain/parallel/zero.py",
        "factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)",
        "factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=10.0)",
        (
            "tests/distributed/test_zero.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "zero: gradients summed over replicas",
        "llmtrain/parallel/zero.py",
        "flat.div_(self.mesh.replica.size).split",
        "flat.split",
        (
            "tests/distributed/test_zero.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "zero: weights do not follow their master copies",
        "llmtrain/parallel/zero.py",
        ("        self._masters_changed = True\n"),
        ("        self._masters_changed = False\n"),
        (
            "tests/distributed/test_zero.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "zero: padding is part of the norm",
        "llmtrain/parallel/zero.py",
        "                    master[padding] = 0",
        "                    pass",
        (
            "tests/distributed/test_zero.py",
            "tests/distributed/test_pairs.py",
        ),
    ),
    Mutant(
        "flat: the first rank's padding for all ranks",
        "llmtrain/parallel/zero_layout.py",
        "used = min(max(numel - rank * width, 0), width)",
        "used = min(numel, width)",
        ("tests/unit/test_flat.py",),
    ),
    Mutant(
        "mesh: only the main rank raises a UserError",
        "llmtrain/parallel/mesh.py",
        "if isinstance(answer, UserError):",
        "if self.is_main and isinstance(answer, UserError):",
        (
            "tests/unit/test_mirror.py",
            "tests/distributed/test_mirror.py",
        ),
    ),
    Mutant(
        "network: the environment's card is not put back",
        "llmtrain/parallel/network.py",
        "        if before is not None:\n            os.environ[GLOO] = before\n",
        "",
        ("tests/unit/test_network.py",),
    ),
    Mutant(
        "meeting: only the rank that refuses hears why",
        "llmtrain/parallel/rendezvous.py",
        "        if rank_info.refusal:",
        "        if rank_info.refusal and rank == world.rank:",
        ("tests/unit/test_gaps_launch.py",),
    ),
    Mutant(
        "reach: rows and columns of the mesh swapped",
        "llmtrain/parallel/connectivity.py",
        "divmod(world.rank, shard)",
        "divmod(world.rank, replicas)",
        ("tests/unit/test_gaps_launch.py",),
    ),
    Mutant(
        "world: two launchers on one host are one node",
        "llmtrain/parallel/world.py",
        'return f"{socket.gethostname()}:{number}"',
        "return socket.gethostname()",
        ("tests/unit/test_world.py",),
    ),
]
