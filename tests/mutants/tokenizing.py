"""Mistakes in tokenizing by several processes, and in what is said of its progress."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = ("tests/unit/test_data_num_proc.py",)
PROGRESS = ("tests/unit/test_data_progress.py",)

MUTANTS = [
    Mutant(
        "num_proc: batches are taken as they are completed",
        "llmtrain/data/tokenizing.py",
        "        found = self._result(waiting[0])\n        waiting.popleft()\n",
        "        found = self._result(waiting[-1])\n        waiting.pop()\n",
        TESTS,
    ),
    Mutant(
        "num_proc: a split gets more than one process would give it",
        "llmtrain/data/extend.py",
        "parts = {split: part for split, part in tokenized.items() if split in missing}",
        "parts = tokenized",
        TESTS,
    ),
    Mutant(
        "num_proc: text that was read before an error is lost",
        "llmtrain/data/tokenizing.py",
        "        except DataError:  # of the source; text that was read before it is not lost\n            while waiting:\n",
        "        except DataError:\n            while False:\n",
        TESTS,
    ),
    Mutant(
        "num_proc: processes are left behind",
        "llmtrain/data/tokenizing.py",
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n",
        "",
        TESTS,
    ),
    Mutant(
        "progress: what is skipped counts as speed",
        "llmtrain/data/extend.py",
        "self._marks.append((self._shown, self.tokens, read))",
        "self._marks.append((self._shown, self.tokens, 0))",
        PROGRESS,
    ),
    Mutant(
        "progress: each file begins at no bytes",
        "llmtrain/data/bytes_read.py",
        "self._before, self.current = self._before + size, int",
        "self.current = int",
        PROGRESS,
    ),
    Mutant(
        "shuffle: an old checkpoint goes on in another order",
        "llmtrain/train/checkpoint.py",
        '        check_order(state["recipe"], self.recipe, str(path))\n',
        "",
        ("tests/distributed/test_train_text.py",),
    ),
    Mutant(
        "card: every text ended with eos, also of token files without it",
        "llmtrain/export/separators.py",
        "return _Separators.EOS if ready_made.has_eos else _Separators.NONE",
        "return _Separators.EOS",
        ("tests/unit/test_data_ready_made.py",),
    ),
    Mutant(
        "progress: the wait for validation tokens alone has no line",
        "llmtrain/data/extend.py",
        'if reads_both and [*missing] == ["validation"]:',
        "if False:",
        PROGRESS,
    ),
    Mutant(
        "tokenizing: batches after one that failed are kept",
        "llmtrain/data/tokenizing.py",
        "        found = self._result(waiting[0])\n        waiting.popleft()\n",
        "        found = self._result(waiting.popleft())\n",
        ("tests/unit/test_gaps_data.py",),
    ),
]
