"""Question to the Hugging Face hub whether it has a repository."""

from __future__ import annotations

from typing import Literal

from llmtrain.errors import DataError, UnavailableError, first_line
from llmtrain.waiting import announced

TIMEOUT = 5.0
"""Seconds to wait for each of the hub's several addresses."""


def require(name: str, kind: Literal["dataset", "model"], *, key: str, instead: str) -> str | None:
    """Return the newest commit of repository `name`. Raises DataError unless the Hugging Face hub has it, UnavailableError unless
    the hub answers: the message names `key` and, unless the repository does not exist, suggests `instead`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        with announced(f"the Hugging Face hub's answer about {name}, {TIMEOUT:g} s for each of its addresses"):
            return HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT).sha
    except RepositoryNotFoundError:
        raise DataError(
            f"{key}: the Hugging Face hub has no public {kind} {name!r}; check the name (log in if it is private)"
        ) from None
    except HFValidationError:
        raise DataError(f"{key}: {name!r} is neither a file or folder here nor a {kind} name; use {instead}") from None
    except Exception as error:
        # Offline mode is a setting, which does not end by itself.
        raise (DataError if isinstance(error, OfflineModeIsEnabled) else UnavailableError)(
            f"{key}: {name!r} needs the Hugging Face hub, which can't be used from here ({first_line(error)}); "
            f"connect to the internet, or use {instead}"
        ) from None
