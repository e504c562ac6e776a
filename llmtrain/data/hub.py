"""Availability check for the Hugging Face hub and its repositories, made once before a library retries for minutes."""

from __future__ import annotations

from typing import Literal

from llmtrain.errors import DataError

TIMEOUT = 5.0
"""Seconds to wait for each of the hub's several addresses."""


def require(name: str, kind: Literal["dataset", "model"], *, key: str, instead: str) -> None:
    """Raise DataError unless the Hugging Face hub answers and has repository `name`. The message names `key` and,
    unless the repository does not exist, suggests `instead`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        raise DataError(
            f"{key}: the Hugging Face hub has no public {kind} {name!r}; check the name (log in if it is private)"
        ) from None
    except HFValidationError:
        raise DataError(f"{key}: {name!r} is neither a file or folder here nor a {kind} name; use {instead}") from None
    except Exception as error:
        raise DataError(
            f"{key}: {name!r} needs the Hugging Face hub, which can't be used from here ({first_line(error)}); "
            f"connect to the internet, or use {instead}"
        ) from None


def first_line(error: BaseException) -> str:
    """Return the first nonblank line of an exception's message, or its type's name if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
