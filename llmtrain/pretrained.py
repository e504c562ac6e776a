"""Weights that a run starts from (`model.from_weights`): their location and their architecture.

The weights are a run's newest checkpoint, a given checkpoint, or a transformers folder with safetensors files: an export, or a
model on the hub. This module reads configurations only; `train/initial_weights.py` reads the weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from llmtrain.config import ModelSection, Recipe
from llmtrain.data.dataset import TOKENIZER
from llmtrain.data.hub import require_on_hub
from llmtrain.errors import DataError, ModelError, UserError, first_line, one_line
from llmtrain.files import is_bare_file_name, local_path
from llmtrain.run_files import CHECKPOINTS, RECIPE, STATE_FILE, complete_checkpoints, is_run

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEY = "model.from_weights"
CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Files that are never read, because reading them can run code."""
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
EXPECTED = "a run, one of its checkpoints, or a folder with config.json and model.safetensors"
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt"]
"""Patterns of the files that are downloaded from the hub: configurations, weights and tokenizer, but no pickled files."""
NOT_ARCHITECTURE = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "quantization_config"}
"""Keys of a config that do not matter in training, in addition to the keys of every `PretrainedConfig`."""
NOT_COMPARED = ("initializer_range", "max_position_embeddings", "pretraining_tp", "dropout", "pdrop", "summary_")
"""Parts of the names of config keys in which a run may differ from its weights, because they do not change what a model computes
from given weights. The number of positions is compared nevertheless if rotary positions are scaled by it. If positions are
learned, it is the shape of a tensor, which `train/initial_weights.py` checks."""
SCALED_BY_POSITIONS = {"dynamic", "yarn", "longrope"}
"""Kinds of rotary positions that transformers scales by `max_position_embeddings`."""


@dataclass(frozen=True)
class Pretrained:
    """Weights on this machine."""

    name: str
    """Path of the weights, or their name on the hub, as shown to the user."""
    folder: Path
    """The checkpoint, or the transformers folder."""
    step: int | None = None
    """Step of a checkpoint."""

    @property
    def is_checkpoint(self) -> bool:
        return self.step is not None

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer that the weights were trained with; None if they come without one."""
        folder = self.folder.resolve().parent.parent / TOKENIZER if self.is_checkpoint else self.folder
        return folder if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


def find_pretrained(name: str, download: bool = False) -> Pretrained | None:
    """Return the weights that `model.from_weights` names. If the weights are on the hub and not on this machine, download them if
    `download` is true; otherwise return None.

    Raises ModelError for a path without weights, and DataError if the hub has no such model or does not answer.
    """
    path = local_path(name)
    if path is None:
        folder = _of_hub(name, download)
        return None if folder is None else Pretrained(name, folder)
    if (path / STATE_FILE).is_file():
        return Pretrained(str(path), path, _step_of(path))
    if is_run(path):
        complete = complete_checkpoints(path / CHECKPOINTS)
        if not complete:
            raise ModelError(f"{KEY}: the run {path} has no complete checkpoint; train it until it writes one")
        newest = complete[max(complete)]
        return Pretrained(str(newest), newest, _step_of(newest))
    if (path / CONFIG).is_file():
        return Pretrained(str(path), path)
    what = "is a folder without a config.json" if path.is_dir() else "is a file"
    raise ModelError(f"{KEY}: {name} {what}; give {EXPECTED}")


def _step_of(checkpoint: Path) -> int:
    step = _state_of(checkpoint).get("step")
    if not isinstance(step, int):
        raise ModelError(f"{KEY}: {checkpoint}/{STATE_FILE} is not of a checkpoint; give {EXPECTED}")
    return step


def _state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the content of state.json, without checking its digest, which is checked when the weights are read."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{KEY}: {checkpoint}/{STATE_FILE} can't be read ({one_line(error)}); copy it again") from None
    return state if isinstance(state, dict) else {}


def _of_hub(name: str, download: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / CONFIG).is_file() and weight_files(folder):
            return folder
    except (HFValidationError, LocalEntryNotFoundError, OSError, ModelError):
        pass  # not downloaded yet, or not completely
    require_on_hub(name, "model", key=KEY, instead=EXPECTED)
    if not download:
        return None
    try:
        return Path(snapshot_download(name, allow_patterns=DOWNLOADED))
    except Exception as error:  # httpx, huggingface_hub and the disk have their own
        raise DataError(
            f"{KEY}: downloading {name} from the hub failed ({first_line(error)}); start the same command again"
        ) from None


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files in a transformers folder. Raises ModelError if a file is missing, or if the folder
    has no weights or only pickled ones."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{KEY}: {folder / INDEX} is damaged; copy it again") from None
        for name in names:
            if not is_bare_file_name(name):
                raise ModelError(f"{KEY}: {folder / INDEX} names {name!r}, which is not a file in its folder")
            if not os.path.isfile(folder / name):
                raise ModelError(f"{KEY}: {folder / name} is missing; copy it again")
        return names
    if pickled := next((path.name for pattern in PICKLED for path in sorted(folder.glob(pattern))), None):
        raise ModelError(
            f"{KEY}: {folder} has {pickled} and no {SINGLE}; reading a pickled file can run code, so convert it: "
            "from_pretrained(OLD).save_pretrained(NEW)"
        )
    raise ModelError(f"{KEY}: {folder} has no {SINGLE}; give {EXPECTED}")


def pretrained_config(weights: Pretrained, vocab_size: int | None = None) -> PretrainedConfig:
    """Return the config of the model that the weights belong to. `vocab_size` is used for a checkpoint whose recipe leaves the
    size to the tokenizer. Raises ModelError if the config can't be read."""
    from llmtrain.model import model_config

    if weights.is_checkpoint:
        return model_config(_section_of(weights.folder), vocab_size)
    return _read_config(weights.folder, weights.name)


