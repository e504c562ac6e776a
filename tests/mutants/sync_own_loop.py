"""Mistakes in llmtrain/sync/own_loop."""

TABLES = {
    "llmtrain/sync/own_loop/equal_replicas.py": r"""
    seen by distributed/test_equal_replicas.py
        library: ranks may have different choices
          - if (choices != choices[0, 0]).any():
          + if False:
        library: ranks may continue from different steps
          - if (steps != steps[0, 0]).any():
          + if False:
        library: states of different runs may be combined
          - if (anchors != anchors[:, :1]).any():
          + if False:
        library: a state may be of another module
          - if others.any():
          + if False:
        library: replicas may differ in moments before a synchronous step
          -     if averaging.all():
          -         raise
          +     if False:
          +         raise
        library: moments are not compared
          - (name := _block_of_differing_moments(replicas, shards, replica)) is None
          + (name := None) is None
        library: ranks may end after different steps
          - if (taken != taken[0]).any():
          + if False:
        library: parameters of an optimizer without a loop may differ
          - if (others == others[:, :1]).all():
          + if True:
        library: replicas may differ at the end
          - if (name := _differing_block(replicas, shards, replica)) is not None:
          -         raise TrainingError(
          + if (name := None) is not None:
          +         raise TrainingError(
    seen by distributed/test_local_updates.py
        library: replicas may differ at the start
          - if synchronized.all() and
          + if False and
        library: all replicas' gradients are taken for the same
          - return bool((notes == notes[0]).all())
          + return True
    """,
    "llmtrain/sync/own_loop/local_updates.py": r"""
    seen by unit/test_own_loop_choices.py
        library: a mapping replaces the short form of a preset
          - merge(expand_sync(METHODS[method].PRESET),
          + merge(METHODS[method].PRESET,
        library: mappings of different kinds are merged
          - expand_sync(choices), UNION_KEYS)
          + expand_sync(choices))
    seen by unit/test_house.py
        library: a loop of the user's own imports transformers
          - from llmtrain.parallel.sharded import release_gathered
          + from llmtrain.parallel.torch_engine import TorchEngine
          + from llmtrain.parallel.sharded import release_gathered
    seen by distributed/test_local_updates_state.py
        loops: the optimizer holds parameters gathered by FSDP2
          - release_gathered(model)
          + pass
    seen by distributed/test_local_updates.py
        a loop of one's own: a second loop reads the first loop's end
          - f"llmtrain/loop{next(_LOOPS)}"
          + "llmtrain/loop"
        library: a mistyped argument is only compared with keys of sync
          - closest(name, [*keys, *arguments])
          + closest(name, keys)
        library: gradients are not averaged in synchronous steps
          -             if plan.phase != "local":
          +             if False:
        library: a resumed loop counts its steps from the start
          -         self.steps_done = state["step"]
          -
    seen by distributed/test_local_updates_state.py
        library: the warm-up may end before the last finished step
          -         self._method.keep_warmup(self.steps_done)
          -
        library: a closed loop still synchronizes in forward
          -         self.replica.remove_block_hooks()
          -
        library: a closure's gradients are not averaged
          - for argument in (*arguments[1:], named.get("closure"))
          + for argument in ()
    seen by distributed/test_loop_checks.py
        library: parameters may move before a state is loaded
          - if self._has_begun:
          + if self._has_begun or self.steps_done > 0:
        library: parameters may move after the first step
          - if self._method.period.ends_round(self.steps_done):
          + if False:
        library: parameters may move before the end
          -         self.replica.check_storage()
          -         with torch.no_grad():
          -             self._method.finish()
          +         with torch.no_grad():
          +             self._method.finish()
        library: gradients are averaged in the order of the optimizer
          - average_gradients(self._replicas, self.replica.parameters,
          + average_gradients(self._replicas, [p for group in self._optimizer.param_groups for p in group["params"]],
        library: no warning about parameters of 16 bits
          -         self._warn_of_low_precision()
          -
        library: a replica may be on a GPU other than the current one
          -         check_current_device(device)
          -
        library: a different learning rate causes a warning in every step
          -             self._followed = None
          -
        library: learning rates are compared even if nothing depends on them
          - lr if follows_rates(self.sync) else None
          + lr
    seen by distributed/test_equal_replicas.py
        library: replicas are not compared after a state is loaded
          - self._has_begun, self._saved = False,
          + self._has_begun, self._saved = True,
        library: a refused beginning is not compared again
          -         text = check_equal_start(
          +         self._has_begun = True
          +         text = check_equal_start(
        library: a layer-wise loop synchronizes before replicas are compared
          -             self.replica.register_block_hook(self._before_block)
          +             pass
        library: an optimizer may have two loops
          - if any(loop._optimizer is optimizer for loop in _LOOPS_OPEN):
          + if False:
        library: steps after the end are not refused
          -         if was_open:
          +         if False:
        library: the first loop's refusal blocks a second loop
          -             refusal.remove()
          +             pass
        library: closing an ended loop allows a second loop for the next one's optimizer
          - _LOOPS_OPEN.discard(self)
          + _LOOPS_OPEN.clear()
        library: a second loop warns about the first one's moments
          - if text is not None and not self._had_loop:
          + if text is not None:
        library: a refused end counts as an end
          -         self._begin(is_end=True)
          +         self._begin(is_end=True)
          +         self._is_finished = True
        library: ranks may end a round after different steps
          - if self.sync.schedule.syncs_all_blocks:
          + if False:
        library: no warning about a loop without an end
          - if loop.steps_done and not loop.is_synchronized:
          + if False:
        library: no warning that all steps were synchronous
          - and period.is_synchronous(self.steps_done):
          + and False:
    seen by distributed/test_uneven_loops.py
        library: a layer-wise synchronization begins although a rank has ended
          - if index == 0 and self._method.schedule.is_armed:
          + if False:
        library: a first local step begins although a rank has ended
          - if compares_rates or self._takes_first_anchor():
          + if compares_rates:
        library: learning rates are compared although a rank has ended
          - if compares_rates or self._takes_first_anchor():
          + if self._takes_first_anchor():
        library: a rank without a step ends before the others' first comparison
          -         self._begin(is_end=True)
          +         pass
        library: a loop without a step refuses other moments
          - averages_gradients=not is_end and
          + averages_gradients=
    seen by distributed/test_step_hooks.py
        library: a fused optimizer skips averaged gradients of a GradScaler
          - if getattr(optimizer, "found_inf", None) is not None and
          + if False and
    """,
    "llmtrain/sync/own_loop/gradients.py": r"""
    seen by distributed/test_local_updates.py
        a loop of one's own: a missing gradient counts as 1
          - parameter.grad = torch.zeros_like(parameter)
          + parameter.grad = torch.ones_like(parameter)
    seen by unit/test_buckets.py
        a loop of one's own: messages are as large as the model
          - size + gradient.nbytes > BUCKET_BYTES or
          + False or
        a loop of one's own: a message has gradients of several dtypes
          - or gradient.dtype != bucket[0].dtype):
          + or False):
    """,
    "llmtrain/sync/own_loop/loop_checks.py": r"""
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
        library: a timeout may be negative
          - and timeout_seconds > 0):
          + ):
    seen by distributed/test_loop_checks.py
        a loop of one's own: replicas with learning rates of their own apply CO2's means differently
          - if (rates != rates[0]).any():
          + if False:
        a loop of one's own: FSDP2 may average gradients over the replicas
          - if placement.is_replicate()]
          + if not placement]
        library: DataParallel is accepted
          - if isinstance(model, DataParallel):
          + if False:
        library: FSDP1 is accepted
          - if uses_fsdp1(model):
          + if False:
        library: an optimizer may wrap another one
          - if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
          + if False:
        library: a learning rate that never falls far enough is accepted
          - and warmup_of(sync, lr) >= lr.total_steps:
          + and False:
        library: any GPU counts as the current one
          - if device.type == "cuda" and device.index !=
          + if device.type == "gpu" and device.index !=
    seen by unit/test_lr.py
        library: only the first parameter group's learning rate counts
          - for group in groups):
          + for group in groups[:1]):
        library: learning rates of the warm-up are compared, too
          - if step <= lr_schedule.warmup_steps:
          + if step < 1:
    """,
    "llmtrain/sync/own_loop/module_replica.py": r"""
    seen by distributed/test_local_updates_state.py
        loops: parameters gathered by FSDP2 remain stale
          - release_gathered(self._model)
          -
          -     def moments
          + pass
          +
          +     def moments
        loops: the root keeps its gathered copy of a layer's block
          - release_gathered(self._model)
          -
          -     def moments
          + release_gathered(dict(zip([b.name for b in self.blocks], self._modules, strict=True))[block.name])
          +
          +     def moments
        library: frozen parameters that one replica has gathered are compared with shards
          - release_gathered(self._model)  #
          + pass  #
    seen by distributed/test_loop_checks.py
        library: a parameter may be frozen during the loop
          - if not all(parameter.requires_grad for parameter in self.parameters):
          + if False:
        library: parameters may be complex
          - if (complex_one := next((p for p in self.parameters if p.is_complex()), None)) is not None:
          + if (complex_one := None) is not None:
    seen by distributed/test_equal_replicas.py
        library: frozen parameters are not compared
          - if p not in self._synchronized and p not in trained]
          + if p.requires_grad and p not in self._synchronized and p not in trained]
    seen by distributed/test_step_hooks.py
        library: torch.compile traces a layer-wise synchronization
          - torch.compiler.disable(hook)
          + hook
    """,
    "llmtrain/sync/own_loop/step_hooks.py": r"""
    seen by distributed/test_step_hooks.py
        library: a step that calls its base class's counts twice
          - if not _is_inside(call, self._call):
          + if True:
        library: no step counts after one that has failed
          - if not _is_inside(call, self._call):
          + if self._call is None:
        library: torch.compile traces the communication of a step
          - torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
          + self._enter, self._leave
    """,
}
