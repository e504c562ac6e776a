"""What happens to hosts at given times of a trial: pauses and deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmtrain.compare.cluster import Host
from llmtrain.compare.comparison import ConditionSection


class FaultTimeline:
    """The pauses and deaths of a condition, in the order of their times."""

    def __init__(self, condition: ConditionSection, hosts: Sequence[Host]):
        planned: list[tuple[float, Callable[[], None]]] = []
        for pause in condition.pauses:
            planned += [(pause.at, hosts[pause.host].pause), (pause.at + pause.seconds, hosts[pause.host].resume)]
        planned += [(kill.at, hosts[kill.host].kill) for kill in condition.kills]
        self._paused = [hosts[pause.host] for pause in condition.pauses]
        self._planned = sorted(planned, key=lambda event: event[0])

    def advance(self, seconds: float) -> None:
        """So many seconds have passed since training began: carry out what is due."""
        while self._planned and self._planned[0][0] <= seconds:
            self._planned.pop(0)[1]()

    def end(self) -> None:
        """Nobody stays paused."""
        for host in self._paused:
            host.resume()
