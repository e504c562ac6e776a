"""Recipe loading: base files and overrides, merged over the method's preset and validated against the schema.

Later layers win: preset < base files in their order < the file itself < the command line. Mappings merge key by key,
but a value with a `kind` (`sync.period`, `sync.outer`, ...) is replaced completely by one of another kind. There is no
interpolation, and the environment is not read.

If a layer names another method than the layers below it, their `reduction`, `outer`, `schedule`, `pull` and `moments` are dropped,
because they were chosen for the old method. Period, warm-up and wire stay, so that methods are compared at the same round length,
with these exceptions:

- A period of another kind than the new method's is dropped.
- `wire`, `warmup_until_lr` and keys of `optim` are dropped if the preset of one of the two methods chooses them.
- If the new method averages gradients in every step, the warm-up is dropped, and `wire` unless it rounds gradients.

A layer that names texts (`data.source`, `sources`, `per_replica`) drops the texts of the layers below it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import KeyValidationError, OmegaConfBaseException
from pydantic import ValidationError

from llmtrain.config import AutoOuterSection, Recipe, SyncSection
from llmtrain.config.data import HUB, LISTS
from llmtrain.config.section import SYNC_SHORT_FORMS, expand_name, leaves, merge
from llmtrain.errors import RecipeError, raise_if_no_answer, reason
from llmtrain.files import LONGEST_NAME
from llmtrain.recipe_files import recipe_named_in, recipe_names
from llmtrain.recipe_messages import Overlay, closest, explain, format_value, one_of
from llmtrain.run_files import CHECKPOINTS, RECIPE
from llmtrain.step_counts import local_steps, round_count
from llmtrain.sync.auto_outer import outer_for
from llmtrain.sync.methods import METHODS, inner_preset

COMMAND_LINE = "command line"
UNUSUAL_NUMBER = re.compile(r"[-+]?(0[\d_]+|\d[\d_]*(:\d+)+(\.\d*)?)")
"""Numbers that YAML 1.1 may read in base 8 or 60."""
TEXT_KEYS = ("source", *LISTS)
"""Keys of `data` that name texts. A recipe gives one of them."""
SHORT_FORMS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "sync": SYNC_SHORT_FORMS,
    "eval": {"suite": expand_name},
}
"""Functions that expand a value that stands for a mapping, such as `sync.schedule=layerwise` or `sync.period=10`, by section and
key. They are applied before layers are merged."""


def load_recipe(path: str | Path, overrides: Sequence[str] = (), method: str | None = None) -> Recipe:
    """Return the recipe in a YAML file, merged with its base files and `a.b=c` overrides. The architecture comes from
    `model.from_config`, or from `model.from_weights` if the recipe gives none. `method` names another method, in a layer above all
    others.

    Raises RecipeError, with one line that names the file and key, if the result is not a valid recipe, or another UserError if the
    architecture can't be read.
    """
    path = Path(path)
    layers = [*_read_with_bases(path, ()), Overlay(COMMAND_LINE, parse_overrides(overrides))]
    if method is not None:
        layers.append(Overlay(f"method {method}", {"sync": {"method": method}}))
    whose = f"{path} (the run takes its name, because run.name is not given)"
    layers = [Overlay(whose, {"run": {"name": path.stem}}), *_on_preset(layers)]
    data: dict[str, Any] = {}
    for layer in layers:
        data = merge(_without_other_texts(data, layer.data), layer.data)
    try:
        # Through JSON, because strict validation of JSON accepts lists for tuples, but still no text for numbers.
        recipe = Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise RecipeError(explain(error, layers, data)) from None
    recipe = _with_outer_step(recipe)
    if recipe.model.from_weights is None and recipe.model.from_config is None:
        return recipe
    from llmtrain.pretrained import with_architecture  # imports more than most commands need

    return with_architecture(recipe, Path(recipe.run.out_dir) / recipe.run.name)


def _with_outer_step(recipe: Recipe) -> Recipe:
    """Return the recipe with `sync.outer: auto`, if it has that, replaced by the settings for its number and length of rounds.
    Raises RecipeError if the number of rounds is not known."""
    sync = recipe.sync
    if not isinstance(sync.outer, AutoOuterSection):
        return recipe
    if sync.period.is_timed or sync.period.averages_gradients:
        why = (
            "the number of timed rounds is unknown"
            if sync.period.is_timed
            else "a step that averages gradients is no round"
        )
        raise RecipeError(f"sync.outer is auto, but {why}; leave it out, or give {{kind: nesterov, lr, momentum}}")
    rounds = round_count(recipe)
    outer = outer_for(rounds, local_steps(recipe) / rounds)
    return recipe.model_copy(update={"sync": sync.model_copy(update={"outer": outer})})


def check_not_moved(recipe: Recipe, path: Path, overrides: Sequence[str]) -> None:
    """Raise RecipeError if `recipe` is from the recipe.yaml of a run whose folder was renamed or moved, and no override says which
    run is meant. A start would ignore the checkpoints in that folder and begin another run."""
    folder = path.absolute().parent
    if path.name != RECIPE or not (folder / CHECKPOINTS).is_dir():
        return
    run, given = recipe.run, parse_overrides(overrides).get("run", {})
    mirror = (recipe.mirror_url or "").removeprefix("file://")
    if any(_is_same_folder(Path(known), folder) for known in (f"{run.out_dir}/{run.name}", mirror) if known):
        return
    out_dir = "" if _is_same_folder(Path(run.out_dir), folder.parent) else f" run.out_dir={folder.parent}"
    if run.name != folder.name and "name" not in given:
        raise RecipeError(
            f"{path} is of the run {run.name}, but its folder is {folder.name}; give run.name={folder.name}{out_dir} to continue the "
            f"run in this folder, or run.name={run.name} to start a run of that name"
        )
    if run.name == folder.name and "out_dir" not in given:
        raise RecipeError(
            f"{path} is of a run in run.out_dir={run.out_dir}, which is another folder now; give{out_dir} to continue "
            "the run in its folder, or run.name=NAME to start another run"
        )


def _is_same_folder(one: Path, other: Path) -> bool:
    return one.is_dir() and os.path.samefile(one, other)


def stored_recipe(data: dict[str, Any], where: str) -> Recipe:
    """Return the recipe that training stored in `where`. Raises RecipeError if it is not valid in this version."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        reason = explain(error, [Overlay(f"the recipe in {where}", data)], data)
        raise RecipeError(f"{reason}; another version wrote it: use that one, or choose another run.name") from None


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Return overrides of the forms `a.b=c`, `--a.b=c` and `--a.b c` as a nested mapping, with values read as YAML. Later arguments
    win.

    Raises RecipeError for an argument of another form, for a value that is not YAML, or if YAML reads the value differently than it
    looks.
    """
    merged: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        item = argument.removeprefix("--")
        if "=" not in item and argument.startswith("--"):
            value = next(rest, None)
            item = item if value is None else f"{item}={value}"
        if argument.startswith("--") and not {".", "="} & set(argument):
            raise RecipeError(
                f"{COMMAND_LINE}: {argument} is neither an option of this command (--help) nor --section.key=value"
            )
        if not re.match(r"[\w-]+(\.[\w-]+)*=", item):
            raise RecipeError(f"{COMMAND_LINE}: {argument!r} is not an override; write section.key=value")
        key, _, text = item.partition("=")
        try:
            data = OmegaConf.to_container(OmegaConf.from_dotlist([item]))
            _keep_name(data, f"run:\n  name: {text}" if key == "run.name" else f"{key}: {text}", COMMAND_LINE)
            _check_reading(argument, key, text, leaves(data))
        except (yaml.YAMLError, OmegaConfBaseException, UnicodeEncodeError):
            raise RecipeError(
                f"{COMMAND_LINE}: the value of {argument!r} is not YAML; put it in quotes within quotes: key='\"...\"'"
            ) from None
        merged = merge(merged, _normalize(data, COMMAND_LINE))
    return merged


def _check_reading(argument: str, key: str, text: str, values: Mapping[str, Any]) -> None:
    """Raise RecipeError if YAML reads a value on the command line differently than it looks. `values` has what YAML read from `text`,
    by key. Refused are numbers in base 8 or 60, text that is cut at a comment sign, text without quotes that becomes other text or
    nothing, and escapes outside of double quotes."""
    in_quotes, end = "quotes within quotes: key='\"...\"'", 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if not isinstance(token, yaml.ScalarToken | yaml.FlowMappingEndToken | yaml.FlowSequenceEndToken):
            continue
        end = token.end_mark.index
        written = token.value if isinstance(token, yaml.ScalarToken) and token.plain else ""
        if UNUSUAL_NUMBER.fullmatch(written) and written != values.get("run.name"):  # which stays as written
            number = yaml.safe_load(written)
            if not isinstance(number, str):
                raise RecipeError(
                    f"{COMMAND_LINE}: YAML reads {written} in {argument!r} as {number}; write the number without leading zeros or "
                    f"colons, or text in {in_quotes}"
                )
    if text[end:].lstrip().startswith("#"):
        raise RecipeError(
            f"{COMMAND_LINE}: YAML reads the end of {argument!r}, from # on, as a comment; put text in {in_quotes}"
        )
    value = values.get(key, text)  # `text` for a mapping, which is no leaf
    may_change = text.startswith(("'", '"')) or (text.startswith(("|", ">")) and "\n" in text)
    if isinstance(value, str) and value != text and not may_change:
        raise RecipeError(f"{COMMAND_LINE}: YAML reads {argument!r} as {format_value(value)}; put text in {in_quotes}")
    if value is None and text.strip().lower() not in ("null", "~"):
        raise RecipeError(f"{COMMAND_LINE}: YAML reads no value in {argument!r}; write null, or text in {in_quotes}")
    for key, value in values.items():
        if key.endswith("separator") and isinstance(value, str) and re.search(r"\\[nt]", value):
            raise RecipeError(
                f"{COMMAND_LINE}: {key} is {value}, with a backslash: only double quotes make it a line break or tab; write "
                f"{key}='\"{value}\"'"
            )


def resolved_yaml(recipe: Recipe) -> str:
    """Return every key of the recipe with its value, as YAML that `load_recipe` reads back to the same recipe."""
    # OmegaConf's dumper quotes text that its loader would read as a number (a run called "3e-4").
    return OmegaConf.to_yaml(OmegaConf.create(recipe.model_dump(mode="json")))


def _read_with_bases(path: Path, chain: tuple[Path, ...]) -> list[Overlay]:
    """Return the file's base files, depth first, then the file itself, each as its own layer."""
    here = Path(os.path.realpath(path))  # Path.resolve raises for links that form a circle
    if here in chain:
        names = " -> ".join(p.name for p in (*chain, path))
        raise RecipeError(f"{path}: base files form a circle ({names}); remove one `base:`")
    data = _read(path, named_by=chain[-1] if chain else None)
    bases = data.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise RecipeError(f"{path}: base is {bases!r}, expected a file name or a list of file names")
    below = [layer for base in bases for layer in _read_with_bases(recipe_named_in(path, base), (*chain, here))]
    return [*below, Overlay(str(path), data)]


