"""CPU seconds of every test, counted over all processes that it uses, and the limits that keep `make test` short.

The limits are of CPU seconds instead of wall time, because a busy machine must not fail the tests. Seconds of children come from
wait4. Seconds of forked processes come from the mother, which waits for them. Tests outside the fast tier (deep, chaos, gpu) have
no limit. The setup of fixtures counts toward the total but toward no single test, because the first test that needs a fixture is
not the only one.

On a shared machine, the same tests have needed 1.4 times as many CPU seconds as half an hour before. Workers therefore time a
fixed loop every ten seconds, and limits are multiplied by the square of its slowdown relative to a quiet machine. The loop itself
shows half of the cost of busy neighbors: the same tests used 1,052 CPU seconds while it took 0.070 s, and 1,289 and 1,310 while it
took 0.080 s. Later ones used 730 on a quiet machine, and 1,825 while it took 0.093 s.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator

import psutil
import pytest

from tests import mother

SECONDS, LIMIT, LOOPS = "cpu_seconds", "cpu_limit", "loops"
LOOP_ROUNDS, LOOP_EVERY_SECONDS = 1_000_000, 10.0
"""Iterations of the fixed loop, and seconds between its timings."""
LOOP_SECONDS, MOST_SLOWNESS = 0.07, 2.0
"""Mean CPU seconds of the loop on a quiet machine, where limits hold as they are, and the largest factor by which limits are
multiplied. A test of more than 20 seconds is always over the default limit of 10."""
OTHER_TIERS = ("deep", "chaos", "gpu")
FRESH_LIMIT = 60.0
"""Limit of the few tests that start new interpreters on purpose: up to four, each of which imports for 5 to 11 seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget", "CPU seconds that fast tests may use")
    group.addoption("--cpu-limit-test", type=float, default=10.0, help="limit per test, without fixtures")
    group.addoption("--cpu-limit-all", type=float, default=1200.0, help="limit of all, with imports and collection")
    group.addoption("--cpu-shown", type=int, default=10, help="number of most expensive tests that are printed")


class Budget:
    """Plugin of pytest, which measures in each of xdist's workers and judges in their controller, or does both if there is only
    one process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: dict[str, tuple[float, float]] = {}
        """CPU seconds of each fast test, and its limit."""
        self.elsewhere = 0.0
        """CPU seconds of the workers, which report them when they end."""
        self.loops: list[float] = []
        """CPU seconds of every timing of the fixed loop, in this process and in the workers."""
        self._at_call, self._next_loop = 0.0, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.when == "setup":
            self._at_call = used()
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, (SECONDS, used() - self._at_call)]
            if not any(item.get_closest_marker(tier) for tier in OTHER_TIERS):
                limit = FRESH_LIMIT if item.get_closest_marker("fresh") else self.config.getoption("--cpu-limit-test")
                report.user_properties.append((LIMIT, limit))
            if time.monotonic() >= self._next_loop:
                self.loops.append(loop_seconds())
                self._next_loop = time.monotonic() + LOOP_EVERY_SECONDS
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if LIMIT in properties:
            self.tests[report.nodeid] = properties[SECONDS], properties[LIMIT]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})
        self.elsewhere += output.get(SECONDS, 0.0)
        self.loops += output.get(LOOPS, [])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput |= {SECONDS: used() + used_by_mothers(), LOOPS: self.loops}
        elif session.exitstatus == pytest.ExitCode.OK and self.excesses():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        terminalreporter.section(f"CPU seconds of {len(self.tests)} tests: {self._total():.0f}")
        if self.loops:
            mean = statistics.mean(self.loops)
            terminalreporter.line(f"a fixed loop took {mean:.3f} s, so limits are {self._slowness():.2f} times as long")
        shown = self.config.getoption("--cpu-shown")
        for name, (seconds, _) in sorted(self.tests.items(), key=lambda one: -one[1][0])[:shown]:
            terminalreporter.line(f"{seconds:6.1f} {name}")
        for excess in self.excesses():
            terminalreporter.line(f"ERROR: {excess}", red=True)

    def _total(self) -> float:
        has_workers = bool(self.config.getoption("numprocesses", None))
        here = _seconds(resource.RUSAGE_SELF) if has_workers else used()  # workers have reported theirs
        return here + used_by_mothers() + self.elsewhere

    def excesses(self) -> list[str]:
        """Return one line for each limit that is exceeded."""
        slowness = self._slowness()
        lines = [
            f"{name} uses {seconds:.1f} CPU seconds; a test outside `deep` may use {limit * slowness:.3g}"
            for name, (seconds, limit) in self.tests.items()
            if seconds > limit * slowness
        ]
        together = self.config.getoption("--cpu-limit-all") * slowness
        if self.tests and self._total() > together:
            lines.append(
                f"the tests use {self._total():.0f} CPU seconds; all outside `deep` together may use {together:.4g}"
            )
        return lines

    def _slowness(self) -> float:
        """Return the factor by which limits are multiplied: the squared slowdown of the loop, from 1 to MOST_SLOWNESS."""
        mean = statistics.mean(self.loops) if self.loops else LOOP_SECONDS
        return min(MOST_SLOWNESS, max(1.0, mean / LOOP_SECONDS) ** 2)


def loop_seconds() -> float:
    """Time the fixed loop, in CPU seconds."""
    began, total = time.process_time(), 0
    for number in range(LOOP_ROUNDS):
        total += number * number
    return time.process_time() - began


def used() -> float:
    """Return the CPU seconds of this process, of children that it has waited for, and of processes that mothers forked for it."""
    here = _seconds(resource.RUSAGE_SELF) + _seconds(resource.RUSAGE_CHILDREN)
    return here + sum(each.cpu_seconds() for each in mother.connections)


def _seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def used_by_mothers() -> float:
    """Return the CPU seconds of the mothers that this process has started. Their imports are charged to no test."""
    pids = [process.pid for process in mother.started.values()]
    times = [psutil.Process(pid).cpu_times() for pid in pids if psutil.pid_exists(pid)]
    return sum(time.user + time.system for time in times)
