"""Mistakes in llmtrain/sync/schedules."""

TABLES = {
    "llmtrain/sync/schedules/blocking.py": r"""
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        blocking: the pending layer is not in the checkpoint
          - "armed": self._next_block is not None,
          + "armed": False,
    seen by SCENARIOS
        blocking: one block more than the section allows is in flight
          - parts.reduction, section.blocks_in_flight - 1
          + parts.reduction, section.blocks_in_flight
    seen by distributed/test_layerwise_long.py, SCENARIOS
        blocking: a prefetch of 0 counts as 1
          - block_sync.blocks[index : index + self.prefetch + 1]
          + block_sync.blocks[index : index + max(self.prefetch, 1) + 1]
    """,
    "llmtrain/sync/schedules/delayed.py": r"""
    seen by distributed/test_methods_resume.py
        delayed: staleness is not recorded
          - self.staleness = int(self._messages[max(turns)[1]]
          + self.nothing = int(self._messages[max(turns)[1]]
        delayed: a continued run logs the staleness of another fragment than the last one
          - self._messages[max(turns)[1]]
          + self._messages[min(turns)[1]]
    seen by SCENARIOS
        delayed: the scale may fall below 1
          - return max(1.0, (sent.lr_sum / sent.steps) / (now.lr_sum / now.steps))
          + return (sent.lr_sum / sent.steps) / (now.lr_sum / now.steps)
        delayed: the last mean is halved
          - self._apply(fragment, last, gap=1.0)
          + self._apply(fragment, last, gap=2.0)
        delayed: the first turn of a fragment resets the others
          - self.block_sync.reset_to_anchor(self.fragments[fragment])
          + self.block_sync.reset_to_anchor()
        delayed: in timed rounds, a message is sent only when it is used
          -             taken.send()
          +             pass
        delayed: the end ignores steps since a fragment's last turn
          -                 if local_steps.steps > 0:
          +                 if False:
    seen by distributed/test_rounding_errors.py, SCENARIOS
        delayed: a message is sent before the last rounding error is known
          -             previous.complete()  # before
          +             pass  # before
    seen by distributed/test_methods_equivalences.py
        co2: the shorter last round changes the scale of the round before
          - (sent.lr_sum / sent.steps) / (now.lr_sum / now.steps)
          + sent.lr_sum / now.lr_sum
    """,
    "llmtrain/sync/schedules/fragments.py": r"""
    seen by SCENARIOS
        overlapped: the turns of fragments are rounded down
          - place == math.ceil((p + 1) * length / parts)
          + place == math.floor((p + 1) * length / parts)
        overlapped: the outer step is that of the current round, not of the sent one
          - message = self._new_message(fragment, local_steps)
          + message = self._new_message(fragment, self._local_steps[fragment])
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        overlapped: local steps since the last turn are not restored
          - self._local_steps = [LocalSteps(**local_steps) for local_steps in state["local_steps"]]
          + self._local_steps = [LocalSteps()] * len(self.fragments)
    seen by unit/test_reshard.py
        messages: other replicas restart only the first one's blocks
          - sorted({index for state in states for index in state["restarts"]})
          + states[0]["restarts"]
    seen by distributed/test_methods_resume.py
        messages: target norms are not in the checkpoint
          - for index, norm in state.get("lengths", [])
          + for index, norm in []
    """,
    "llmtrain/sync/schedules/overlapped.py": r"""
    seen by SCENARIOS
        overlapped: the mixing coefficient is reversed
          - apply(self.section.alpha)
          + apply(1 - self.section.alpha)
        overlapped: at the end, fragments without local steps take an outer step, too
          - if local_steps.steps > 0:
          + if True:
        overlapped: at the end, fragments without local steps stay mixed
          - elif self._is_mixed:
          + elif False:
    seen by distributed/test_methods_oracle.py
        overlapped: steps that a mean has replaced count
          - if self.section.alpha == 0:  # this has discarded the local steps since the fragment's turn
          + if False:
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        overlapped: 'mixed' is not in the checkpoint
          - {"mixed": self._is_mixed}
          + {"mixed": False}
    """,
    "llmtrain/sync/schedules/wait_avoiding.py": r"""
    seen by distributed/test_wagma.py, distributed/test_wagma_freely.py
        wagma: a late replica's mean has the wrong divisor
          - total.add_(mine).div_(self.size + 1)
          + total.add_(mine).div_(self.size)
    """,
    "llmtrain/sync/schedules/butterfly.py": r"""
    seen by unit/test_butterfly.py
        butterfly: groups shift by one bit per iteration
          - (iteration * per_step + r) % total
          + (iteration + r) % total
    """,
    "llmtrain/sync/schedules/group_averager.py": r"""
    seen by unit/test_group_averager.py
        wagma: messages before a global average are kept
          - self._posted.clear()
          + pass
    seen by unit/test_group_averager.py, distributed/test_wagma.py
        wagma: an answer may hold parameters older than the global average
          - lambda: max(self._posted) >= self._last_global,
          + lambda: True,
    seen by unit/test_group_averager.py
        wagma: three models are kept in CPU memory
          - for i, posted in self._posted.items() if i >= version}
          + for i, posted in self._posted.items() if i >= version - 1}
    seen by distributed/test_wagma.py, distributed/test_wagma_freely.py
        wagma: the sum overwrites the kept message
          - message = [copy_of(part, part) for part in self._posted[version]]
          + message = list(self._posted[version])
    seen by unit/test_waiting.py
        wagma: a last group average that never ends is ignored
          -             if self._thread.is_alive():
          -                 raise
          +             if False:
          +                 raise
    """,
    "llmtrain/sync/schedules/memory_averager.py": r"""
    seen by distributed/test_virtual_clock.py
        in process: a replica that arrives together with the first is late
          - arrivals[1][1] <= start
          + arrivals[1][1] < start
        in process: the members of a group share one sum, which they change
          - [copy_of(part, own) for part, own in zip(total, newest, strict=True)]
          + list(total)
        in process: the host waits for averages on their way to the GPU
          - copy_of(part, own) for
          + part.clone() for
        in process: messages that are no longer needed are kept
          - if iteration < version]
          + if iteration < version - 100]
    """,
}
