"""The Hugging Face hub: whether it has a repository, and the documents of its datasets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from llmtrain.config import DataSection
from llmtrain.config.data import HUB
from llmtrain.data.rows import text_of_row
from llmtrain.errors import DataError, UnavailableError, first_line
from llmtrain.waiting import announced

TIMEOUT = 5.0
"""Seconds to wait for each of the hub's several addresses."""


def require_on_hub(name: str, kind: Literal["dataset", "model"], *, key: str, instead: str) -> str | None:
    """Return the newest commit of repository `name`. Raises DataError if the Hugging Face hub does not have it, and
    UnavailableError if the hub does not answer. The message names `key` and, unless the hub lacks the repository,
    suggests `instead`."""
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


class HubDataset:
    """Stream of a hub dataset's documents from a given place on. Raises DataError if the hub or the dataset can't be used."""

    def __init__(
        self,
        data: DataSection,
        split: str,
        key: str,
        revision: str | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start at `state` in the commit `revision`; by default at the beginning of the newest commit."""
        self._data, self._split, self._key = data, split, key
        name = data.source.removeprefix(HUB)
        instead = "data.source=/path/to/files or data.source=stdlib"
        newest = require_on_hub(name, "dataset", key="data.source", instead=instead)
        self.revision = revision or newest
        import datasets

        try:
            with announced(f"the Hugging Face hub to list the files of {name}"):
                self._rows = datasets.load_dataset(
                    name, data.subset, split=split, streaming=True, revision=self.revision
                )
        except (ValueError, OSError) as error:  # unknown subset or split, or no data files that datasets knows
            split_key = "data.split" if key == "data.source" else key
            kind = DataError if isinstance(error, ValueError | FileNotFoundError) else UnavailableError
            raise kind(
                f"{data.source}: data.subset={data.subset or 'null'}, {split_key}={split}: {first_line(error)}"
            ) from None
        if state is not None:
            self._rows.load_state_dict(state)

    def __iter__(self) -> Iterator[str]:
        for row in _stream_errors_as_unavailable(self._rows, self._data.source, self._split, self._key):
            yield from text_of_row(row, self._data.text_key, self._data.source)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the place after the last document yielded."""
        return self._rows.state_dict()


def _stream_errors_as_unavailable(
    rows: Iterable[dict[str, Any]], source: str, split: str, key: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows. Raises UnavailableError for any exception of the streaming libraries, such as a broken connection."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise UnavailableError(
                f"{source}: reading it from the hub failed ({first_line(error)}); start the same command again, or download "
                f"the files of its split {split} alone and give their folder as {key}"
            ) from error
        yield row
