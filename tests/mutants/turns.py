"""Mistakes in replicas that share a process."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TURNS = ("tests/unit/test_turns.py",)
IN_PROCESS = ("tests/distributed/test_in_process.py",)
CLOCK = ("tests/distributed/test_virtual_clock.py",)

MUTANTS = [
    Mutant(
        "turns: all threads draw from one generator",
        "llmtrain/turns.py",
        "torch.set_rng_state(self._generators[0])",
        "self._generators[0].clone()",
        (*TURNS, *IN_PROCESS),
    ),
    Mutant(
        "turns: two threads run at once",
        "llmtrain/turns.py",
        "(self._holder is None and self._queue[0] == number)",
        "self._queue[0] == number",
        TURNS,
    ),
    Mutant(
        "turns: timers count what others do",
        "llmtrain/turns.py",
        "for _, end in reversed(self.timers):",
        "for _, end in reversed(self.timers[:0]):",
        TURNS,
    ),
    Mutant(
        "turns: a wait ends although somebody works",
        "llmtrain/turns.py",
        "return 0.0 if self._holder is not None else",
        "return",
        TURNS,
    ),
    Mutant(
        "turns: a failure is the others' error, not the first one",
        "llmtrain/turns.py",
        "raise self._errors[0]",
        "raise self._errors[-1]",
        (*TURNS, *IN_PROCESS),
    ),
    Mutant(
        "turns: a step lasts while others run",
        "llmtrain/turns.py",
        "return time.monotonic() - (0.0 if turn is None else turn.away_seconds)",
        "return time.monotonic()",
        TURNS,
    ),
    Mutant(
        "in process: a sum is the first replica's alone",
        "llmtrain/parallel/in_process.py",
        "part.copy_(total)",
        "part.copy_(part)",
        IN_PROCESS,
    ),
    Mutant(
        "in process: chunks go to the wrong replica",
        "llmtrain/parallel/in_process.py",
        "sent.chunk(len(parts))[rank]",
        "sent.chunk(len(parts))[-1 - rank]",
        IN_PROCESS,
    ),
    Mutant(
        "in process: replicas may begin different collectives",
        "llmtrain/parallel/in_process.py",
        "if call.signature != signature:",
        "if not call.signature:",
        IN_PROCESS,
    ),
    Mutant(
        "in process: a message is counted twice",
        "llmtrain/parallel/in_process.py",
        "self.traffic.bytes += sent",
        "self.traffic.bytes += 2 * sent",
        IN_PROCESS,
    ),
    Mutant(
        "in process: a checkpoint has the first replica's tensors only",
        "llmtrain/train/checkpoint_files.py",
        "ChainMap(*of_ranks)",
        "ChainMap(*of_ranks[:1])",
        ("tests/end_to_end/test_in_process.py",),
    ),
    Mutant(
        "in process: the rate is that of as many devices",
        "llmtrain/train/metric_gather.py",
        "step_seconds.sum() if self._in_turns else",
        "step_seconds.max() if self._in_turns else",
        ("tests/unit/test_train_parts.py",),
    ),
    Mutant(
        "in process: a launch starts a process per replica",
        "llmtrain/launch/nodes.py",
        "if parallel.in_process:\n        return 1",
        "if parallel.in_process:\n        return parallel.replicas",
        ("tests/unit/test_launch.py",),
    ),
    Mutant(
        "in process: the weights are those of one replica",
        "llmtrain/plan/memory.py",
        "weights=in_turns * own.weights",
        "weights=own.weights",
        ("tests/unit/test_in_process_recipes.py",),
    ),
    Mutant(
        "virtual clock: steps of a tenth of a second are a little shorter",
        "llmtrain/parallel/virtual_clock.py",
        "math.ceil((steps",
        "math.floor((steps",
        CLOCK,
    ),
    Mutant(
        "virtual clock: every micro-batch takes the time of a step",
        "llmtrain/parallel/virtual_clock.py",
        "if step != self._last_step:",
        "if True:",
        CLOCK,
    ),
    Mutant(
        "virtual clock: a continued run's round is as long as the whole run before it",
        "llmtrain/parallel/virtual_clock.py",
        "self._started_at += now - self.now",
        "self._started_at += 0.0",
        ("tests/end_to_end/test_in_process.py",),
    ),
    Mutant(
        "in process: validation takes virtual time",
        "llmtrain/parallel/in_process.py",
        "other.clock = None",
        "other.clock = self.clock",
        CLOCK,
    ),
    Mutant(
        "in process: a message arrives when the first replica has sent it",
        "llmtrain/parallel/in_process.py",
        "call.time = max(call.time, time)",
        "call.time = min(call.time or time, time)",
        CLOCK,
    ),
    Mutant(
        "in process: who arrives together with the first is late",
        "llmtrain/sync/memory_averager.py",
        "arrivals[1][1] <= start",
        "arrivals[1][1] < start",
        CLOCK,
    ),
    Mutant(
        "in process: the members of a group change one sum",
        "llmtrain/sync/memory_averager.py",
        "[copy_of(part, own) for part, own in zip(total, newest, strict=True)]",
        "list(total)",
        CLOCK,
    ),
    Mutant(
        "in process: the host waits for averages on their way to the GPU",
        "llmtrain/sync/memory_averager.py",
        "copy_of(part, own) for",
        "part.clone() for",
        CLOCK,
    ),
    Mutant(
        "in process: messages that nobody needs any more are kept",
        "llmtrain/sync/memory_averager.py",
        "if iteration < version]",
        "if iteration < version - 100]",
        CLOCK,
    ),
]
