"""Tests of a trial of a comparison: faults of its hosts at their times, restarts, limits, and how it ends."""

from __future__ import annotations

import errno
import itertools
import json
import math
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from llmtrain.compare import trial
from llmtrain.compare.cluster.processes import CommandError
from llmtrain.compare.comparison import ConditionSection, load_comparison, trials
from llmtrain.errors import ResultsError


class RecordingHost:
    """Host that records how it is signaled."""

    def __init__(self, number: int, done: list[str]) -> None:
        self.number, self._done = number, done

    def pause(self) -> None:
        self._done.append(f"pause {self.number}")

    def resume(self) -> None:
        self._done.append(f"resume {self.number}")

    def kill(self) -> None:
        self._done.append(f"kill {self.number}")


def test_hosts_stop_go_on_and_die_at_their_times() -> None:
    done: list[str] = []
    condition = ConditionSection.model_validate(
        {"pauses": [{"host": 0, "at": 4.0, "seconds": 3.0}], "kills": [{"host": 1, "at": 5.0}]}
    )
    events = trial.host_events(condition, [RecordingHost(number, done) for number in range(2)])
    for _, happen in events:
        happen()
    times = [seconds for seconds, _ in events]
    assert dict(zip(times, done, strict=True)) == {4.0: "pause 0", 5.0: "kill 1", 7.0: "resume 0"}
    assert times == sorted(times)


class Torchrun:
    """A torchrun process that ends with `code` at the time `ends_at`, unless it is killed or asked to stop before."""

    def __init__(self, ends_at: float, code: int = 0) -> None:
        self.ends_at, self.code, self.now = ends_at, code, 0.0
        self.returncode: int | None = None
        self.on_signal: Callable[[], int] | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self.now >= self.ends_at:
            self.returncode = self.code
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM and self.on_signal is not None
        self.returncode = self.on_signal()


class ScriptedHost:
    """Host whose starts return the given torchruns in turn. Each start prints a line of the host, and then one of torch."""

    says = "waits"
    interface = "lo"
    address = "127.0.0.1"

    def __init__(self, number: int, *torchruns: Torchrun) -> None:
        self.name, self.torchruns = f"host{number}", torchruns
        self.commands: list[Sequence[str]] = []
        self.done: list[str] = []

    def popen(self, command: Sequence[str], env: Mapping[str, str], stdout: IO[str], stderr: int) -> Torchrun:
        stdout.write(f"{self.name} {self.says}\ntorch/distributed/elastic says more\n")
        self.commands.append(command)
        return self.torchruns[len(self.commands) - 1]

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")

    def kill(self) -> None:
        self.done.append("kill")
        for torchrun in self.torchruns[: len(self.commands)]:
            torchrun.returncode = torchrun.poll() if torchrun.poll() is not None else -signal.SIGKILL

    def sent(self) -> None:
        pass

    received = sent