def load_yaml(path: Path, what: str, missing: Callable[[], str]) -> Any:
    """Return the value in a YAML file. Raises RecipeError, with one line, if the file can't be read, or UnavailableError if the disk
    does not answer. For the message, `what` says what the file holds ("recipe" or "comparison"), and `missing` returns the end of
    the line if there is no such file."""
    try:
        value = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such file{missing()}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path}:{line}: not YAML: {error.problem or error.context}") from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder; give one of the {what}s in it") from None
    except KeyValidationError:
        raise RecipeError(
            f"{path}: can't be read as a {what}: a key is not a word or a number; give every value a key"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        if isinstance(error, OSError):
            raise_if_no_answer(path, error)
        raise RecipeError(f"{path}: can't be read as a {what}: {reason(error)}") from None
    # OmegaConf makes a key without a value of a file that is only text, which may be long.
    if isinstance(value, dict) and len(value) == 1 and None in value.values() and len(str(*value)) > LONGEST_NAME:
        raise RecipeError(f"{path} is a text, not a {what}; give a YAML file with lines such as `key: value`")
    return value


def _read(path: Path, named_by: Path | None) -> dict[str, Any]:
    def missing() -> str:
        where = f" (named by `base:` in {named_by.name})" if named_by else ""
        names = [other.stem for other in path.parent.glob("*.yaml") if other.is_file()] if path.parent.is_dir() else []
        near = closest(path.stem, names, cutoff=0.7)
        return f"{where}; " + (f"did you mean {path.parent / near}.yaml?" if near else _of_the_package(path))

    data = load_yaml(path, "recipe", missing)
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: holds a list, expected sections such as `train:` with keys below them")
    _keep_name(data, path.read_text(encoding="utf-8"), str(path))
    return _normalize(data, str(path))


def _keep_name(data: dict[Any, Any], written: str, label: str) -> None:
    """Replace a run.name that YAML has read as a number by its text in `written`, the YAML source. A run may be called 010 or 1.10.
    Raises RecipeError if the text is not found."""
    run = data.get("run")
    if not isinstance(run, dict) or type(run.get("name")) not in (int, float):
        return
    try:
        run["name"] = yaml.load(written, Loader=yaml.BaseLoader)["run"]["name"]  # which reads text only
    except LookupError:  # the name comes from a merge key
        raise RecipeError(f"{label}: run.name is {run['name']}, a number; put the name in quotes") from None


def _of_the_package(path: Path) -> str:
    """Return a hint about the package's recipes, for the message about a file that does not exist."""
    near = closest(path.stem, recipe_names(), cutoff=0.85)
    if near is not None:
        return f"did you mean {near}, which comes with the package?"
    return "recipes are YAML files, or names in llmtrain recipe list"


def _normalize(data: dict[Any, Any], label: str) -> dict[str, Any]:
    """Return `data` with {} for empty sections and with short forms expanded (SHORT_FORMS).

    Raises RecipeError for a value with `${`, and for a key that YAML reads as anything but text or a whole number.
    """
    _check_keys(data, label)
    for key, value in leaves(data).items():
        if isinstance(value, str) and "${" in value:
            raise RecipeError(f"{label}: {key} is {value!r}, but recipes have no interpolation; write the value itself")
    data = json.loads(json.dumps(data, default=str))  # turns keys that are whole numbers into text
    data = {key: {} if value is None and key != "base" else value for key, value in data.items()}
    for section, forms in SHORT_FORMS.items():
        if isinstance(data.get(section), dict):
            data[section] = {key: forms[key](value) if key in forms else value for key, value in data[section].items()}
    return data


def _check_keys(data: Any, label: str, path: str = "the recipe") -> None:
    for key, value in data.items() if isinstance(data, dict) else ():
        if type(key) not in (str, int):
            raise RecipeError(f"{label}: YAML reads a key of {path} as {format_value(key)}; put the key in quotes")
        _check_keys(value, label, key)


def _on_preset(layers: list[Overlay]) -> list[Overlay]:
    """Return the preset of the layers' method as the lowest layer, then the layers, without the keys that were chosen for another
    method."""
    method, kept = SyncSection.model_fields["method"].default, []
    for layer in layers:
        sync = layer.data.get("sync")
        named = sync.get("method", method) if isinstance(sync, dict) else method
        if not isinstance(named, str) or named not in METHODS:
            near = closest(str(named), METHODS)
            hint = f"; did you mean {near}?" if near else ""
            raise RecipeError(f"{layer.label}: sync.method is {format_value(named)}, expected {one_of(METHODS)}{hint}")
        if named != method:
            kept = _for_method(kept, method, named)
            method = named
        kept.append(layer)
    preset = {"sync": METHODS[method].PRESET | {"method": method}, "optim": inner_preset(method)}
    return [Overlay(f"preset {method}", _normalize(preset, method)), *kept]


def _for_method(layers: list[Overlay], before: str, method: str) -> list[Overlay]:
    """Return the `layers` without the keys that were chosen for the method `before`, because a layer above them names another
    `method`."""
    presets = METHODS[before].PRESET, METHODS[method].PRESET
    below: dict[str, Any] = {"sync": presets[0]}
    for layer in layers:
        below = merge(below, layer.data)
    sync, wanted = below["sync"], presets[1]["period"]["kind"]
    period, wire = (sync.get(key) if isinstance(sync, dict) else None for key in ("period", "wire"))
    dropped = {"reduction", "outer", "schedule", "pull", "moments"}
    dropped |= {"wire", "warmup_until_lr"} & {key for preset in presets for key in preset}
    if isinstance(period, dict) and period.get("kind") != wanted:
        dropped.add("period")  # its length has no meaning for another kind
    if wanted == "every_step":
        dropped |= {"warmup_steps", "warmup_until_lr"}
        if not isinstance(wire, dict) or not wire.get("gradients"):
            dropped.add("wire")
    chosen = {"sync": dropped, "optim": {*inner_preset(before), *inner_preset(method)}}
    return [Overlay(layer.label, _without(layer.data, chosen)) for layer in layers]


def _without(data: dict[str, Any], dropped: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Return `data` without the `dropped` keys of its sections."""
    return {
        section: {key: value for key, value in keys.items() if key not in dropped.get(section, ())}
        if isinstance(keys, dict)
        else keys
        for section, keys in data.items()
    }


def _without_other_texts(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `under` without its texts if `over` names texts. If `under` has a hub dataset and `over` another source, also drop
    `subset`, and if that source is not on the hub, `split` and `validation`."""
    below, above = under.get("data"), over.get("data")
    if not isinstance(below, dict) or not isinstance(above, dict) or not any(above.get(key) for key in TEXT_KEYS):
        return under
    dropped = {*TEXT_KEYS}
    if str(below.get("source")).startswith(HUB) and above.get("source") != below.get("source"):
        dropped |= {"subset"} if str(above.get("source")).startswith(HUB) else {"subset", "split", "validation"}
    return _without(under, {"data": dropped})
