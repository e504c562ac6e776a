"""Mistakes in llmtrain/sync, m to z."""

TABLES = {
    "llmtrain/sync/message.py": r"""
    seen by SCENARIOS
        messages: an excluded replica mixes in its own parameters
          - own = 0.0 if index in self.restarted_blocks else alpha
          + own = alpha
        messages: a message includes steps after its round
          - self.block_sync.start_reduce(index, agreed.weights[index], payload)
          + self.block_sync.start_reduce(index, agreed.weights[index])
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        messages: blocks that a replica restarts are not in the checkpoint
          - self.restarted_blocks, self.target_norms = frozenset(restarted_blocks), target_norms or {}
          + self.target_norms = target_norms or {}
        messages: unsent messages are not in the checkpoint
          -         if self._unsent:
          -             self._start_weighing()
          +         self._unsent = {}
    seen by distributed/test_message.py
        late: the first of two exchanges has the larger half of an odd number of steps
          - halfway = (self.SENT_AFTER + due) // 2
          + halfway = (self.SENT_AFTER + due + 1) // 2
    """,
    "llmtrain/sync/method.py": r"""
    seen by distributed/test_sync_equivalences.py, distributed/test_methods_resume.py
        method: a resume restarts the numbers of rounds at 0
          - self.block_sync.rounds_done = state["report"]["count"]
          + pass
        method: the checkpoint has the number of rounds in the log
          - {**self.block_sync.stats.state_dict(), "count": self.block_sync.rounds_done}
          + self.block_sync.stats.state_dict()
    seen by SCENARIOS
        pull: it happens before the pending synchronization
          -         self.schedule.flush()
          -         self.pull.pull_to_anchor(lr)
          +         self.pull.pull_to_anchor(lr)
    seen by distributed/test_reshard.py, distributed/test_weighted_means.py
        tokens: they are counted even if no choice depends on them
          - tokens = float(tokens) if self._counts_tokens else 0
          + pass
    seen by distributed/test_weighted_means.py
        tokens: those of rolled back steps count
          -             self.schedule.forget_tokens()
          -
    seen by distributed/test_methods_oracle.py, distributed/test_primal_average.py
        primal average: the run ends between the average and the replica
          -         self.block_sync.end_at_anchor()
          -
    seen by distributed/test_initial_weights.py
        primal average: validation uses the parameters of gradients, not the average
          - if self.block_sync.outer.starts_at_anchor or anchors is None or not anchors.is_set:
          + if True:
    seen by distributed/test_run_length.py
        length: local steps that have begun become synchronous again
          - if "warmup" in state["period"]:
          + if False:
        length: the warm-up may end before the last finished step
          - self.period.set_warmup(max(self.period.warmup, step))
          + pass
    """,
    "llmtrain/sync/moments.py": r"""
    seen by distributed/test_local_updates.py
        a loop of one's own: moments of other parameters with as many values are averaged
          - zlib.crc32(repr(block).encode()) if any(block) else 0
          + sum(block)
        moments: those of different parameters are averaged
          - (of_all != of_all[0]).any(0)
          + (of_all < 0).any(0)
        moments: an optimizer without moments is not noticed
          - if every is not None and not any(exist[order]):
          + if False:
    seen by distributed/test_moments.py
        moments: they are averaged in the wrong rounds
          - self._rounds % every == 0
          + self._rounds % every == 1 % every
        moments: they are summed, not averaged
          - torch.cat(parts).div_(self.replica_comms.size)
          + torch.cat(parts)
        moments: a token that a replica never saw has the first moment of others
          - moment.masked_fill_(second == 0, 0.0)
          + pass
        moments: first moments are averaged before second ones
          - orders = ((2, self.section.second), (1, self.section.first))
          + orders = ((1, self.section.first), (2, self.section.second))
    seen by distributed/test_methods_resume.py
        moments: a resumed run restarts the count of rounds
          - self._rounds = state["rounds"]
          + pass
    """,
    "llmtrain/sync/outer.py": r"""
    seen by SCENARIOS
        outer: Nesterov's step ignores the weight
          - alpha=-self.lr * self.momentum * unit)
          + alpha=-self.lr * self.momentum)
        outer: momentum is only clipped from above
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
        primal average: the fast point does not decay
          - momentum.mul_(self.decay)
          + pass
        primal average: the distance from the average counts twice
          - momentum.mul_(self.share).sub_(mean)
          + momentum.sub_(mean)
    """,
    "llmtrain/sync/period.py": r"""
    seen by unit/test_period.py, SCENARIOS
        period: rounds begin one step early
          - (step - self.warmup - 1) % self.section.every + 1
          + (step - self.warmup) % self.section.every + 1
        period: a warm-up by learning rate is one step too long
          - lr_schedule.first_step_below(sync.warmup_until_lr) - 1)
          + lr_schedule.first_step_below(sync.warmup_until_lr))
    seen by unit/test_period.py
        period: QSR ignores the warm-up's peak rate
          - lr_schedule.at(max(self._ends[-1] + 1, lr_schedule.warmup_steps))
          + lr_schedule.at(self._ends[-1] + 1)
        period: QSR is always quadratic
          - (section.alpha / lr) ** section.power
          + (section.alpha / lr) ** 2
        period: QSR's rounds may exceed the longest one
          - self._ends.append(self._ends[-1] + min(max(section.base, _grown(section, lr)), longest))
          + self._ends.append(self._ends[-1] + max(section.base, _grown(section, lr)))
        length: QSR's rounds of a shorter run are kept
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
        timed: time after a run's end counts in the first round of a longer run
          -         if self._exchanged_at is not None:
          -             self._exchanged_at = self.clock()
          -
          +
    seen by SCENARIOS
        timed: the pace is that of the fastest replica
          - float(seconds.max()) * max(0, left) / done
          + float(seconds.min()) * max(0, left) / done
        timed: each rank reads its own clock
          - self.shard_comms.all_gather(mine, "reading the replica's clock")[0]
          + mine
        timed: only the clock ends a round
          -  or step >= self._step_limit
        timed: the remaining steps are divided equally among replicas
          - math.ceil(max(0, left) * self._last_steps / done)
          + math.ceil(max(0, left) / self.replica_comms.size)
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        timed: the steps at the last synchronization are not in the checkpoint
          - "summed_steps_at_sync", "last_steps", "step_limit")
          + "last_steps", "step_limit")
        timed: the bound on a round's steps is not in the checkpoint
          - "summed_steps_at_sync", "last_steps", "step_limit")
          + "summed_steps_at_sync", "last_steps")
    seen by unit/test_period.py
        timed: the time of a validation counts in the next round
          - self._exchanged_at += self.clock() - self._paused_at
          + pass
        timed: a checkpoint after a validation counts the validation
          - now = self.clock() if self._paused_at is None else self._paused_at
          + now = self.clock()
        timed: time before the first step of a resumed run counts in its round
          - self._exchanged_at, self._resumed_after = None, state["elapsed"]
          + self._exchanged_at, self._resumed_after = self.clock() - (state["elapsed"] or 0.0), None
        timed: a request to stop does not end a round
          -  or stop
          -
          +
          +
        length: timed rounds stay as short as at the shorter run's end
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
        blocking: norms are those of the local shard
          - shard_comms.all_reduce(torch.stack([tokens, *squares]), "weighing pseudo-gradients")
          + torch.stack([tokens, *squares])
        blocking: the norm of the local shard decides on clipping
          - whole = self.block_sync.shard_comms.all_reduce(squared.clone(), "norm of a pseudo-gradient")
          + whole = squared
        blocking: the weights of replicas are reversed
          - found.weights[replica_comms.rank]
          + found.weights[replica_comms.size - 1 - replica_comms.rank]
        blocking: the steps of a round are those of replica 0
          - local_steps, slowest = mean_local_steps(replica_steps), int
          + local_steps, slowest = replica_steps[0], int
        blocking: one anomalous replica rolls back all
          - rolled_back=_where(blocks, found.anomalous.all(0))
          + rolled_back=_where(blocks, found.anomalous.any(0))
    seen by distributed/test_weighted_means.py
        tokens: only those of the first shard rank count
          - ROUND_VALUES.index("tokens")] = sums[0]
          + ROUND_VALUES.index("tokens")] += 0
    seen by emulated_gpu/test_training.py
        tokens: they are on the GPU although masters are offloaded
          deep: an engine on a GPU needs the emulated GPU, which takes a minute to build
          - device = squares[0].device if squares else shard_comms.device
          + device = shard_comms.device
    """,
}
