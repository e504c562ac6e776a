"""Mistakes in inner optimizers and in what is planned for them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUON = ("tests/distributed/test_muon.py",)

MUTANTS = [
    Mutant(
        "muon: the plain momentum is orthogonalized",
        "llmtrain/parallel/muon.py",
        "direction = gradient.lerp(momentum, self._section.momentum)",
        "direction = momentum.clone()",
        MUON,
    ),
    Mutant(
        "muon: wide matrices take larger steps, not tall ones",
        "llmtrain/parallel/muon.py",
        "math.sqrt(max(1.0, rows / columns))",
        "math.sqrt(max(1.0, columns / rows))",
        MUON,
    ),
    Mutant(
        "muon: weight decay does not follow the learning rate",
        "llmtrain/parallel/muon.py",
        'matrix.rows.mul_(1 - lr * group["weight_decay"])',
        'matrix.rows.mul_(1 - LEAST_NORM * group["weight_decay"])',
        MUON,
    ),
    Mutant(
        "muon: the head and the embedding are orthogonalized, too",
        "llmtrain/parallel/optimizers.py",
        "return self.in_layer and len(self.shape) == 2",
        "return len(self.shape) == 2",
        MUON,
    ),
    Mutant(
        "muon: AdamW's parameters have Muon's learning rate",
        "llmtrain/parallel/optimizers.py",
        'lr * group.get("lr_ratio", 1.0)',
        "lr",
        MUON,
    ),
    Mutant(
        "muon: the last ranks have no rows",
        "llmtrain/parallel/muon.py",
        "each = -(-rows // size)",
        "each = max(1, rows // size)",
        MUON,
    ),
    Mutant(
        "muon: a matrix of zeros becomes NaN",
        "llmtrain/parallel/muon.py",
        "matrix.div_(torch.linalg.vector_norm(matrix).clamp(min=LEAST_NORM))",
        "matrix.div_(torch.linalg.vector_norm(matrix))",
        MUON,
    ),
    Mutant(
        "muon: iterations are in the parameters' precision",
        "llmtrain/parallel/muon.py",
        'return direction.to(PRECISION[("bf16" if direction.is_cuda else "fp32") if chosen == "auto" else chosen])',
        "return direction",
        MUON,
    ),
    Mutant(
        "memory: Muon keeps as much as AdamW",
        "llmtrain/plan/engine_memory.py",
        '"muon": 2 * part - of_muon // shards',
        '"muon": 2 * part',
        ("tests/unit/test_plan_memory.py",),
    ),
    Mutant(
        "time: Muon's products take none",
        "llmtrain/plan/time_estimate.py",
        "step += in_turns * _muon_flops(recipe, size) / (shards * rates.flops)",
        "step += 0 * _muon_flops(recipe, size)",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "engine: the learning rate never changes",
        "llmtrain/parallel/optimizers.py",
        '        group["lr"] = lr * group',
        '        group["lr"] = group["lr"] * group',
        ("tests/distributed/test_plain_loop.py",),
    ),
]