def _section_of(checkpoint: Path) -> ModelSection:
    recipe = _state_of(checkpoint).get("recipe")
    try:
        return ModelSection.model_validate(recipe["model"])
    except (ValidationError, KeyError, TypeError):
        raise ModelError(
            f"{KEY}: {checkpoint} has no recipe of this version in {STATE_FILE}; export the run with the version that wrote it"
        ) from None


def _read_config(folder: str | Path, name: str) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors for a damaged file
        raise ModelError(f"{KEY}: {name}: {CONFIG} can't be read ({first_line(error)}); give {EXPECTED}") from None


def _with_config(recipe: Recipe) -> Recipe:
    """Return the recipe with `model.from_config` replaced by the keys of the config that it names, so that later changes to that
    config do not affect the run. Raises ModelError if the config can't be read."""
    from llmtrain.startup import import_transformers

    import_transformers()
    from llmtrain.model import model_config

    section = recipe.model
    config = model_config(section)
    keys = {**architecture_keys(config), **section.config}  # a wrong key of the recipe stays, and is refused
    _shorten(keys, getattr(config, "num_hidden_layers", None), section.config)
    update = {"type": config.model_type, "config": json.loads(json.dumps(keys)), "from_config": None}
    return recipe.model_copy(update={"model": section.model_copy(update=update)})


def _shorten(keys: dict[str, Any], layers: int | None, given: Mapping[str, Any]) -> None:
    """Shorten the config file's lists with one value per layer to `layers` values, except lists that the recipe gives."""
    for key in ("layer_types", "mlp_layer_types", "attention_layers"):
        if layers is not None and key not in given and isinstance(keys.get(key), list):
            keys[key] = keys[key][:layers]
    if "attention_types" in given:  # from which GPT-Neo derives the list
        keys.pop("attention_layers", None)
    elif "attention_layers" in keys:
        keys["attention_types"] = [[keys["attention_layers"], 1]]


def with_architecture(recipe: Recipe, run: Path) -> Recipe:
    """Return the recipe with the architecture from `model.from_config` or, if it gives weights and no architecture, from the
    weights.

    From a run's first start on, the recipes in its directory `run` and in its mirror hold the architecture, so the run can continue
    without the weights. The mirror is only read if the weights are not. Raises UserError if none of these recipes exists and the
    configuration of the weights can't be read.
    """
    section = recipe.model
    if section.from_config is not None:
        return _with_config(recipe)
    if section.from_weights is None or section.config:
        return recipe
    found = _recorded(run / RECIPE, section.from_weights)
    if found is None:
        try:
            found = _architecture_of(section.from_weights)
        except UserError:
            if recipe.mirror_url is None or not (found := _recorded_in(recipe.mirror_url, section.from_weights)):
                raise
    if "type" in section.model_fields_set and section.type != found.type:
        raise ModelError(
            f"model.type is {section.type}, but {KEY}={section.from_weights} is a {found.type} model; leave model.type out"
        )
    return recipe.model_copy(update={"model": found})


