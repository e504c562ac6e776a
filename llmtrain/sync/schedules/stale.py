"""CO2 (arXiv 2401.16265): the reduction of a round has the whole next round to arrive."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.config import Stale as StaleSection
from llmtrain.sync.round import Round
from llmtrain.sync.schedules.schedule import ByBlock, Schedule
from llmtrain.sync.synchroniser import Reduction, Synchroniser


class Stale(Schedule):
    """At a round's end a replica sends its pseudo-gradient, takes the outer step with the mean that was sent a round
    before, and starts the next round from that anchor. With `rounds: 0` the step waits for the mean just sent."""

    def __init__(self, synchroniser: Synchroniser, section: StaleSection):
        super().__init__(synchroniser)
        self.section = section
        self._round = Round()
        self._sent: Round | None = None
        self._under_way: list[Reduction] = []

    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        self._round = self._round.then(lr)
        if ends_round:
            with self.synchroniser.report.exposed():
                self._turn()

    def finish(self) -> None:
        with self.synchroniser.report.exposed():
            if self._round.steps > 0:
                self._turn()
            if self._sent is not None:
                self._use(self._under_way, self._sent, gap=1.0)
                self._sent, self._under_way = None, []

    @property
    def is_synchronised(self) -> bool:
        """Between a round's end and the next step all replicas are at the anchor, if nothing is under way."""
        return self._round.steps == 0 and self._sent is None

    def shared_tensors(self) -> dict[str, ByBlock]:
        """The means under way: used after a restart as they would have been."""
        return {"arriving": means(self._under_way)}

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._round.state(), "sent": self._sent.state() if self._sent is not None else None}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, ByBlock]) -> None:
        self._round = Round(**state["round"])
        self._sent = Round(**state["sent"]) if state["sent"] is not None else None
        arriving = tensors["arriving"] if self._sent is not None else []
        self._under_way = [self.synchroniser.arrived(i, mean) for i, mean in enumerate(arriving)]

    def _turn(self) -> None:
        means(self._under_way)  # before the next messages, which carry over what rounding left out of these
        visited, done = self.synchroniser.anchors.visit(self.synchroniser.blocks), self._round
        sent = [self.synchroniser.send(index) for index in visited]
        self.staleness = int(done.steps) * self.section.rounds
        if self.section.rounds == 0:
            self._use(sent, done, gap=1.0)
        else:
            if self._sent is not None:
                self._use(self._under_way, self._sent, self._gap(self._sent, done))
            else:
                self.synchroniser.return_to_anchor()  # nothing has arrived yet
            self._under_way, self._sent = sent, done
        self._round = Round()

    def _gap(self, sent: Round, now: Round) -> float:
        """The factor that a mean led to by other learning rates than the present ones is divided by."""
        return max(1.0, sent.lr_sum / now.lr_sum) if self.section.gap_penalty and now.lr_sum > 0 else 1.0

    def _use(self, reductions: list[Reduction], since: Round, gap: float) -> None:
        synchroniser, report = self.synchroniser, self.synchroniser.report
        mean_squared: torch.Tensor | float = 0.0
        arrived = means(reductions)
        for index in synchroniser.anchors.visit(synchroniser.blocks, momentum=True):
            mean_squared = mean_squared + arrived[index].square().sum()
            synchroniser.install(index, synchroniser.step(index, arrived[index].div_(gap), since))
        report.mean_squared, report.weights_max = mean_squared, 1 / synchroniser.replica.size
        report.count += 1


def means(reductions: list[Reduction]) -> list[torch.Tensor]:
    """Wait for all of them; the second exchanges of a rounding wire run side by side."""
    for reduction in reductions:
        reduction.proceed()
    return [reduction.wait() for reduction in reductions]