STOP_NOTICE = (
    "W1130 02:52:52.782000 27987 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal\n"
)
REPORT = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/site-packages/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 1 (pid: 28100)
============================================================
"""


def begin(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., trial.TrialRecord]:
    """Provide a function that makes a trial of the run `plain` or `elastic`. There is no git, and time passes only while
    the trial sleeps. After each sleep, `look` is called with the trial's folder.
    """
    file = tmp_path / "small.yaml"
    elastic = "{replicas: 1, restarts: [{after_step: 60, replicas: 2}]}"
    text = f"recipe: none.yaml\nout_dir: {tmp_path}\nhosts: {{count: 2}}\n"
    recipe = SimpleNamespace(run=SimpleNamespace(timeout_seconds=10.0), train=SimpleNamespace(global_batch=32))
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(
        run: str,
        *hosts: ScriptedHost,
        look: Callable[[Path], None] = lambda folder: None,
        faults: str = "",
        keys: str = "",
    ) -> trial.TrialRecord:
        runs = {"plain": "", "elastic": elastic}
        file.write_text(f"{text}{keys}runs: {{{run}: {runs[run]}}}\nconditions: {{only: {{{faults}}}}}")
        comparison = load_comparison(file)
        (planned,) = [one for one in trials(comparison, file) if one.run == run]
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds
            for torchrun in (torchrun for host in hosts for torchrun in host.torchruns):
                torchrun.now = now[0]
            look(planned.directory)

        monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        return trial.TrialRun(planned, comparison, recipe, hosts, 29500, "as on paper", lambda step: None).run()

    return make


@pytest.mark.parametrize(
    ("second", "codes", "said"),
    [
        (Torchrun(math.inf), [-signal.SIGKILL] * 2, "host0 waits"),
        (Torchrun(5.0, code=1), [-signal.SIGKILL, 1], "host1 waits"),
    ],
    ids=["nobody begins", "one fails"],
)
def test_ranks_that_wait_for_ever_are_killed(
    made: Callable[..., trial.TrialRecord], second: Torchrun, codes: list[int], said: str
) -> None:
    record = made("plain", ScriptedHost(0, Torchrun(math.inf)), ScriptedHost(1, second))
    assert (record.state, record.exit_codes, record.last_lines) == ("failed", codes, [said])
    assert record.wall_seconds == pytest.approx(310, abs=0.5), "10 s from the recipe, and 300 s for the start"


def test_ranks_that_begin_after_another_host_has_failed_are_killed_too(made: Callable[..., trial.TrialRecord]) -> None:
    def look(folder: Path) -> None:
        if hosts[0].torchruns[0].now > 8:
            (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    hosts = ScriptedHost(0, Torchrun(math.inf)), ScriptedHost(1, Torchrun(5.0, code=1))
    record = made("plain", *hosts, look=look)
    assert (record.state, record.exit_codes) == ("failed", [-signal.SIGKILL, 1])
    assert record.wall_seconds == pytest.approx(5 + 310, abs=0.5)


def test_a_run_that_is_over_before_its_restart_has_failed(made: Callable[..., trial.TrialRecord]) -> None:
    hosts = ScriptedHost(0, Torchrun(1.0)), ScriptedHost(1)
    record = made("elastic", *hosts)
    assert (record.state, record.exit_codes) == ("failed", [0])
    assert record.last_lines == ["the run ended before it was stopped for its restart after step 60; train more steps"]
    assert not hosts[1].commands


def test_a_run_is_stopped_at_a_step_and_goes_on_with_more_hosts(made: Callable[..., trial.TrialRecord]) -> None:
    first, folders = Torchrun(math.inf), []

    def look(folder: Path) -> None:
        step = 20 * len(folders)
        folders.append(folder)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")

    def stop() -> int:
        assert len(folders) == 4, "stopped at step 60"
        (folders[0] / "summary.json").write_text('{"stopped": "signal"}')
        return 3

    first.on_signal = stop
    hosts = ScriptedHost(0, first, Torchrun(9.0)), ScriptedHost(1, Torchrun(9.0))
    record = made("elastic", *hosts, look=look)
    assert (record.state, record.exit_codes, record.last_lines, record.global_batch) == ("done", [0, 0], [], 32)
    starts = [[word for word in command if word.startswith("parallel.replicas=")][-1] for command in hosts[0].commands]
    assert starts == ["parallel.replicas=1", "parallel.replicas=2"] and len(hosts[1].commands) == 1


def test_the_limit_of_a_trial_holds_for_all_its_parts_together(made: Callable[..., trial.TrialRecord]) -> None:
    first, second, folders = Torchrun(math.inf), Torchrun(math.inf), []

    def look(folder: Path) -> None:
        folders.append(folder)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": len(folders)}) + "\n")

    def stop() -> int:
        (folders[0] / "summary.json").write_text('{"stopped": "signal"}')
        return 3

    first.on_signal = second.on_signal = stop
    hosts = ScriptedHost(0, first, second), ScriptedHost(1, Torchrun(math.inf))
    hosts[1].torchruns[0].on_signal = stop
    record = made("elastic", *hosts, look=look, keys="stop_after_minutes: 0.3\n")
    assert record.state == "stopped"
    assert record.wall_seconds == pytest.approx(18, abs=1), "60 steps took 12 s, which leaves 6 s after the restart"


@pytest.mark.parametrize("fails_in", [1, 2], ids=["when it stops", "in the next stage"])
def test_the_reason_of_a_failure_after_a_stop_is_recorded(
    made: Callable[..., trial.TrialRecord], fails_in: int
) -> None:
    first, folders = Torchrun(math.inf), []

    def look(folder: Path) -> None:
        folders.append(folder)
        (folder / "metrics.jsonl").write_text('{"step": 60}\n')

    def stop() -> int:
        own = 'Traceback (most recent call last):\n  File "llmtrain/files.py"\nthe disk is full\n'
        with (folders[0] / "host0.log").open("a") as log:
            log.write(STOP_NOTICE + own * (fails_in == 1) + REPORT)
        hosts[0].says = "lacks a file"
        (folders[0] / "summary.json").write_text(json.dumps({"stopped": "signal" if fails_in == 2 else "error"}))
        return 1

    first.on_signal = stop
    hosts = ScriptedHost(0, first, Torchrun(9.0, code=1)), ScriptedHost(1, Torchrun(math.inf))
    record = made("elastic", *hosts, look=look)
    assert (record.state, len(hosts[1].commands)) == ("failed", fails_in - 1)
    own = ["Traceback (most recent call last):", '  File "llmtrain/files.py"', "the disk is full"]
    assert record.last_lines == (["host0 waits", *own] if fails_in == 1 else ["host0 lacks a file"])


@pytest.mark.parametrize("end", [math.inf, 5.1], ids=["all are stopped", "the others end earlier"])
def test_the_reason_is_that_of_the_host_with_an_error(made: Callable[..., trial.TrialRecord], end: float) -> None:
    hosts = ScriptedHost(0, Torchrun(end, code=1)), ScriptedHost(1, Torchrun(end + 0.2, code=1))
    hosts[1].says = "begins\nerror: the disk is full"
    for host in hosts:
        host.torchruns[0].on_signal = lambda: 1
    record = made("plain", *hosts, look=begin, keys="stop_after_minutes: 0.2\n")
    assert (record.state, record.last_lines) == ("failed", ["host1 begins", "error: the disk is full"])


def test_hosts_stop_and_die_so_many_seconds_after_training_began(
    made: Callable[..., trial.TrialRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "POLL_SECONDS", 0.25)
    hosts, seen = [ScriptedHost(0, Torchrun(11.0)), ScriptedHost(1, Torchrun(math.inf))], []

    def look(folder: Path) -> None:
        seen.append([list(host.done) for host in hosts])
        if len(seen) == 5:  # training begins when this line is seen, after the fifth sleep
            (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    faults = "pauses: [{host: 0, at: 4, seconds: 3}, {host: 0, at: 9, seconds: 30}], kills: [{host: 1, at: 5.1}]"
    record = made("plain", *hosts, look=look, faults=faults)
    changes = [(sleep, done) for sleep, (before, done) in enumerate(itertools.pairwise(seen), 2) if done != before]
    assert [(sleep - 1 - 5) * 0.25 for sleep, _ in changes] == [4.0, 5.25, 7.0, 9.0]
    assert [done for _, done in changes] == [
        [["pause"], []],
        [["pause"], ["kill"]],
        [["pause", "resume"], ["kill"]],
        [["pause", "resume", "pause"], ["kill"]],
    ]
    assert hosts[0].done[3:] == ["resume", "resume"], "a host that is paused when the trial ends is resumed"
    assert (record.state, record.exit_codes, record.missed) == ("failed", [0, -signal.SIGKILL], [])


@pytest.mark.parametrize("also_kill", [False, True], ids=["the pause", "the kill of the hosts, too"])
def test_a_fault_that_fails_is_a_failed_trial(made: Callable[..., trial.TrialRecord], also_kill: bool) -> None:
    """The trial does not wait for processes that do not obey, and writes its record."""

    def fail() -> None:
        raise TimeoutError("processes of host0 have not obeyed")

    hosts = ScriptedHost(0, Torchrun(math.inf)), ScriptedHost(1, Torchrun(math.inf))
    hosts[0].pause = fail
    if also_kill:
        hosts[0].kill = fail
    record = made("plain", *hosts, look=begin, faults="pauses: [{host: 0, at: 4, seconds: 3}]")
    assert (record.state, record.missed) == ("failed", [])
    assert record.last_lines == ["processes of host0 have not obeyed"] * (1 + also_kill)
    assert record.exit_codes == [None if also_kill else -signal.SIGKILL, -signal.SIGKILL]


def test_faults_that_a_run_ended_before_are_in_its_record(made: Callable[..., trial.TrialRecord]) -> None:
    hosts = ScriptedHost(0, Torchrun(11.0)), ScriptedHost(1, Torchrun(11.0))
    faults = "pauses: [{host: 0, at: 4, seconds: 3}, {host: 0, at: 12.5, seconds: 1}], kills: [{host: 1, at: 20}]"
    record = made("plain", *hosts, look=begin, faults=faults)
    assert record.state == "done"
    assert record.missed == ["the pause of host 0 at 12.5 s", "the death of host 1 at 20 s"]


def test_the_load_of_other_programs_is_in_a_trials_record(
    made: Callable[..., trial.TrialRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is measured from before the first process starts until the last process has ended."""
    hosts = ScriptedHost(0, Torchrun(1.0)), ScriptedHost(1, Torchrun(1.0))
    seen: list[int] = []

    def since(start: str) -> float:
        seen.append(hosts[1].torchruns[0].returncode)
        return {"the start": 0.25}[start]

    monkeypatch.setattr(trial, "cpu_seconds", lambda: "the start" if not hosts[0].commands else "later")
    monkeypatch.setattr(trial, "other_load", since)
    assert made("plain", *hosts).other_load == 0.25 and seen == [0]


