"""Comparability of the validation losses of several runs. Runs can be compared if they are validated on the same text.
Losses per token also require the same tokenizer; bits per byte do not."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.data import LISTS
from llmtrain.files import read_mapping
from llmtrain.run_files import RECIPE

OWN_TEXT = ("validation", "text_key", "separator")
HELD_OUT = ("validation", "source", "subset", "split", "validation_fraction", "text_key", "separator")
"""Keys of `data` that determine the validation text: OWN_TEXT if `data.validation` is given, otherwise HELD_OUT."""
CONTEXT_KEYS = ("data.packing", "train.sequence_length", "train.document_mask")
"""Keys of recipes that decide from which earlier tokens a token is predicted."""
TOLERANCE = 1e-6
"""Relative difference up to which two ratios of bytes to tokens count as equal, and therefore as ratios of the same text."""
CLEARLY = 0.02
"""Relative difference above which two ratios count as ratios of different texts although the recipes name the same one:
a file may have been edited, or the packages of `python` updated. Different amounts of prepared text may cause smaller
differences."""
RATIO = "bytes per token of the validation text"


@dataclass(frozen=True)
class ValidatedText:
    """Identity of the text on which a run is validated, and of its tokenizer, read from the run's folder."""

    keys: Mapping[str, Any]
    """Keys of the recipe that name the text. Empty if the recipe has none of them."""
    tokens: int | None
    """Number of tokens that are validated, `eval.tokens`."""
    tokenizer: str | None
    """Value of the recipe's `data.tokenizer`."""
    digest: str | None
    """Digest of the tokenizer's file, if the run has a copy."""
    contexts: Mapping[str, Any]
    """Values of CONTEXT_KEYS that the recipe has."""
    bytes_per_token: float | None
    """UTF-8 bytes of the text per token, measured in a validation; for a list of texts, the mean by weight."""

    def has_tokenizer_of(self, other: ValidatedText) -> bool:
        """Return whether both runs have the same tokenizer."""
        if self.digest is not None and other.digest is not None:
            return self.digest == other.digest
        return None in (self.tokenizer, other.tokenizer) or self.tokenizer == other.tokenizer

    def differing_key(self, other: ValidatedText) -> str | None:
        """Return the recipe key in which the texts, or the contexts of their tokens, differ; None if both are the same.

        A text may have another path on another machine. Texts with different keys therefore count as the same if the
        same tokenizer gives them equal numbers of bytes per token. Texts with the same keys count as different if these
        numbers differ clearly; RATIO is then returned.
        """
        if not self.keys or not other.keys:
            return None  # nothing is known
        for key in CONTEXT_KEYS:
            if key in self.contexts and key in other.contexts and self.contexts[key] != other.contexts[key]:
                return key
        if self.tokens != other.tokens:
            return "eval.tokens"
        ratios = (self.bytes_per_token, other.bytes_per_token)
        are_known = self.has_tokenizer_of(other) and None not in ratios
        if are_known and math.isclose(*ratios, rel_tol=TOLERANCE):
            return None
        names = dict.fromkeys([*self.keys, *other.keys])
        differs = RATIO if are_known and not math.isclose(*ratios, rel_tol=CLEARLY) else None
        return next((name for name in names if self.keys.get(name) != other.keys.get(name)), differs)

    def value(self, key: str) -> Any:
        """Return the value of a key that `differing_key` has returned."""
        ratio = None if self.bytes_per_token is None else round(self.bytes_per_token, 3)
        return {"eval.tokens": self.tokens, RATIO: ratio, **self.contexts}.get(key, self.keys.get(key))


@dataclass(frozen=True)
class LossUnit:
    """Unit in which the validation losses of several runs are compared."""

    tag: str = "eval/loss"
    """Tag of the losses in metrics.jsonl."""
    name: str = "nats per token"
    note: str = ""
    """Text for the user: why the unit is not the loss per token, or why the runs are not ranked."""
    differs: str = ""
    """Difference that keeps the runs from being ranked, with its key, such as "texts (data.source)". Empty if the
    losses can be compared in some unit."""

    @property
    def is_ranked(self) -> bool:
        """Return whether the losses can be compared in any unit."""
        return not self.differs


