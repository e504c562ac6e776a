"""Synchronization in your own training loop: `LocalUpdates` hooks into the optimizer's steps (docs/library.md)."""

from __future__ import annotations

import atexit
import inspect
import itertools
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from llmtrain.config import LRScheduleSection, SyncSection
from llmtrain.config.section import UNION_KEYS, Section, expand_sync, merge
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.sharded import release_gathered
from llmtrain.recipe_messages import Overlay, closest, explain, one_of
from llmtrain.sync.build_method import build_method, build_wire
from llmtrain.sync.compatibility import find_conflict, kinds_of
from llmtrain.sync.methods import METHODS
from llmtrain.sync.own_loop.equal_replicas import LoopStart, check_equal_end, check_equal_start, check_equal_steps
from llmtrain.sync.own_loop.gradients import average_gradients
from llmtrain.sync.own_loop.loop_checks import (
    check_choices,
    check_current_device,
    check_equal_rates,
    check_rank_order,
    check_types,
    check_wrapping,
    find_rate_mismatch,
    follows_rates,
    needs_equal_rates,
    rate_of,
)
from llmtrain.sync.own_loop.module_replica import ModuleReplica, layers_of
from llmtrain.sync.own_loop.step_hooks import StepHooks
from llmtrain.sync.sync_stats import SyncStats

ENDLESS = 2**62
"""Number of total steps of a loop of unknown length."""
_LOOPS = itertools.count()
"""Numbers for the loops of this process that use a store. Ranks agree on them, because all ranks create the same loops."""
_LOOPS_OPEN: WeakSet[LocalUpdates] = WeakSet()
"""Loops whose hooks act on an optimizer's steps."""
_REFUSALS: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle | StepHooks | None] = WeakKeyDictionary()
"""Optimizers that have had a loop, each with the hook that refuses further steps once its loop has finished; None until then."""