def test_a_trial_is_recorded_although_its_traffic_can_not_be_read(made: Callable[..., trial.TrialRecord]) -> None:
    hosts = ScriptedHost(0, Torchrun(1.0)), ScriptedHost(1, Torchrun(1.0))
    counts = iter((5, 7))

    def count() -> int:
        if (found := next(counts, None)) is None:
            raise CommandError("ip: did not end within 30 s")
        return found

    hosts[0].sent = hosts[0].received = count
    record = made("plain", *hosts)
    assert record.state == "done" and record.hosts[0] == {"name": "host0", "address": "127.0.0.1"}


@pytest.mark.parametrize(("does", "name"), [("mkdir", "seed-1234"), ("open", "host0.log")])
def test_a_full_disk_is_told_in_one_line(
    made: Callable[..., trial.TrialRecord], monkeypatch: pytest.MonkeyPatch, does: str, name: str
) -> None:
    original = getattr(Path, does)

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, does, full)
    with pytest.raises(ResultsError, match=rf"{name} can't be written \(.*No space left on device.*\); make room"):
        made("plain", ScriptedHost(0, Torchrun(1.0)), ScriptedHost(1, Torchrun(1.0)))


@pytest.mark.parametrize("git", [None, subprocess.TimeoutExpired("git", 10)], ids=["no git", "slow git"])
def test_a_trial_is_recorded_without_a_commit_too(
    made: Callable[..., trial.TrialRecord], monkeypatch: pytest.MonkeyPatch, git: Exception | None
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise git

    if git is not None:
        monkeypatch.setattr(subprocess, "run", run)
    record = made("plain", ScriptedHost(0, Torchrun(1.0)), ScriptedHost(1, Torchrun(1.0)))
    assert (record.state, record.commit) == ("done", None)


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        (None, -1),
        ('{"step": 4', -1),
        ('{"step": 0}\n', 0),
        ('{"step": 4}\n', 4),
        ('{"step": 4}\n{"step": 8', 4),
        ('{"step": 4}\n\n{"st\n', 4),
        ('{"long": "' + 9000 * "x" + '"}\n{"step": 4}\n', 4),
        (9000 * "x" + "\n", -1),
    ],
    ids=["none", "cut off", "the first", "one", "one and a half", "damaged", "after a long one", "nothing but damage"],
)
def test_the_step_of_a_run_is_that_of_its_last_whole_line(tmp_path: Path, metrics: str | None, step: int) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    assert trial.last_logged_step(tmp_path / "metrics.jsonl") == step
