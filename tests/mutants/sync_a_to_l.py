"""Mistakes in llmtrain/sync, a to l."""

TABLES = {
    "llmtrain/sync/anchors.py": r"""
    seen by SCENARIOS
        anchors: momentum begins as the parameters
          - if name == ANCHOR else map(torch.zeros_like, self.anchor)
          +
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py
        anchors: momentum is not restored
          - kept[:] = [self._to_host(index, tensor.clone()) for
          + kept[:] = [self._to_host(index, tensor.clone().mul_(name == ANCHOR)) for
    seen by distributed/test_offload.py
        anchors: offloaded momentum is not written back
          -             for kept, tensor in zip(self.kept.values(), changed, strict=True):
          +             for kept, tensor in zip(self.kept.values(), changed[:1], strict=False):
    seen by unit/test_anchors.py
        anchors: fingerprint blind to the order of blocks
          - total += number * flat.view(
          + total += flat.view(
    """,
    "llmtrain/sync/auto_outer.py": r"""
    seen by unit/test_auto_outer.py
        outer: auto has full momentum in short rounds
          -  * min(1.0, steps / LONG)
        outer: auto has momentum in many short rounds
          - max(1.0, min(MOST, rounds * SHARE) * min(1.0, steps / LONG))
          + min(MOST, max(1.0, rounds * SHARE * min(1.0, steps / LONG)))
    """,
    "llmtrain/sync/block_sync.py": r"""
    seen by unit/test_anchors.py
        block: norms in half precision
          - flat = flat.float()
          + pass
    seen by SCENARIOS
        block: the spread is measured from the anchor
          - self._distances.append(_dot(pseudo_gradient.sub_(mean)))
          + self._distances.append(_dot(pseudo_gradient))
        block: the spread without anchors is the mean's norm
          - return _sum(_dot(parameters - mean_part) for parameters, mean_part in parts)
          + return _sum(_dot(part) for parameters, part in parts)
        outer: every round is the first one
          - self.outer.in_round(self.rounds_done)
          + self.outer.in_round(0)
    seen by distributed/test_sync_equivalences.py
        outer: the number of a round is the log's
          - self.outer.in_round(self.rounds_done)
          + self.outer.in_round(self.stats.count)
    seen by distributed/test_bad_numbers.py
        anchor: replicas that differ keep their first anchors
          - bool(shards.all_gather(differ.to(shards.device), COMPARING).any())
          + False
        anchor: shards decide on their own whether replicas differ
          - bool(shards.all_gather(differ.to(shards.device), COMPARING).any())
          + bool(differ)
        anchor: the first replica's parameters are added to the others'
          -             if self.replica_comms.rank > 0:
          -                 flat.zero_()
          +             pass
    seen by distributed/test_rounding_errors.py, SCENARIOS
        synchronizer: a rounding error is sent twice
          - self.rounding_errors[index].zero_()
          + pass
        synchronizer: rounding errors of a replica of weight 0
          - if self.rounding_errors and weight > 0:
          + if self.rounding_errors:
        synchronizer: a NaN is kept as rounding error
          - self._error += lost.nan_to_num_(0.0, 0.0, 0.0)
          + self._error += lost
    seen by distributed/test_methods_oracle.py, distributed/test_primal_average.py
        primal average: a run that goes on keeps the fast point
          - *(tensor.zero_() for tensor in state)
          + *state
        primal average: a step taken back goes to the average
          - self.write_parameters(index, self.outer.start(anchor, state))
          + self.write_parameters(index, anchor)
    seen by unit/test_device_time.py
        times: synchronization is timed on the host
          - SyncStats(replica_comms.training_device)
          + SyncStats()
    seen by distributed/test_local_updates.py
        loops: a loaded mean is overwritten
          - mean.to(device, copy=True)
          + mean.to(device)
    seen by distributed/test_sparse_wire.py
        sparse: what was left out does not decay
          - message.add_(self.rounding_errors[index], alpha=self.feedback_decay)
          + message.add_(self.rounding_errors[index])
    """,
    "llmtrain/sync/butterfly.py": r"""
    seen by unit/test_butterfly.py
        butterfly: groups shift by one bit a step
          - (iteration * per_step + r) % total
          + (iteration + r) % total
    """,
    "llmtrain/sync/compatibility.py": r"""
    seen by unit/test_recipe_wrong.py
        compose: a penalty may go with wait-avoiding groups
          - *("reduction", kind),
          -             {"schedule": ("wait_avoiding",)},
          + *("reduction", kind),
          +             {"schedule": ()},
        2bit: goes without error feedback
          - {"wire": ("2bit", "topk")},
          + {"wire": ("topk",)},
    """,
    "llmtrain/sync/equal_replicas.py": r"""
    seen by distributed/test_equal_replicas.py
        library: ranks may have other choices
          - if (choices != choices[0, 0]).any():
          + if False:
        library: ranks may continue from different steps
          - if (steps != steps[0, 0]).any():
          + if False:
        library: states of different runs go together
          - if (anchors != anchors[:, :1]).any():
          + if False:
        library: a module may be another than its state is of
          - if others.any():
          + if False:
        library: different moments are accepted before a synchronous step
          -     if synchronous.all():
          -         raise
          +     if False:
          +         raise
        library: moments are not compared
          - (name := _block_of_other_moments(replicas, shards, replica)) is None
          + (name := None) is None
        library: ranks may end after different steps
          - if (taken != taken[0, 0]).any():
          + if False:
        library: replicas may differ at the end
          - if (name := _other_block(replicas, shards, replica)) is not None:
          -         raise TrainingError(
          + if (name := None) is not None:
          +         raise TrainingError(
    seen by distributed/test_local_updates.py
        library: replicas may differ at the start
          - if synchronized.all() and
          + if False and
    """,
    "llmtrain/sync/group_averager.py": r"""
    seen by unit/test_group_averager.py
        wagma: messages before a global average are kept
          - self._posted.clear()
          + pass
    seen by unit/test_group_averager.py, distributed/test_wagma.py
        wagma: answers with parameters older than the global average
          - lambda: max(self._posted) >= self._last_global,
          + lambda: True,
    seen by unit/test_group_averager.py
        wagma: keeps three models in CPU memory
          - for i, posted in self._posted.items() if i >= version}
          + for i, posted in self._posted.items() if i >= version - 1}
    seen by distributed/test_wagma.py, distributed/test_wagma_freely.py
        wagma: sums into the message that it keeps
          - message = [copy_of(part, part) for part in self._posted[version]]
          + message = list(self._posted[version])
    seen by unit/test_waiting.py
        wagma: a last group average that never ends is ignored
          -             if self._thread.is_alive():
          -                 raise
          +             if False:
          +                 raise
    """,
    "llmtrain/sync/local_updates.py": r"""
    seen by unit/test_house.py
        library: a loop of one's own imports transformers
          - from llmtrain.parallel.sharded import local, release_gathered
          + from llmtrain.parallel.torch_engine import TorchEngine
          + from llmtrain.parallel.sharded import local, release_gathered
    seen by distributed/test_local_updates_state.py
        loops: the optimizer's parameters are those that FSDP2 has gathered
          - release_gathered(model)
          + pass
    seen by distributed/test_local_updates.py
        a loop of one's own: a gradient that a replica lacks is left out
          - if not is_used:
          + if parameter.grad is None:
        a loop of one's own: a second one hears the first one's end
          - f"llmtrain/loop{next(_LOOPS)}"
          + "llmtrain/loop"
        library: a wrong argument is taken for a key of sync
          - closest(name, [*keys, *arguments])
          + closest(name, keys)
        library: gradients are not averaged in synchronous steps
          -             if plan.phase != "local":
          +             if False:
        library: a resumed loop counts its steps from the start
          -         self.step = state["step"]
          -
    seen by distributed/test_local_updates_state.py
        library: synchronous steps may become fewer than were made
          -         self._method.keep_warmup(self.step)
          -
        library: what is closed still synchronizes in forward
          -         self.replica.remove_block_hooks()
          -
        library: a closure's gradients are not averaged
          - for argument in (*arguments[1:], named.get("closure"))
          + for argument in ()
    seen by distributed/test_loop_checks.py
        library: parameters may move before a state is loaded
          - if self._has_begun:
          + if self._has_begun or self.step > 0:
        library: a replica may be on another GPU than the process
          -         check_current_device(device)
          -
        library: another learning rate is warned of in every step
          -             self._followed = None
          -
        library: learning rates are compared where nothing follows them
          - lr if follows_rates(self.sync) else None
          + lr
    seen by distributed/test_equal_replicas.py
        library: replicas are not compared after a state is loaded
          - self._has_begun, self._saved = False,
          + self._has_begun, self._saved = True,
        library: a layer-wise loop synchronizes before replicas are compared
          -             self.replica.register_block_hook(lambda index: self._begin())
          +             pass
        library: an optimizer may have two loops
          - and _REFUSALS[optimizer] is None:
          + and False:
        library: steps after the end are not refused
          -         if was_open:
          +         if False:
        library: a loop after another one refuses its steps
          -             refusal.remove()
          +             pass
        library: closing an ended loop opens the optimizer of the next one
          -         if self._is_open:
          +         if True:
        library: a loop after another one is warned of its moments
          - if text is not None and not self._had_loop:
          + if text is not None:
        library: nobody is told that all steps were synchronous
          - and period.is_synchronous(self.step):
          + and False:
    """,
    "llmtrain/sync/loop_checks.py": r"""
    seen by distributed/test_local_updates.py
        library: anything may be a group
          - if group is not None and not isinstance(group, dist.ProcessGroup):
          + if False:
        library: a learning rate may be a number
          - if lr is not None and not isinstance(lr, LRSchedule):
          + if False:
        library: anything may be a layer
          - and all(isinstance(one, nn.Module) for one in layers)
          +
        library: time may be negative
          - and timeout_seconds > 0):
          + ):
    seen by distributed/test_loop_checks.py
        a loop of one's own: replicas with learning rates of their own apply CO2's means differently
          - if (rates != rates[0]).any():
          + if False:
        a loop of one's own: FSDP2 may average gradients over the replicas
          - if placement.is_replicate()]
          + if not placement]
        library: every process may use all GPUs
          - if isinstance(model, DataParallel):
          + if False:
        library: any GPU is the current one
          - if device.type == "cuda" and device.index !=
          + if device.type == "gpu" and device.index !=
    seen by unit/test_lr.py
        library: only the first parameter group's learning rate counts
          - for group in groups):
          + for group in groups[:1]):
        library: rates of the warm-up are compared, too
          - if step <= rates.warmup_steps:
          + if step < 1:
    """,
    "llmtrain/sync/local_steps.py": r"""
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
    seen by unit/test_weighted_means.py
        tokens: each new rank has the tokens of all old ones
          - sum(of) / shards if name == "tokens"
          + sum(of) if name == "tokens"
    """,
}
