"""Errors that a user can act on.

Each message is one line: what was given, what was expected, what to change. Everything else (a failed
assert, an exception of a library) is a defect or a broken machine and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

DONE, FAILED, BAD_USAGE, STOPPED_EARLY = 0, 1, 2, 3
"""Exit codes: finished · failed · bad recipe or usage · stopped early with a checkpoint (start again to continue)."""


class UserError(ValueError):
    """Something the user gave can't be used as it is; the command ends with exit code 2."""


class RecipeError(UserError):
    """A key of the recipe is unknown, has a wrong value, or contradicts another."""


class DataError(UserError):
    """A data source, tokenizer or token shard is missing, damaged or of the wrong kind."""


class ModelError(UserError):
    """A model configuration can't be built, initialized or cut into blocks."""


class CheckpointError(UserError):
    """A checkpoint is damaged or belongs to another recipe."""


class SuiteError(UserError):
    """A suite or one of its tasks is unknown, or a key of it has a wrong value."""


class ClusterError(UserError):
    """A virtual host can't have what it was asked to have, on this machine or at all."""


class ResultsError(UserError):
    """Results that are to be reported on are missing, or not what they are said to be."""


class TrainingError(RuntimeError):
    """Training can't go on (non-finite loss, a peer that is gone); the command ends with exit code 1."""


def exit_with_status(command: Callable[[], object]) -> None:
    """Run a command; what a user can act on becomes one line, and an exit code."""
    try:
        command()
    except UserError as error:
        if _is_local_rank_zero():  # all ranks find the same fault in a recipe
            print(f"error: {error}", file=sys.stderr)
        _leave(BAD_USAGE)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        _leave(FAILED)
    except Exception:
        traceback.print_exc()
        _leave(FAILED)


def _leave(code: int) -> NoReturn:
    """End at once where a GPU may have been given work that waits for other ranks: an interpreter that ends in order waits
    for it, and its launcher, which would stop the others, for the interpreter."""
    torch = sys.modules.get("torch")  # imported by whatever needed it; not for its sake
    if torch is not None and torch.cuda.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_local_rank_zero() -> bool:
    """Whether this is the first rank of its host, by all launchers that had a part in starting it."""
    on_host = [os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if os.environ.get(name)]
    return all(number == "0" for number in on_host or [os.environ.get("RANK", "0")])
