"""Oracle of timed rounds (A-EDiT): fast replicas do more steps before they meet the others."""

from __future__ import annotations

from collections.abc import Callable

from tests.distributed.oracle import Oracle


class TimedOracle(Oracle):
    """Oracle of timed rounds. `seconds(replica, step)` is the duration of a step."""

    def __init__(self, *args, seconds: Callable[[int, int], float], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = seconds

    def run(self) -> None:
        period, wanted = self.sync.period, len(self.replicas) * self.rates.total_steps
        for step in range(1, min(self.warmup, self.rates.total_steps) + 1):
            self.train_together(step)
            for replica in self.replicas:
                self.agreed[replica].append((step, step))
        done = [len(seen) for seen in self.seen]
        synchronized, length = sum(done), period.every
        limit = [self.rates.total_steps for _ in self.replicas]
        while sum(done) < wanted:
            before, began, longest = sum(done), list(done), 0.0
            for replica in self.replicas:
                elapsed = 0.0
                while True:
                    done[replica] += 1
                    self.train_alone(replica, done[replica])
                    elapsed += self.seconds(replica, done[replica])
                    if elapsed >= length or done[replica] >= limit[replica]:
                        break
                longest = max(longest, elapsed)
            total = sum(done)
            if total - synchronized >= period.min_steps:
                self.synchronize()
                synchronized = total
                if self.sync.moments is not None:
                    self.average_moments()
            length = min(period.every, longest * (wanted - total) / (total - before))
            for replica in self.replicas:  # the replica's share of the remaining steps, rounded up
                share = max(0, wanted - total) * (done[replica] - began[replica])
                limit[replica] = done[replica] + -(-share // (total - before))
            for replica in self.replicas:
                self.agreed[replica].append((done[replica], total // len(self.replicas)))
        self.finish()
