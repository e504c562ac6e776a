"""Mistakes in the wire of the largest values, and in those whose levels come from a table."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SPARSE = ("tests/distributed/test_sparse_wire.py",)
FORMAT = "llmtrain/parallel/sparse_format.py"
TABLES = ("tests/unit/test_wire.py", "tests/unit/test_table_wires.py")
WIRE_FORMAT = "llmtrain/parallel/wire_format.py"

MUTANTS = [
    Mutant(
        "sparse: what is largest has a sign",
        FORMAT,
        "magnitudes, order = chunks.abs().topk(kept, dim=1)",
        "magnitudes, order = chunks.topk(kept, dim=1)",
        SPARSE,
    ),
    Mutant(
        "sparse: a shorter last chunk sends as much as a whole one",
        FORMAT,
        "(1, rest, -(-self.keep * rest // CHUNK))",
        "(1, rest, min(rest, self.keep))",
        SPARSE,
    ),
    Mutant(
        "sparse: both magnitudes are the mean of all",
        FORMAT,
        "larger = (kept + 1) // 2",
        "larger = kept",
        SPARSE,
    ),
    Mutant(
        "sparse: indices from 2048 on lose their highest bit",
        FORMAT,
        "low | (middle & 0xF) << 8",
        "low | (middle & 0x7) << 8",
        SPARSE,
    ),
    Mutant(
        "sparse: magnitudes belong to the values' order of size",
        FORMAT,
        "2 * (rank < larger).to(torch.uint8)",
        "2 * (torch.arange(kept) < larger).to(torch.uint8)",
        SPARSE,
    ),
    Mutant(
        "sparse: a decoded message replaces what was there",
        FORMAT,
        ".scatter_add_(1, indices, values)",
        ".scatter_(1, indices, values)",
        SPARSE,
    ),
    Mutant(
        "sparse: nothing is left out",
        "llmtrain/parallel/collectives.py",
        "None if error is None else error.view(-1)\n",
        "None if error is None else torch.zeros_like(error).view(-1)\n",
        SPARSE,
    ),
    Mutant(
        "sparse: what was left out does not decay",
        "llmtrain/sync/block_sync.py",
        "message.add_(self.errors[index], alpha=self.feedback_decay)",
        "message.add_(self.errors[index])",
        SPARSE,
    ),
    Mutant(
        "gather: bytes count one receiver",
        "llmtrain/parallel/exchanges.py",
        "sent = (self._comms.size - 1) * len(part)",
        "sent = len(part)",
        SPARSE,
    ),
    Mutant(
        "plan: the largest values are sent to one replica",
        "llmtrain/plan/time_estimate.py",
        "return (replicas - 1) * SparseFormat(",
        "return SparseFormat(",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "prediction: the largest values are summed and sent once more",
        "llmtrain/plan/network_time.py",
        "return BlockMessage(Exchange(others * sparse.size(values, value_bytes), 1, peers=others, is_ring=False))",
        "return BlockMessage(*[Exchange(others * sparse.size(values, value_bytes), 1, peers=others, is_ring=False)] * 2)",
        ("tests/unit/test_network_time.py",),
    ),
    Mutant(
        "fp4: the border between two powers is their geometric mean",
        WIRE_FORMAT,
        "0x3FFFFF",
        "0x4AFB0D",
        TABLES,
    ),
    Mutant(
        "fp4: a value halfway between two powers becomes the larger one",
        WIRE_FORMAT,
        "0x3FFFFF",
        "0x400000",
        TABLES,
    ),
    Mutant(
        "fp4: what is below the smallest power becomes 0",
        WIRE_FORMAT,
        "_ones(magnitudes > 2.0**-7)",
        "_ones(magnitudes >= 2.0**-6)",
        TABLES,
    ),
    Mutant("fp4: no sign", WIRE_FORMAT, "8 * _ones(quotients < 0)", "8 * _ones(quotients < -9)", TABLES),
    Mutant(
        "2bit: the scale is the largest magnitude",
        WIRE_FORMAT,
        "groups.abs().mean(-1, keepdim=True, dtype=torch.float64)",
        "groups.abs().amax(-1, keepdim=True)",
        TABLES,
    ),
    Mutant("2bit: the border is at the mean magnitude", WIRE_FORMAT, "0.9816 / 0.79788", "1.0", TABLES),
    Mutant(
        "2bit: the third code of a byte is lost",
        WIRE_FORMAT,
        "quads | (quads << 6) | (quads << 12) | (quads << 18)",
        "quads | (quads << 6) | (quads << 18)",
        TABLES,
    ),
    Mutant(
        "2bit: goes without error feedback",
        "llmtrain/sync/compatibility.py",
        '{"wire": ("2bit", "topk")},',
        '{"wire": ("topk",)},',
        ("tests/unit/test_recipe_wrong.py",),
    ),
    Mutant(
        "wire: values of 16 bits are rounded in 16 bits",
        "llmtrain/parallel/wire_format.py",
        "    groups = groups.to(torch.promote_types(groups.dtype, torch.float32))\n",
        "",
        ("tests/unit/test_wire.py",),
    ),
]
