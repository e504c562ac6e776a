"""Mistakes in the schedules of a synchronization."""

from __future__ import annotations

from tests.mutants.mutant import RESUMED, SCENARIOS, Mutant

MUTANTS = [
    Mutant(
        "blocking: norms of the local shard alone",
        "llmtrain/sync/schedules/blocking.py",
        'shard_comms.all_reduce(torch.stack(squares), "norms of pseudo-gradients").wait().sqrt().cpu()',
        "torch.stack(squares).sqrt().cpu()",
        SCENARIOS,
    ),
    Mutant(
        "blocking: clipped by the local shard's norm",
        "llmtrain/sync/schedules/blocking.py",
        'block_sync.shard_comms.all_reduce(squared_norm(mean), "norm of a pseudo-gradient").wait()',
        "squared_norm(mean)",
        SCENARIOS,
    ),
    Mutant(
        "blocking: weights of the replicas reversed",
        "llmtrain/sync/schedules/blocking.py",
        "self._replica_weights.weights[replica_comms.rank, index]",
        "self._replica_weights.weights[replica_comms.size - 1 - replica_comms.rank, index]",
        SCENARIOS,
    ),
    Mutant(
        "blocking: steps of the round are replica 0's",
        "llmtrain/sync/schedules/blocking.py",
        "RoundStats(*gathered[:, 1:4].mean(0).tolist())",
        "RoundStats(*gathered[0, 1:4].tolist())",
        SCENARIOS,
    ),
    Mutant(
        "blocking: one anomalous replica rolls all back",
        "llmtrain/sync/schedules/blocking.py",
        "bool(self._replica_weights.anomalous[:, index].all())",
        "bool(self._replica_weights.anomalous[:, index].any())",
        SCENARIOS,
    ),
    Mutant(
        "blocking: the pending layer is not in the checkpoint",
        "llmtrain/sync/schedules/blocking.py",
        '"armed": self._next_block is not None,',
        '"armed": False,',
        RESUMED,
    ),
    Mutant(
        "blocking: prefetch of 0 is 1",
        "llmtrain/sync/schedules/blocking.py",
        "block_sync.blocks[index : index + self.prefetch + 1]",
        "block_sync.blocks[index : index + max(self.prefetch, 1) + 1]",
        ("tests/distributed/test_layerwise_long.py", *SCENARIOS),
    ),
    Mutant(
        "overlapped: turns of fragments rounded down",
        "llmtrain/sync/schedules/overlapped.py",
        "place == math.ceil((p + 1) * length / parts)",
        "place == math.floor((p + 1) * length / parts)",
        SCENARIOS,
    ),
    Mutant(
        "overlapped: outer step of the present round, not of the one sent",
        "llmtrain/sync/schedules/overlapped.py",
        "block_sync.outer_step(index, mean, self._in_flight[fragment],",
        "block_sync.outer_step(index, mean, self._local_stats[fragment],",
        SCENARIOS,
    ),
    Mutant(
        "overlapped: mixing coefficient the wrong way round",
        "llmtrain/sync/schedules/overlapped.py",
        "alpha=self.section.alpha)",
        "alpha=1 - self.section.alpha)",
        SCENARIOS,
    ),
    Mutant(
        "overlapped: rounds since the last turn not restored",
        "llmtrain/sync/schedules/overlapped.py",
        'self._local_stats = [RoundStats(**since) for since in state["since"]]',
        "self._local_stats = [RoundStats()] * len(self.fragments)",
        RESUMED,
    ),
    Mutant(
        "overlapped: 'mixed' is not in the checkpoint",
        "llmtrain/sync/schedules/overlapped.py",
        '"mixed": self._is_mixed,',
        '"mixed": False,',
        RESUMED,
    ),
    Mutant(
        "overlapped: ends with the shortest round",
        "llmtrain/sync/schedules/overlapped.py",
        "self.block_sync.sync_all_blocks(max(self._local_stats",
        "self.block_sync.sync_all_blocks(min(self._local_stats",
        SCENARIOS,
    ),
    Mutant(
        "delayed: a shrinking learning rate may scale up",
        "llmtrain/sync/schedules/delayed.py",
        "return max(1.0, sent.lr_sum / now.lr_sum)",
        "return (sent.lr_sum / now.lr_sum)",
        SCENARIOS,
    ),
    Mutant(
        "delayed: the last mean is halved",
        "llmtrain/sync/schedules/delayed.py",
        "self._apply(self._pending, self._in_flight, gap=1.0)",
        "self._apply(self._pending, self._in_flight, gap=2.0)",
        SCENARIOS,
    ),
    Mutant(
        "delayed: sends before the last rounding error is known",
        "llmtrain/sync/schedules/delayed.py",
        "        means(self._pending)  # before",
        "        # before",
        (
            "tests/distributed/test_rounding_errors.py",
            *SCENARIOS,
        ),
    ),
    Mutant(
        "delayed: the round begun is not restored",
        "llmtrain/sync/schedules/delayed.py",
        'self._round = RoundStats(**state["round"])',
        "self._round = RoundStats()",
        RESUMED,
    ),
    Mutant(
        "wagma: a late replica's mean has the wrong divisor",
        "llmtrain/sync/schedules/wait_avoiding.py",
        "(total + mine) / (self.size + 1)",
        "(total + mine) / self.size",
        (
            "tests/distributed/test_wagma.py",
            "tests/distributed/test_wagma_freely.py",
        ),
    ),
    Mutant(
        "wagma: answers with parameters older than the global average",
        "llmtrain/sync/group_averager.py",
        "lambda: max(self._posted) >= self._last_global,",
        "lambda: True,",
        (
            "tests/unit/test_group_worker.py",
            "tests/distributed/test_wagma.py",
        ),
    ),
    Mutant(
        "wagma: sums into the message that it keeps",
        "llmtrain/sync/group_averager.py",
        "message = [part.clone() for part in self._posted[version]]",
        "message = list(self._posted[version])",
        (
            "tests/distributed/test_wagma.py",
            "tests/distributed/test_wagma_freely.py",
        ),
    ),
    Mutant(
        "butterfly: groups shift by one bit a step",
        "llmtrain/sync/butterfly.py",
        "(iteration * per_step + r) % total",
        "(iteration + r) % total",
        ("tests/unit/test_butterfly.py",),
    ),
]
