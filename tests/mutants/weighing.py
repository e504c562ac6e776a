"""Mistakes in reductions that weigh replicas, in primal averages, and in averages of moments."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MEANS = "llmtrain/sync/reductions/weighted_means.py"
BY_HAND = ("tests/unit/test_weighted_means.py",)
WEIGHED = ("tests/distributed/test_weighted_means.py",)
MOMENTS = ("tests/distributed/test_moments.py",)
PRIMAL = ("tests/distributed/test_methods_oracle.py", "tests/distributed/test_primal_average.py")
MUTANTS = [
    Mutant("tokens: work is tokens alone", MEANS, "done.tokens**2 / max(done.steps, 1)", "done.tokens", WEIGHED),
    Mutant(
        "tokens: equal work is not exactly equal",
        MEANS,
        "relative = work / work.max()",
        "relative = work * 0.1",
        BY_HAND,
    ),
    Mutant("tokens: nobody counts in a round without steps", MEANS, "work = torch.ones_like(work)", "pass", BY_HAND),
    Mutant(
        "tokens: those of the first shard rank alone",
        "llmtrain/sync/weighing.py",
        "[row[:-1].to(whole.device), whole[:1], whole[1:].sqrt()]",
        "[row.to(whole.device), whole[1:].sqrt()]",
        WEIGHED,
    ),
    Mutant(
        "tokens: a message's round is counted again in the next",
        "llmtrain/sync/sync_stats.py",
        "self.lr_sum + lr, self.tokens + tokens)",
        "self.lr_sum + lr, tokens)",
        WEIGHED,
    ),
    Mutant(
        "tokens: counted where no choice depends on them",
        "llmtrain/sync/method.py",
        "tokens = tokens if self._counts_tokens else 0",
        "pass",
        ("tests/distributed/test_reshape.py", "tests/distributed/test_weighted_means.py"),
    ),
    Mutant(
        "tokens: each new rank has the tokens of all old ones",
        "llmtrain/sync/sync_stats.py",
        'sum(of) / shards if name == "tokens"',
        'sum(of) if name == "tokens"',
        BY_HAND,
    ),
    Mutant("radial: the mean is not lengthened", MEANS, "length / squared_norm.sqrt(), 1.0", "1.0, 1.0", WEIGHED),
    Mutant(
        "radial: long pseudo-gradients turn the direction more",
        MEANS,
        "lengths / torch.where(moved, norms, 1.0) / moved",
        "1.0 / moved",
        BY_HAND,
    ),
    Mutant(
        "radial: replicas that have not moved are no part of the mean norm",
        MEANS,
        "/ counted.sum(0).clamp(min=1)\n",
        "/ (norms > 0).sum(0).clamp(min=1)\n",
        BY_HAND,
    ),
    Mutant(
        "radial: directions that cancel are divided by zero",
        MEANS,
        "torch.where(squared_norm > 0, ",
        "torch.where(squared_norm >= 0, ",
        BY_HAND,
    ),
    Mutant("median: the lower one of two", MEANS, "(middle[0] + middle[1]) / 2", "middle[0]", BY_HAND),
    Mutant("median: replicas left out count in the divisor", MEANS, "1.0) / (last + 1)", "1.0) / len(norms)", BY_HAND),
    Mutant(
        "messages: lengths are not in the checkpoint",
        "llmtrain/sync/schedules/fragments.py",
        'for index, length in state.get("lengths", [])',
        "for index, length in []",
        WEIGHED,
    ),
    Mutant(
        "primal average: replicas continue from the average",
        "llmtrain/sync/outer.py",
        "return torch.add(anchor, momentum, alpha=1 - self.share)",
        "return anchor",
        PRIMAL,
    ),
    Mutant(
        "primal average: the fast point does not fall back",
        "llmtrain/sync/outer.py",
        "momentum.mul_(self.decay)",
        "pass",
        PRIMAL,
    ),
    Mutant(
        "primal average: the way from the average counts twice",
        "llmtrain/sync/outer.py",
        "momentum.mul_(self.share).sub_(mean)",
        "momentum.sub_(mean)",
        PRIMAL,
    ),
    Mutant(
        "primal average: the run ends between average and replica",
        "llmtrain/sync/method.py",
        "        self.block_sync.end_at_anchor()\n",
        "",
        PRIMAL,
    ),
    Mutant(
        "primal average: a run that goes on keeps the fast point",
        "llmtrain/sync/block_sync.py",
        "momentum.zero_())",
        "momentum)",
        PRIMAL,
    ),
    Mutant(
        "primal average: a step taken back goes to the average",
        "llmtrain/sync/block_sync.py",
        "self.outer.start(*self.anchors.load(index)) if with_momentum else",
        "self.anchors.load(index)[0] if with_momentum else",
        PRIMAL,
    ),
    Mutant(
        "primal average: validated where gradients are computed",
        "llmtrain/sync/method.py",
        "if self.block_sync.outer.starts_at_anchor or anchors is None or not anchors.is_set:",
        "if True:",
        ("tests/distributed/test_initial_weights.py",),
    ),
    Mutant(
        "moments: a round that is not theirs does not count",
        "llmtrain/sync/moments.py",
        "self._rounds % every == 0",
        "self._rounds % every == 1 % every",
        MOMENTS,
    ),
    Mutant(
        "moments: the sum and not the mean",
        "llmtrain/sync/moments.py",
        "torch.cat(parts).div_(self.replica_comms.size)",
        "torch.cat(parts)",
        MOMENTS,
    ),
    Mutant(
        "moments: of blocks in flight at the start alone",
        "llmtrain/sync/moments.py",
        "< len(blocks):",
        "< 0:",
        MOMENTS,
    ),
    Mutant(
        "moments: a token that was never met gets the others' first moment",
        "llmtrain/sync/moments.py",
        "moment.masked_fill_(second == 0, 0.0)",
        "pass",
        MOMENTS,
    ),
    Mutant(
        "moments: first moments are averaged before second ones",
        "llmtrain/sync/moments.py",
        "((2, self.section.second), (1, self.section.first))",
        "((1, self.section.first), (2, self.section.second))",
        MOMENTS,
    ),
    Mutant(
        "moments: a resumed run counts rounds anew",
        "llmtrain/sync/moments.py",
        'self._rounds = state["rounds"]',
        "pass",
        MOMENTS,
    ),
    Mutant(
        "moments: an optimizer without any is not noticed",
        "llmtrain/sync/moments.py",
        "if all(moment is None for index in blocks for moment in self.replica.moments(index, order)):",
        "if False:",
        ("tests/distributed/test_local_updates.py",),
    ),
    Mutant(
        "moments: their bytes are not in the estimate",
        "llmtrain/plan/time_estimate.py",
        "+ moment_bytes(recipe, size, replicas)\n    members",
        "\n    members",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "moments: nobody waits for them in the estimate",
        "llmtrain/plan/network_time.py",
        "exposed += sequence_seconds(of_moments, link) / due",
        "pass",
        ("tests/unit/test_network_time.py",),
    ),
]
