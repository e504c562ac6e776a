"""Mistakes in llmtrain/sync, m to z."""

TABLES = {
    "llmtrain/sync/message.py": r"""
    seen by SCENARIOS
        messages: an excluded replica mixes its own parameters in
          - own = 0.0 if index in self.restarted_blocks else alpha
          + own = alpha
        messages: sends what a replica has moved by since, too
          - self.block_sync.start_reduce(index, agreed.weights[index], payload)
          + self.block_sync.start_reduce(index, agreed.weights[index])
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        messages: blocks that a replica restarts are not in the checkpoint
          - self.restarted_blocks, self.target_norms = frozenset(restarted_blocks), target_norms or {}
          + self.target_norms = target_norms or {}
        messages: what is not sent yet is not in the checkpoint
          -         if self._unsent:
          -             self._start_weighing()
          +         self._unsent = {}
    seen by distributed/test_message.py
        late: the first of two exchanges has more of an odd number of steps
          - halfway = (self.SENT_AFTER + due) // 2
          + halfway = (self.SENT_AFTER + due + 1) // 2
    """,
    "llmtrain/sync/method.py": r"""
    seen by distributed/test_sync_equivalences.py, distributed/test_methods_resume.py
        method: rounds are numbered from 0 again after a resume
          - self.block_sync.rounds_done = state["report"]["count"]
          + pass
        method: the checkpoint has the log's number of rounds
          - {**self.block_sync.stats.state_dict(), "count": self.block_sync.rounds_done}
          + self.block_sync.stats.state_dict()
    seen by SCENARIOS
        pull: happens before the pending synchronization
          -         self.schedule.flush()
          -         self.pull.pull_to_anchor(lr)
          +         self.pull.pull_to_anchor(lr)
    seen by distributed/test_reshard.py, distributed/test_weighted_means.py
        tokens: counted where no choice depends on them
          - tokens = float(tokens) if self._counts_tokens else 0
          + pass
    seen by distributed/test_weighted_means.py
        tokens: of steps that were taken back
          -             self.schedule.forget_tokens()
          -
    seen by distributed/test_methods_oracle.py, distributed/test_primal_average.py
        primal average: the run ends between average and replica
          -         self.block_sync.end_at_anchor()
          -
    seen by distributed/test_initial_weights.py
        primal average: validated where gradients are computed
          - if self.block_sync.outer.starts_at_anchor or anchors is None or not anchors.is_set:
          + if True:
    seen by distributed/test_run_length.py
        length: local steps that have begun become synchronous again
          - if "warmup" in state["period"]:
          + if False:
        length: local steps begin before the step that is done
          - self.period.set_warmup(max(self.period.warmup, step))
          + pass
    """,
    "llmtrain/sync/moments.py": r"""
    seen by distributed/test_local_updates.py
        a loop of one's own: moments of other parameters with as many values are averaged
          - zlib.crc32(repr(block).encode()) if any(block) else 0
          + sum(block)
        moments: those of different parameters are mixed up
          - (of_all != of_all[0]).any(0)
          + (of_all < 0).any(0)
        moments: an optimizer without any is not noticed
          - if every is not None and not any(exist[order]):
          + if False:
    seen by distributed/test_moments.py
        moments: a round that is not theirs does not count
          - self._rounds % every == 0
          + self._rounds % every == 1 % every
        moments: the sum and not the mean
          - torch.cat(parts).div_(self.replica_comms.size)
          + torch.cat(parts)
        moments: a token that was never met gets the others' first moment
          - moment.masked_fill_(second == 0, 0.0)
          + pass
        moments: first moments are averaged before second ones
          - orders = ((2, self.section.second), (1, self.section.first))
          + orders = ((1, self.section.first), (2, self.section.second))
    seen by distributed/test_methods_resume.py
        moments: a resumed run counts rounds anew
          - self._rounds = state["rounds"]
          + pass
    """,
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
    "llmtrain/sync/period.py": r"""
    seen by unit/test_period.py, SCENARIOS
        period: rounds begin a step early
          - (step - self.warmup - 1) % self.section.every + 1
          + (step - self.warmup) % self.section.every + 1
        period: warm-up by learning rate is a step too long
          - lr_schedule.first_step_below(sync.warmup_until_lr) - 1)
          + lr_schedule.first_step_below(sync.warmup_until_lr))
    seen by unit/test_period.py
        period: QSR ignores the warm-up's peak rate
          - lr_schedule.at(max(self._ends[-1] + 1, lr_schedule.warmup_steps))
          + lr_schedule.at(self._ends[-1] + 1)
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
        timed: what comes before the first step of a resumed run is in its round
          - self._exchanged_at, self._resumed_after = None, state["elapsed"]
          + self._exchanged_at, self._resumed_after = self.clock() - (state["elapsed"] or 0.0), None
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
          - local_steps, slowest = mean_local_steps(replica_steps), int
          + local_steps, slowest = replica_steps[0], int
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