class LocalUpdates:
    """Local-update synchronization of a module between replicas, driven by its optimizer's steps.

    Construct it on every rank before the first step, train as before, and call `finish` at the end. All replicas must
    start with the same parameters, which the first step checks. Every optimizer step counts as one step. In synchronous
    steps, gradients are averaged over the replicas just before the optimizer uses them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: str = "diloco",
        *,
        replicas: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
        layers: Sequence[nn.Module] | None = None,
        lr: LRSchedule | None = None,
        store: dist.Store | None = None,
        timeout_seconds: float = 600,
        **choices: Any,
    ):
        """Set up `method` with its preset, changed by `choices`: keys of a recipe's `sync` section, such as
        `period={"every": 50}` or `wire="int8"`.

        `replicas` is the process group of the ranks with the same shard, one per replica (default: all ranks, for unsharded
        replicas). `shards` is the group of this replica's ranks, if FSDP2 has sharded the module. `layers` are the modules that are
        synchronized one by one (default: the elements of the longest ModuleList or Sequential). Choices that depend on the learning
        rate need its schedule, `lr`. A warning appears once if the optimizer's learning rate differs from the schedule. The
        wait-avoiding schedule needs `store`. Its waits end after `timeout_seconds`; waits in the groups end after the groups' own
        timeouts. Raises RecipeError for choices that cannot be combined, that such a loop cannot support, or that lack an argument.
        """
        check_types(model, optimizer, {"replicas": replicas, "shards": shards}, layers, lr, timeout_seconds)
        if any(loop._optimizer is optimizer for loop in _LOOPS_OPEN):
            raise RecipeError(
                "the optimizer has a LocalUpdates already, and two would synchronize twice; call its finish or close first"
            )
        self.sync = _section(method, choices)
        release_gathered(model)  # after an evaluation, FSDP2 holds gathered parameters instead of the optimizer's
        parameters = list(model.parameters())
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        check_choices(self.sync, sharded, replicas, shards, lr, store)
        check_wrapping(model, replicas)
        self.replica = ModuleReplica(model, layers_of(model) if layers is None else layers, optimizer)
        device = self.replica.blocks[0].shards[0].device
        check_current_device(device)
        self.sync.schedule.check(self.sync, len(self.replica.blocks))
        self._replicas = Comms(dist.group.WORLD if replicas is None else replicas, device, "replica")
        self._shards = Comms(shards, device, "shard")
        if store is not None and self.sync.schedule.needs_threads:
            # Each loop has its own keys, because several loops may use one store, one after another.
            check_rank_order(self._replicas, self._shards)
            store = dist.PrefixStore(f"llmtrain/loop{next(_LOOPS)}", store)
        lr_schedule = lr or LRSchedule(rate_of(optimizer), ENDLESS, LRScheduleSection(kind="constant"))
        self._followed = lr if follows_rates(self.sync) else None
        """Schedule with which the optimizer's learning rate is compared until they differ; None if no choice follows the rate."""
        self._gradient_wire = build_wire(self.sync.wire) if self.sync.wire.gradients else None
        self._method = build_method(
            self.sync,
            self.replica,
            self._replicas,
            self._shards,
            lr_schedule,
            seed=0,
            store=store,
            timeout_seconds=timeout_seconds,
        )
        if self.sync.schedule.syncs_in_forward:
            # This hook runs before the schedule's hook, whose messages need replicas that have passed the first step's checks.
            self.replica.register_block_hook(self._before_block)
        self.steps_done = 0
        """Optimizer steps so far."""
        blocks = [block.name for block in self.replica.blocks]
        self._choices = f"{self.sync.model_dump(exclude={'offload'})} {lr} {blocks}"
        """Text that must be equal on all ranks (`LoopStart.choices`)."""
        self._optimizer, self._had_loop = optimizer, optimizer in _REFUSALS
        self._has_begun = self._is_finished = False
        self._saved: list[int] | None = None
        """Fingerprint of the parameters with which the loaded state was saved; None if no state was loaded."""
        self._handles: list[RemovableHandle | StepHooks] = [StepHooks(optimizer, self._before_step, self._after_step)]
        if (refusal := _REFUSALS.get(optimizer)) is not None:
            refusal.remove()
        _REFUSALS[optimizer] = None
        _LOOPS_OPEN.add(self)
        self._warn_of_low_precision()

    def finish(self) -> None:
        """Complete a last, shorter round and remove all hooks. Afterwards, all replicas are equal, and further steps of the
        optimizer are refused until `close` is called or a new `LocalUpdates` is constructed. Further calls of `finish` do nothing.
        Raises TrainingError, on every rank, if ranks have taken different numbers of steps, or if replicas differ at the end."""
        if self._is_finished:
            return
        self._begin(is_end=True)
        check_equal_steps(self._replicas, self.steps_done)
        self.replica.check_storage()
        with torch.no_grad():
            self._method.finish()
        self._is_finished = True
        was_open = self in _LOOPS_OPEN
        self.close()
        if was_open:
            self._handles = [self._optimizer.register_step_pre_hook(_refuse_step)]
            _REFUSALS[self._optimizer] = self._handles[0]
        elsewhere = {parameter for loop in _LOOPS_OPEN for parameter in loop.replica.parameters}
        text = check_equal_end(self._replicas, self._shards, self.replica, elsewhere)
        if text is not None:
            self._warn(text)
        period = self._method.period
        if self.steps_done and not self.sync.period.averages_gradients and period.is_synchronous(self.steps_done):
            self._warn(
                f"all steps averaged gradients, because {self.sync.method} begins with {period.warmup} such steps; give fewer "
                "warmup_steps, or 0"
            )

    def close(self) -> None:
        """Remove all hooks and stop background work without synchronizing. Also for use after a failure."""
        for handle in self._handles:
            handle.remove()
        _LOOPS_OPEN.discard(self)
        self.replica.remove_block_hooks()
        self._method.close()

    @property
    def is_synchronized(self) -> bool:
        """True if all replicas hold the same parameters and nothing is in flight."""
        return self._method.is_synchronized

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent to other replicas."""
        return self._replicas.traffic.bytes

    def report(self) -> SyncStats:
        """Return the counters so far: rounds, anomalies, seconds. Its squared norms stay tensors on the device, because a number
        would make every call wait for it."""
        return self._method.stats

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: plain values, and lists of flat tensors by block, which may share memory with the live
        state. Waits for messages in flight, so all ranks must call it at the same step. The module's and the optimizer's states are
        not included."""
        tensors = {**self._method.shared_state(), **self._method.per_replica_state()}
        return {
            "step": self.steps_done,
            "method": self._method.state_dict(),
            "tensors": tensors,
            "traffic": self._replicas.traffic.state_dict(),
            "layout": self._layout(),
            "parameters": self.replica.fingerprint().tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of this rank, between steps. The caller restores the module and the optimizer. A collective
        of all ranks if the replicas' exchange of a reduction's weights was in flight when the state was saved. Raises RecipeError if
        the state does not fit this loop."""
        if "layout" not in state:
            raise RecipeError("the state is not one of LocalUpdates.state_dict(): it has no layout")
        for what, here in self._layout().items():
            there = state["layout"][what]
            if there != here:
                raise RecipeError(f"the state is of another loop: {what} is {there} there, and {here} here")
        self._has_begun, self._saved = False, state["parameters"]
        self.steps_done = state["step"]
        self._method.load_state_dict(state["method"], state["tensors"])
        self._method.keep_warmup(self.steps_done)
        self._replicas.traffic.load(**state["traffic"])

    def _layout(self) -> dict[str, Any]:
        """Return the values that must be equal in the loop that saves a state and the loop that loads it."""
        blocks = self.replica.blocks
        return {
            "method": self.sync.method,
            **kinds_of(self.sync),
            "schedule": self.sync.schedule.model_dump(mode="json"),
            "replicas": self._replicas.size,
            "shards": self._shards.size,
            "blocks": [block.name for block in blocks],
            "values": [sum(shard.numel() for shard in block.shards) for block in blocks],
        }

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self.replica.check_parameters()
        self._begin()
        self.steps_done += 1
        rate = rate_of(optimizer)
        if self._followed is not None:
            text = find_rate_mismatch(self._followed, self.steps_done, optimizer)
            if text is not None:
                self._followed = None
                self._warn(text)
        is_power_of_2 = self.steps_done & (self.steps_done - 1) == 0  # not in every step, because it costs a message
        compares_rates = is_power_of_2 and needs_equal_rates(self.sync)
        if compares_rates or self._takes_first_anchor():
            self._check_begun_step(self.steps_done)
        if compares_rates:
            check_equal_rates(self._replicas, self.steps_done, rate)
        with torch.no_grad():
            plan = self._method.begin_step(self.steps_done, rate)
            if plan.phase != "local":
                # The first of torch's arguments is the optimizer itself.
                has_closure = any(argument is not None for argument in (*arguments[1:], named.get("closure")))
                if has_closure and self._replicas.size > 1:
                    raise RecipeError(
                        f"step {self.steps_done} averages gradients over the replicas, but optimizer.step(closure) computes them "
                        "afterwards; compute them before, and call step() without a closure"
                    )
                if getattr(optimizer, "found_inf", None) is not None and self._replicas.size > 1:
                    raise RecipeError(
                        f"step {self.steps_done} averages gradients over the replicas, but GradScaler leaves scaled gradients to a "
                        "fused optimizer, which would skip the step too late; use fused=False, bf16, or warmup_steps=0"
                    )
                average_gradients(self._replicas, self.replica.parameters, self.steps_done, self._gradient_wire)

    def _before_block(self, index: int) -> None:
        """Make the comparisons that must precede the messages of the schedule's hook, before a block's training forward."""
        self._begin()
        if index == 0 and self._method.schedule.is_armed:
            self._check_begun_step(self.steps_done + 1)

    def _takes_first_anchor(self) -> bool:
        """Return whether the replicas compare their first anchors in the step that has begun."""
        anchors = self._method.block_sync.anchors
        return anchors is not None and not anchors.is_set and not self._method.period.is_synchronous(self.steps_done)

    def _check_begun_step(self, step: int) -> None:
        """Raise TrainingError, on all replicas, if another replica is not in step `step`, because it has finished."""
        check_equal_steps(self._replicas.with_own_traffic(), step)

    def _begin(self, is_end: bool = False) -> None:
        """Raise RecipeError, on every rank, if the replicas differ where they must be equal before the first step after construction
        or `load_state_dict`, or before an end without a step. Do nothing afterwards."""
        if self._has_begun:
            return
        self.replica.check_storage()
        start = LoopStart(
            steps=self.steps_done,
            choices=self._choices,
            anchors=int(self._method.fingerprint()),
            is_different_module=self._saved not in (None, self.replica.fingerprint().tolist()),
            is_synchronized=self._method.is_synchronized,
            averages_gradients=not is_end and self._method.period.is_synchronous(self.steps_done + 1),
        )
        text = check_equal_start(self._replicas, self._shards, self.replica, start)
        self._has_begun = True
        if text is not None and not self._had_loop:  # an earlier loop leaves different moments
            self._warn(text)

    def _after_step(self) -> None:
        if self._method.period.ends_round(self.steps_done):
            self.replica.check_storage()
            if self.sync.schedule.syncs_all_blocks:  # other schedules would wait here for messages in flight
                check_equal_steps(self._replicas, self.steps_done)
        with torch.no_grad():
            self._method.end_step(self.steps_done)
        for text in self._method.take_warnings():
            self._warn(text)

    def _warn_of_low_precision(self) -> None:
        dtypes = {shard.dtype for block in self.replica.blocks for shard in block.shards}
        if low := dtypes & {torch.bfloat16, torch.float16}:
            kind = str(low.pop()).removeprefix("torch.")
            self._warn(
                f"parameters and anchors are in {kind}, which is too coarse for small outer steps; keep parameters in fp32, and "
                "compute in bf16 with autocast"
            )

    def _warn(self, text: str) -> None:
        """Issue a warning about this step, if this is the first replica."""
        if self._replicas.rank == 0:
            warnings.warn(f"step {self.steps_done}: {text}", stacklevel=3)


@atexit.register
def warn_of_unfinished() -> None:
    """Warn of loops that were not finished, at the end of a process that has not failed."""
    if hasattr(sys, "last_value"):  # set if an uncaught error ends the process
        return
    for loop in list(_LOOPS_OPEN):
        if loop.steps_done and not loop.is_synchronized:
            loop._warn("the process ends without LocalUpdates.finish(), so the replicas differ by a part of a round")


def _refuse_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    raise RecipeError(
        "LocalUpdates has finished, and after a further step replicas would differ; construct it anew, or call its close() to let each "
        "replica train alone"
    )


class _Choices(Section):
    """Recipe with a `sync` section only, so that messages name complete keys."""

    sync: SyncSection


def _section(method: str, choices: dict[str, Any]) -> SyncSection:
    """Return a method's preset, changed by `choices`. A mapping of the same kind as in the preset changes only the keys that it names.
    Raises RecipeError for a choice that is unknown, invalid or in conflict with another."""
    if not isinstance(method, str) or method not in METHODS:
        near = closest(str(method), METHODS)
        hint = f"; did you mean {near}?" if near else ""
        raise RecipeError(f"method is {method!r}, expected {one_of(METHODS)}{hint}")
    arguments = [
        name for name, one in inspect.signature(LocalUpdates).parameters.items() if one.kind == one.KEYWORD_ONLY
    ]
    keys = [key for key in SyncSection.model_fields if key not in ("method", "verify_every")]
    for name in choices:
        if name == "verify_every":
            raise RecipeError("verify_every is done at log lines of llmtrain's own loop; leave it out")
        if name not in keys:
            near = closest(name, [*keys, *arguments])
            hint = f"did you mean {near}?" if near else f"keys are {one_of(keys)}"
            raise RecipeError(f"LocalUpdates: {name} is neither an argument nor a key of sync; {hint}")
    changed = merge(expand_sync(METHODS[method].PRESET), expand_sync(choices), UNION_KEYS)
    data = {"sync": {"method": method, **changed}}
    try:
        section = _Choices.model_validate(data).sync
    except ValidationError as error:
        raise RecipeError(explain(error, [Overlay("LocalUpdates", data)], data)) from None
    if (reason := find_conflict(section)) is not None:
        raise RecipeError(reason)
    return section