def read_validated_text(run: Path, lines: Sequence[Mapping[str, Any]]) -> ValidatedText:
    """Return the text on which a run was validated, given its run directory and the lines of its metrics.jsonl."""
    recipe = read_mapping(run / RECIPE)  # not a Recipe, because another version may have written it
    data = recipe.get("data") if isinstance(recipe.get("data"), dict) else {}
    evaluation = recipe.get("eval") if isinstance(recipe.get("eval"), dict) else {}
    file = run / "tokenizer" / "tokenizer.json"
    return ValidatedText(
        keys=_keys_of(data),
        tokens=evaluation.get("tokens"),
        tokenizer=data.get("tokenizer"),
        contexts=_contexts(data, recipe.get("train")),
        digest=hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None,
        bytes_per_token=_bytes_per_token(data, lines),
    )


def _bytes_per_token(data: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the UTF-8 bytes per token; None if a text has not been validated. For a list of texts, return the mean by
    weight, because the ratio of their joint loss to their joint bits per byte changes with every step."""
    _, entries = _list_of(data)
    weights = {f"eval/{entry.get('name')}/": entry.get("weight", 1.0) for entry in entries} or {"eval/": 1.0}
    total = 0.0
    for prefix, weight in weights.items():
        pairs = ((line.get(f"{prefix}loss"), line.get(f"{prefix}bpb")) for line in lines)
        ratio = next((loss / math.log(2) / bits for loss, bits in pairs if loss and bits), None)
        if ratio is None:
            return None
        total += weight * ratio
    return total / sum(weights.values())


def _list_of(data: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]]:
    """Return the key and the entries of the recipe's list of texts, both empty if it has none."""
    found = ((key, data[key]) for key in LISTS if isinstance(data.get(key), list) and data[key])
    return next(found, ("", []))


def _contexts(data: Mapping[str, Any], train: Any) -> dict[str, Any]:
    """Return the recipe's values of CONTEXT_KEYS. A mask changes nothing where each sample has one document."""
    packing = data.get("packing", "packed")  # a recipe of an earlier version has no such key
    found = {"data.packing": packing}
    for key in ("sequence_length", "document_mask") if isinstance(train, dict) else ():
        if key in train and (packing == "packed" or key != "document_mask"):
            found[f"train.{key}"] = train[key]
    return found


def _keys_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe keys that determine the validation text, with their values. A list of texts is one key. Its
    value has the texts with their weights, sorted, because two recipes may list them in different orders."""
    key, entries = _list_of(data)
    if entries:
        weights = [{"weight": entry["weight"]} if "weight" in entry else {} for entry in entries]
        texts = [_text_keys(entry) | weight for entry, weight in zip(entries, weights, strict=True)]
        return {f"data.{key}": sorted({json.dumps(text, sort_keys=True) for text in texts})}
    return {f"data.{name}": value for name, value in _text_keys(data).items()}


def _text_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    names = OWN_TEXT if data.get("validation") is not None else HELD_OUT
    if str(data.get("source", "")).startswith("hf:"):  # data.validation is then one of its splits
        names = tuple(dict.fromkeys(["source", "subset", *names]))
    return {name: data[name] for name in names if name in data}


def common_unit(runs: Sequence[tuple[str, ValidatedText]]) -> LossUnit:
    """Return the unit in which `runs`, pairs of a name and a text, can be compared: bits per byte if their tokenizers
    differ. If their texts differ, the runs can't be ranked in any unit. A run whose text is unknown is assumed to have
    the others' text."""
    known = [(name, text) for name, text in runs if text.keys]
    for name, text in known[1:]:
        first, other = known[0]
        if (key := other.differing_key(text)) is not None:
            there, here = ("not given" if one is None else one for one in (other.value(key), text.value(key)))
            values = f"{key} is {there} in {first}, and {here} in {name}"
            what = "contexts" if key in CONTEXT_KEYS else "texts"
            return LossUnit(
                name=f"nats per token of different {what}",
                note=f"validated on different {what} ({values}): losses can't be compared, and runs are not ranked",
                differs=f"{what} ({key})",
            )
    for name, text in known[1:]:
        first, other = known[0]
        if not other.has_tokenizer_of(text):
            kinds = " and ".join(dict.fromkeys((str(other.tokenizer), str(text.tokenizer))))
            return LossUnit(
                "eval/bpb",
                "bits per byte",
                f"{first} and {name} have different tokenizers ({kinds}): compared in bits per byte, not by loss per token",
            )
    return LossUnit()
