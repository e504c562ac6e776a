"""Base class of the schedules that synchronize fragments, which send in turn and use their means some steps later."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmtrain.config import FragmentsSection
from llmtrain.reshard import require_equal
from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.local_steps import LocalSteps, mean_local_steps
from llmtrain.sync.message import Message, WeightedMessage
from llmtrain.sync.reductions.reduction import STATE_KEY
from llmtrain.sync.schedules.base import Schedule, ScheduleParts
from llmtrain.sync.weighing import Weighing


class FragmentSchedule(Schedule):
    """Synchronization of P fragments, each a list of blocks. A fragment's *turn* is the step at whose end its pseudo-gradient
    is taken. In every round of H steps, fragment p (from 0) has its turn after ceil((p + 1) H / P) steps."""

    def __init__(self, section: FragmentsSection, parts: ScheduleParts):
        super().__init__(section, parts)
        self.period, self.fragments = parts.period, section.blocks_of_fragments(len(self.block_sync.blocks))
        # Messages are weighed only if the reduction weights replicas or if replicas take different numbers of steps.
        weighs = parts.reduction is not None or parts.period.section.is_timed
        self.weighing = Weighing(self.block_sync, parts.reduction) if weighs else None
        self._local_steps = [LocalSteps()] * len(self.fragments)  # local steps since each fragment's last turn
        self._messages: list[Message | None] = [None] * len(self.fragments)

    def end_step(self, step: int, lr: float, ends_round: bool, tokens: float = 0) -> None:
        with self.block_sync.stats.time_exposed():
            self._local_steps = [local_steps.add_step(lr, tokens) for local_steps in self._local_steps]
            for fragment, message in enumerate(self._messages):
                if message is not None:
                    self._advance(fragment, message, step)
            for fragment in self._fragments_due(step, ends_round):
                self._take_turn(fragment)

    def forget_tokens(self) -> None:
        self._local_steps = [replace(local_steps, tokens=0) for local_steps in self._local_steps]

    def wait_for_messages(self) -> None:
        with self.block_sync.stats.time_exposed():
            for message in self._in_flight:
                message.wait()
        self.block_sync.wait_for_device()

    @abstractmethod
    def _advance(self, fragment: int, message: Message, step: int) -> None:
        """Carry out the work that is due at the end of step `step` for a fragment's message in flight."""

    @abstractmethod
    def _take_turn(self, fragment: int) -> None:
        """Take and send a fragment's pseudo-gradient, and if the schedule applies an earlier mean at the same time, apply it."""

    @property
    def is_synchronized(self) -> bool:
        """True if nothing is in flight and no replica has taken a step since any fragment's last turn."""
        idle = all(message is None for message in self._messages)
        return idle and not any(local_steps.steps for local_steps in self._local_steps)

    def shared_state(self) -> dict[str, BlockTensors]:
        """Return the means in flight, which a resumed run uses as an uninterrupted run would."""
        return {"arriving": self._by_block([message.means() for message in self._in_flight])}

    def per_replica_state(self) -> dict[str, BlockTensors]:
        """Return the pseudo-gradients that are not sent yet because their weights are not known. A resumed run weighs
        them again."""
        return {"unsent": self._by_block([message.unsent() for message in self._in_flight])} if self.weighing else {}

    def state_dict(self) -> dict[str, Any]:
        sent = [message.local_steps.state() if message is not None else None for message in self._messages]
        state: dict[str, Any] = {
            "local_steps": [local_steps.state() for local_steps in self._local_steps],
            "sent": sent,
        }
        if self.weighing is not None:
            reduction = self.weighing.reduction
            state[STATE_KEY] = reduction.state_dict() if reduction is not None else None
            state["restarts"] = sorted(index for message in self._in_flight for index in message.restarted_blocks)
            # As pairs, because JSON would turn the integer keys of a mapping into text.
            state["lengths"] = sorted(
                list(pair) for message in self._in_flight for pair in message.target_norms.items()
            )
        return state

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        """Load what `state_dict` returned. A collective of all ranks if a message still waits for its weights."""
        self._local_steps = [LocalSteps(**local_steps) for local_steps in state["local_steps"]]
        if self.weighing is not None and self.weighing.reduction is not None:
            self.weighing.reduction.load_state_dict(state[STATE_KEY])
        nothing: BlockTensors = [None] * len(self.block_sync.blocks)
        for fragment, sent in enumerate(state["sent"]):
            self._messages[fragment] = None
            if sent is not None:
                message = self._messages[fragment] = self._new_message(fragment, LocalSteps(**sent))
                blocks = self.fragments[fragment]
                restarted_blocks = [index for index in state.get("restarts", []) if index in blocks]
                target_norms = {index: norm for index, norm in state.get("lengths", []) if index in blocks}
                message.load(tensors["arriving"], tensors.get("unsent", nothing), restarted_blocks, target_norms)

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one state for all new replicas. Its rounds are the means of the old replicas' rounds, whose steps and tokens
        may differ. If an old replica was excluded from a block, every new replica restarts that block from the next anchor, because
        all new replicas start from a mean that includes the excluded parameters."""
        if self.weighing is None:
            return require_equal(states)
        shared = require_equal([state | {"local_steps": None, "sent": None, "restarts": None} for state in states])
        reduction = self.weighing.reduction
        # By fragment, each with the values of all old replicas.
        local_steps = zip(*(state["local_steps"] for state in states), strict=True)
        sent = zip(*(state["sent"] for state in states), strict=True)
        return shared | {
            "local_steps": [_mean_round(of_replicas) for of_replicas in local_steps],
            "sent": [None if None in of_replicas else _mean_round(of_replicas) for of_replicas in sent],
            "restarts": sorted({index for state in states for index in state["restarts"]}),
            STATE_KEY: reduction.resharded(shared[STATE_KEY]) if reduction is not None else None,
        }

    def _count_round(self, fragment: int) -> None:
        """Count a round when the mean of its last fragment has been applied."""
        if fragment == len(self.fragments) - 1:
            self.block_sync.complete_round()

    @property
    def _in_flight(self) -> list[Message]:
        return [message for message in self._messages if message is not None]

    def _by_block(self, tensors: list[dict]) -> BlockTensors:
        merged = {index: tensor for of_message in tensors for index, tensor in of_message.items()}
        return [merged.get(index) for index in self.block_sync.blocks]

    def _fragments_due(self, step: int, ends_round: bool) -> list[int]:
        """Return the fragments whose turn is at the end of `step`. The turn of the last fragment is the end of the round."""
        place, length = self.period.step_in_round(step), self.period.round_length(step)
        parts = len(self.fragments)
        within = [p for p in range(parts - 1) if place == math.ceil((p + 1) * length / parts)]
        return [*within, parts - 1] if ends_round else within

    def _new_message(self, fragment: int, local_steps: LocalSteps) -> Message:
        if self.weighing is None:
            return Message(self.block_sync, self.fragments[fragment], local_steps)
        return WeightedMessage(self.block_sync, self.fragments[fragment], local_steps, self.weighing)

    def _take_message(self, fragment: int) -> Message:
        """Return a message with a fragment's present pseudo-gradients, and count the fragment's local steps from 0 again."""
        local_steps, self._local_steps[fragment] = self._local_steps[fragment], LocalSteps()
        message = self._new_message(fragment, local_steps)
        message.take()
        return message


def _mean_round(of_replicas: Sequence[dict[str, float]]) -> dict[str, float]:
    return mean_local_steps([LocalSteps(**done) for done in of_replicas]).state()
