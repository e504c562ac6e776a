"""Mistakes in runs that become longer, and in which checkpoint is the best."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LENGTH, LENGTHS = "tests/unit/test_run_length.py", "tests/distributed/test_run_length.py"
BEST, BESTS, MIRROR = (
    "tests/unit/test_best_checkpoint.py",
    "tests/distributed/test_best_checkpoint.py",
    "tests/unit/test_best_in_mirror.py",
)

MUTANTS = [
    Mutant(
        "length: local steps that have begun become synchronous again",
        "llmtrain/sync/method.py",
        'if "warmup" in state["period"]:',
        "if False:",
        (LENGTHS,),
    ),
    Mutant(
        "length: local steps begin before the step that is done",
        "llmtrain/sync/method.py",
        "self.period.set_warmup(max(self.period.warmup, step))",
        "pass",
        (LENGTHS,),
    ),
    Mutant(
        "length: rounds of seconds stay as short as at the end of the shorter run",
        "llmtrain/sync/timed_period.py",
        "self._interval, self._step_limit = self.section.every, self._last_exchange_step + left",
        "pass",
        ("tests/unit/test_period.py",),
    ),
    Mutant(
        "length: steps before a run's end count toward its next synchronization",
        "llmtrain/sync/timed_period.py",
        "        if is_synchronized:\n            self._summed_steps_at_sync",
        "        if False:\n            self._summed_steps_at_sync",
        ("tests/unit/test_period.py",),
    ),
    Mutant(
        "length: the method is not told of another length",
        "llmtrain/train/trainer.py",
        "            self.method.total_steps_changed(loaded.step)\n",
        "",
        (LENGTHS,),
    ),
    Mutant(
        "length: QSR's rounds begin after the warm-up of the new length",
        "llmtrain/sync/period.py",
        "self.warmup, self._ends = steps, [steps]",
        'self.warmup, self._ends = steps, getattr(self, "_ends", [steps])',
        ("tests/unit/test_period.py",),
    ),
    Mutant(
        "length: fewer steps than are done end the run at once",
        "llmtrain/train/run_length.py",
        "if not self.is_none and self.step >= total and not is_end:",
        "if False:",
        (LENGTH, LENGTHS),
    ),
    Mutant(
        "length: a stopped run may end within its round",
        "llmtrain/train/run_length.py",
        "is_end = self.step == total and self.before.train.total_steps <= self.step",
        "is_end = self.step == total",
        (LENGTH, LENGTHS),
    ),
    Mutant(
        "length: a jump of the rate is not said",
        "llmtrain/train/trainer.py",
        "if length is not None and (jump := length.rate_jump()):",
        "if False:",
        (LENGTHS,),
    ),
    Mutant(
        "length: a dry run does not say that the rate jumps",
        "llmtrain/launch/preflight.py",
        "warnings=[*warnings, *([jump] if jump else [])],",
        "warnings=warnings,",
        (LENGTHS,),
    ),
    Mutant(
        "length: the rate may be changed without the length",
        "llmtrain/train/run_dir.py",
        "with_length = () if there.train.total_steps == recipe.train.total_steps else KEYS_WITH_LENGTH",
        "with_length = KEYS_WITH_LENGTH",
        (LENGTHS,),
    ),
    Mutant(
        "length: a finished run without checkpoints begins anew",
        "llmtrain/train/run_dir.py",
        'is_lost = change is None and summary.get("stopped") == "done"',
        "is_lost = False",
        (LENGTHS,),
    ),
    Mutant(
        "length: data that has grown gets another order",
        "llmtrain/data/order.py",
        "sizes = [*sizes, now] if now > sizes[-1] else",
        "sizes = [now] if now > sizes[-1] else",
        ("tests/unit/test_data_loader.py",),
    ),
    Mutant(
        "length: every epoch has the samples added at its end",
        "llmtrain/data/order.py",
        "        if epoch:\n            return 0, self.num_samples\n",
        "",
        ("tests/unit/test_data_loader.py", "tests/unit/test_data_blocks.py"),
    ),
    Mutant(
        "best: a checkpoint has the loss of an earlier step",
        "llmtrain/best_checkpoint.py",
        "return found if is_own and",
        "return found if",
        (BEST, BESTS),
    ),
    Mutant(
        "best: a loss that is not finite counts",
        "llmtrain/best_checkpoint.py",
        "is_own and math.isfinite(found.loss)",
        "is_own",
        (BEST, BESTS),
    ),
    Mutant(
        "best: losses over other tokens count",
        "llmtrain/best_checkpoint.py",
        " if loss.tokens == tokens)",
        ")",
        (BEST,),
    ),
    Mutant(
        "best: the first of equal losses is the best",
        "llmtrain/best_checkpoint.py",
        "(loss.loss, -step, step)",
        "(loss.loss, step, step)",
        (BEST,),
    ),
    Mutant(
        "best: it is deleted with the others",
        "llmtrain/config/recipe.py",
        "if step != best and (",
        "if (",
        (BEST, BESTS, MIRROR),
    ),
    Mutant(
        "best: the mirror lacks one that was passed over",
        "llmtrain/train/mirror.py",
        "                self._copy_best(step)\n",
        "                pass\n",
        (MIRROR,),
    ),
    Mutant(
        "best: it is deleted while it is copied",
        "llmtrain/train/mirror.py",
        "return self.worker.pending_steps() | ({best} if best is not None else set())",
        "return self.worker.pending_steps()",
        (MIRROR,),
    ),
    Mutant(
        "best: the mirror knows the old loss of a checkpoint copied again",
        "llmtrain/train/mirror.py",
        "        self._losses.pop(step, None)\n",
        "",
        (MIRROR,),
    ),
    Mutant(
        "run: its mirror belongs to nobody",
        "llmtrain/train/run.py",
        "        mirror.claim(mesh)\n",
        "",
        ("tests/distributed/test_mirror.py",),
    ),
]
