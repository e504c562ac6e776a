"""Is the Hugging Face hub there, and does it have this repository? Asked once, before a library retries for minutes."""

from __future__ import annotations

from typing import Literal

from llmtrain.errors import DataError

TIMEOUT = 5.0
"""Seconds to wait for each address of the hub (it has several)."""


def require(name: str, kind: Literal["dataset", "model"], *, key: str, instead: str) -> None:
    """Return if the hub answers and has repository `name`; else raise a DataError that suggests `instead` for `key`."""
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
    """What an exception says, as one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
