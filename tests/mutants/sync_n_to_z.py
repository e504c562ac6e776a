"""Mistakes in llmtrain/sync, n to z."""

TABLES = {
    "llmtrain/sync/outer.py": r"""
    seen by SCENARIOS
        outer: Nesterov's step ignores the weight
          - alpha=-self.lr * self.momentum * unit)
          + alpha=-self.lr * self.momentum)
        outer: momentum is clipped from above only
          - momentum.clamp_(-self.clip, self.clip)
          + momentum.clamp_(max=self.clip)
        outer: the momentum step ignores the weight
          - anchor.add_(momentum, alpha=-self.lr * unit)
          + anchor.add_(momentum, alpha=-self.lr)
        outer: the first round has no momentum yet
          - return min(1.0, (number + 1) / (warmup + 1))
          + return min(1.0, number / (warmup + 1))
        outer: the learning rate falls from the first round on
          - max(0, number - rounds.lr_warmup) / rounds.lr_decay
          + number / rounds.lr_decay
    seen by distributed/test_methods_oracle.py, distributed/test_primal_average.py
        primal average: replicas continue from the average
          - return torch.add(anchor, momentum, alpha=1 - self.share)
          + return anchor
        primal average: the fast point does not fall back
          - momentum.mul_(self.decay)
          + pass
        primal average: the way from the average counts twice
          - momentum.mul_(self.share).sub_(mean)
          + momentum.sub_(mean)
    """,
    "llmtrain/sync/outer_rule.py": r"""
    seen by unit/test_outer_rule.py
        outer: auto has full momentum in short rounds
          -  * min(1.0, steps / LONG)
        outer: auto has momentum in many short rounds
          - max(1.0, min(MOST, rounds * SHARE) * min(1.0, steps / LONG))
          + min(MOST, max(1.0, rounds * SHARE * min(1.0, steps / LONG)))
    """,
    "llmtrain/sync/period.py": r"""
    seen by unit/test_period.py, SCENARIOS
        period: rounds begin a step early
          - (step - self.warmup - 1) % self.section.every + 1
          + (step - self.warmup) % self.section.every + 1
        period: warm-up by learning rate is a step too long
          - rates.first_step_below(sync.warmup_until_lr) - 1)
          + rates.first_step_below(sync.warmup_until_lr))
    seen by unit/test_period.py
        period: QSR ignores the warm-up's peak rate
          - rates.at(max(self._ends[-1] + 1, rates.warmup_steps))
          + rates.at(self._ends[-1] + 1)
        period: QSR is always quadratic
          - (section.alpha / lr) ** section.power
          + (section.alpha / lr) ** 2
        period: QSR's round may be longer than the longest
          - self._ends.append(self._ends[-1] + min(length, longest))
          + self._ends.append(self._ends[-1] + length)
        length: QSR's rounds begin after the warm-up of the new length
          - self.warmup, self._ends = steps, [steps]
          + self.warmup, self._ends = steps, getattr(self, "_ends", [steps])
        period: rounds are numbered from the first step of the run
          - (step - self.warmup - 1) // self.section.every + 1
          + (step - 1) // self.section.every + 1
    """,
    "llmtrain/sync/pull.py": r"""
    seen by SCENARIOS
        pull: all replicas draw the same numbers
          - derive_seed(self.seed, "pull", self.block_sync.replica_comms.rank, step)
          + derive_seed(self.seed, "pull", 0, step)
        pull: the learning rate of other steps is not raised
          - return lr / (1 - self.section.probability)
          + return lr
    """,
    "llmtrain/sync/round_stats.py": r"""
    seen by distributed/test_methods_oracle.py
        outer: a round without a learning rate has the unit 1
          - "lr_sum": self.lr_sum}[normalize]
          + "lr_sum": self.lr_sum}[normalize] or 1.0
    seen by SCENARIOS
        round: a learning rate of 0 is remembered
          - lr or self.last_lr
          + lr
    seen by distributed/test_weighted_means.py
        tokens: a message's round is counted again in the next
          - self.lr_sum + lr, self.tokens + tokens)
          + self.lr_sum + lr, tokens)
    """,
    "llmtrain/sync/timed_period.py": r"""
    seen by unit/test_period.py
        timed: the end of a run counts in the first round of a longer one
          -         if self._exchanged_at is not None:
          -             self._exchanged_at = self.clock()
          -
          +
    seen by SCENARIOS
        timed: the pace is the fastest replica's
          - float(seconds.max()) * max(0, left) / done
          + float(seconds.min()) * max(0, left) / done
        timed: each rank reads its own clock
          - self.shard_comms.all_gather(mine, "reading the replica's clock")[0]
          + mine
        timed: only the clock bounds a round
          -  or step >= self._step_limit
        timed: every replica may take an equal share of the remaining steps
          - math.ceil(max(0, left) * self._last_steps / done)
          + math.ceil(max(0, left) / self.replica_comms.size)
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        timed: steps at the last synchronization not in the checkpoint
          - "summed_steps_at_sync", "last_steps", "step_limit")
          + "last_steps", "step_limit")
        timed: the bound on a round's steps is not in the checkpoint
          - "summed_steps_at_sync", "last_steps", "step_limit")
          + "summed_steps_at_sync", "last_steps")
    seen by unit/test_period.py
        timed: a validation is a part of the next round
          - self._exchanged_at += self.clock() - self._paused_at
          + pass
        timed: a checkpoint after a validation counts it
          - now = self.clock() if self._paused_at is None else self._paused_at
          + now = self.clock()
        timed: a request to stop does not end a round
          -  or stop
          -
          +
          +
        length: rounds of seconds stay as short as at the end of the shorter run
          - self._interval, self._step_limit = self.section.every, self._last_exchange_step + left
          + pass
        length: steps before a run's end count toward its next synchronization
          -         if is_synchronized:
          -             self._summed_steps_at_sync
          +         if False:
          +             self._summed_steps_at_sync
    """,
    "llmtrain/sync/weighing.py": r"""
    seen by SCENARIOS
        blocking: norms of the local shard alone
          - shard_comms.all_reduce(torch.stack([tokens, *squares]), "weighing pseudo-gradients")
          + torch.stack([tokens, *squares])
        blocking: clipped by the local shard's norm
          - whole = self.block_sync.shard_comms.all_reduce(squared.clone(), "norm of a pseudo-gradient")
          + whole = squared
        blocking: weights of the replicas reversed
          - found.weights[replica_comms.rank]
          + found.weights[replica_comms.size - 1 - replica_comms.rank]
        blocking: steps of the round are replica 0's
          - local_steps, slowest = average_stats(rounds), int
          + local_steps, slowest = rounds[0], int
        blocking: one anomalous replica rolls all back
          - rolled_back=_where(blocks, found.anomalous.all(0))
          + rolled_back=_where(blocks, found.anomalous.any(0))
    seen by distributed/test_weighted_means.py
        tokens: those of the first shard rank alone
          - ROUND_VALUES.index("tokens")] = sums[0]
          + ROUND_VALUES.index("tokens")] += 0
    seen by emulated_gpu/test_training.py
        tokens: on the GPU where masters are offloaded
          deep: an engine on a GPU needs the emulation, which is built for a minute
          - device = squares[0].device if squares else shard_comms.device
          + device = shard_comms.device
    """,
}