def _recorded_in(mirror: str, name: str) -> ModelSection | None:
    """Return the model section in the recipe of a run's mirror as `_recorded` does; None if the mirror can't be read."""
    from fsspec.core import url_to_fs

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / RECIPE
        try:
            files, there = url_to_fs(f"{mirror}/{RECIPE}")
            files.get_file(there, str(here))
        except Exception:  # every file system has its own exceptions
            return None
        return _recorded(here, name)


def _recorded(recipe: Path, name: str) -> ModelSection | None:
    """Return the model section in the file of a run's own recipe if the run started from weights of this name, or None."""
    import yaml

    try:
        section = ModelSection.model_validate(yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"])
    except (OSError, yaml.YAMLError, ValidationError, KeyError, TypeError):
        return None
    return section if section.from_weights == name and section.config else None


def _architecture_of(name: str) -> ModelSection:
    weights = find_pretrained(name)
    config = _read_config(name, name) if weights is None else pretrained_config(weights)
    keys = architecture_keys(config)
    if weights is not None and weights.is_checkpoint:
        section = _section_of(weights.folder)
        if section.from_config is None and "vocab_size" not in section.config:
            keys.pop("vocab_size", None)  # left to the tokenizer
    return ModelSection(type=config.model_type, config=json.loads(json.dumps(keys)), from_weights=name)


def architecture_keys(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of a config that describe the model, for a recipe's `model.config`."""
    from transformers import PretrainedConfig

    other = NOT_ARCHITECTURE | PretrainedConfig().to_dict().keys()
    known = type(config)().to_dict().keys() - other  # files often have keys that their kind of model does not know
    return {key: value for key, value in config.to_dict().items() if key in known and not key.startswith("_")}


def check_architecture(
    section: ModelSection, here: PretrainedConfig, there: PretrainedConfig, weights: Pretrained
) -> None:
    """Raise ModelError for the first key in which the recipe's model (`here`) differs from that of the weights (`there`)."""
    remedy = "leave out model.type, config and from_config to take the architecture of the weights"
    if here.model_type != there.model_type:
        raise ModelError(
            f"{KEY}: {weights.name} is a {there.model_type} model, but the recipe's is {here.model_type}; {remedy}"
        )
    mine, theirs = architecture_keys(here), architecture_keys(there)
    # In the order of the config, where sizes come before the keys that follow from them. The vocabulary comes last, because
    # models that differ in other keys, too, are even less alike.
    for key in sorted({**theirs, **mine}, key=lambda key: key == "vocab_size"):
        is_free = any(part in key for part in NOT_COMPARED) and not ("position" in key and _scales_positions(here))
        if is_free or mine.get(key) == theirs.get(key):
            continue
        expected = f"model.config.{key}={_text(theirs.get(key))}"
        if key == "vocab_size" and key not in section.config:
            folder = weights.tokenizer or "the tokenizer of the weights"
            raise ModelError(
                f"{KEY}: {weights.name} has a vocabulary of {theirs[key]}, but the recipe's tokenizer has {mine[key]} tokens; "
                f"give data.tokenizer={folder}, or if it is that one, {expected}"
            )
        raise ModelError(
            f"{KEY}: {weights.name} has {key} {_text(theirs.get(key))}, but the recipe's model has {_text(mine.get(key))}; "
            f"give {expected}, or {remedy}"
        )


def _scales_positions(config: PretrainedConfig) -> bool:
    """Return whether, in any kind of layer, the angles of rotary positions depend on the number of positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in SCALED_BY_POSITIONS for kind in kinds)


def _text(value: Any) -> str:
    return json.dumps(value).replace(" ", "").replace('"', "")
