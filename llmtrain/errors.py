"""Errors that a user can act on.

Each message is one line: what was given, what was expected, what to change. Any other exception (a failed assert, an
error in a library) indicates a defect or a broken machine and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

DONE, FAILED, BAD_USAGE, STOPPED_EARLY = 0, 1, 2, 3
"""Exit codes: finished, failed, bad recipe or usage, stopped early with a checkpoint (start again to continue)."""


class UserError(ValueError):
    """User input that is not usable as given; the command ends with exit code 2."""

    exit_code = BAD_USAGE
    is_shared = True
    """All ranks of a host find the same fault, so the first of them prints it."""


class RecipeError(UserError):
    """A recipe key that is unknown, has a wrong value, or contradicts another key."""


class DataError(UserError):
    """A data source, tokenizer or token shard that is missing, damaged or of the wrong kind."""


class UnavailableError(DataError):
    """Data that is unavailable now but may be available later; the command ends with exit code 1, after which launchers start it
    again."""

    exit_code = FAILED


NO_ANSWER = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)
"""Error numbers of a disk that does not answer, such as the disk of a file server that is being replaced."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""
PASSING = (*NO_ANSWER, *FULL)
"""Error numbers of disk failures that may end by themselves."""


def data_error(problem: str, error: Exception) -> DataError:
    """Return the error for a text or its folder that `error` made unusable: an UnavailableError if that may end by itself."""
    return (UnavailableError if getattr(error, "errno", None) in PASSING else DataError)(problem)


def raise_if_no_answer(path: str | Path, error: OSError) -> None:
    """Raise UnavailableError if `error` says that the disk of `path` does not answer, which says nothing about the file."""
    if error.errno in NO_ANSWER:
        raise UnavailableError(
            f"{path}: its disk does not answer ({error.strerror}); start the same command again"
        ) from error


class ModelError(UserError):
    """A model configuration that can't be built, initialized or split into blocks."""


class CheckpointError(UserError):
    """A checkpoint that is damaged or belongs to another recipe."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer version, which this one can't read."""


class SuiteError(UserError):
    """A suite or task that is unknown, or a suite key with a wrong value."""


class ClusterError(UserError):
    """A virtual host that can't be configured as requested."""


class ResultsError(UserError):
    """Results for a report that are missing or not of the stated kind."""


class TrainingError(RuntimeError):
    """Training that can't continue (non-finite loss, a lost peer); the command ends with exit code 1."""

    is_shared = False
    """True if all ranks raise this error. Then only the first rank of a host prints it."""


def one_line(error: BaseException, length: int = 200) -> str:
    """Return an exception's message in one line of at most `length` characters, or its class name if the message is empty."""
    return " ".join(str(error).split())[:length] or type(error).__name__


def kind_of(value: object) -> str:
    """Return the kind of a JSON value, in words for a user."""
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "an object")


def first_line(error: BaseException) -> str:
    """Return the first nonblank line of an exception's message, or its class name if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def reason(error: BaseException) -> str:
    """Return one line that says why a file can't be used. For errors such as a TypeError, the line does not contain Python's
    message, which says nothing about the file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, AttributeError | TypeError | LookupError):
        return "its values are not of the expected kinds"
    return first_line(error)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of a library written in Rust into a ValueError. A panic is a BaseException, which `except Exception` does
    not catch, and its class can't be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(first_line(error)) from error


HEAD_START_SECONDS = 1.0
"""Head start, in seconds, of the rank that prints the error: launchers kill all ranks once one has exited."""


def exit_with_status(command: Callable[[], object]) -> None:
    """Run a command and turn its errors into exit codes.

    A UserError or TrainingError prints one line. Any other exception prints its traceback. A character that the output's encoding
    lacks is printed as its number, so that the command does not fail because of it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # its buffered text can't be written
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command()
    except (UserError, TrainingError) as error:
        if is_local_rank_zero() or not error.is_shared:
            print(f"error: {error}", file=sys.stderr)
        elif isinstance(error, TrainingError):
            time.sleep(HEAD_START_SECONDS)
        leave(error.exit_code if isinstance(error, UserError) else FAILED)
    except Exception:
        traceback.print_exc()
        leave(FAILED)


def leave(code: int) -> NoReturn:
    """Exit with `code`, without the interpreter's shutdown if CUDA is initialized.

    After a failure, a normal shutdown could hang: it waits for the work on the GPU, which may wait for other ranks. The
    launcher stops those only after this process has exited. After a complete run, it could abort the process: a daemon
    thread that returns from torch's code during the shutdown ends it with SIGABRT.
    """
    torch = sys.modules.get("torch")  # never imported just for this check
    if torch is not None and torch.cuda.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_local_rank_zero() -> bool:
    """Return whether this is the first rank of its host, according to every launcher involved in starting it.

    A process whose variables do not describe one rank of several counts as the first rank: either the error is about these
    variables, or the process is alone.
    """
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")):
        rank, size, on_host = (os.environ.get(name, "") for name in names)
        numbers = [int(text) if text.isascii() and text.isdigit() else -1 for text in (rank, size, on_host)]
        if 0 <= numbers[0] < numbers[1] and numbers[2] > 0:
            return False
    return True
