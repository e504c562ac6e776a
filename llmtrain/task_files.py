"""Task files of lm-evaluation-harness in local folders: the tasks that they define, and the files that these tasks
need. Reading them does not require lm-evaluation-harness, and loads none of their code."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

from llmtrain.errors import SuiteError
from llmtrain.recipe_messages import format_value

FILES = Path(__file__).resolve().parent / "eval"
"""Folder of the suites and task files that come with the package."""


def read_yaml(path: Path, loader: type[yaml.SafeLoader], what: str) -> Any:
    """Return the content of a YAML file. Raises SuiteError, in which `what` names the kind of file, if it can't be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except RecursionError:
        raise SuiteError(f"{path}: can't be read as {what}: it is nested too deeply") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SuiteError(f"{path}: can't be read as {what}: {' '.join(str(error).split())}") from None


class TaskFunction(str):
    """Name `module.function` of a Python function, in a module next to the task file."""


class TaskLoader(yaml.SafeLoader):
    """YAML loader that reads `!function a.b` as the name `a.b` of a function and loads no code."""


TaskLoader.add_constructor("!function", lambda loader, node: TaskFunction(loader.construct_scalar(node)))


@dataclass(frozen=True)
class LocalTask:
    """A task, or a group or tag of several tasks, in a local folder."""

    name: str
    files: tuple[str, ...]
    """Data files, relative to --data-dir."""
    elsewhere: tuple[str, ...] = ()
    """Members that no local folder defines."""
    inline: tuple[str, ...] = ()
    """Members defined by settings in the group. If lm-evaluation-harness has a task of that name, the settings change it."""

    @property
    def is_complete(self) -> bool:
        """Return whether the task needs none of lm-evaluation-harness's own tasks."""
        return not (self.elsewhere or self.inline)


def local_tasks(folders: Sequence[Path]) -> dict[str, LocalTask]:
    """Return tasks, groups and tags by name. A later folder takes precedence."""
    configs: dict[str, dict[str, Any]] = {}
    for folder in folders:
        own: dict[str, dict[str, Any]] = {}
        tags: dict[str, list[str]] = {}
        try:
            paths = sorted(folder.rglob("*.yaml"))
        except OSError as error:
            raise SuiteError(
                f"{error.filename} can't be read ({error.strerror}); give a folder of task files"
            ) from None
        for path in paths:
            config = _with_includes(path)
            name = config.get("group") or config.get("task")
            if isinstance(name, str):
                own[name] = config
                for tag in _listed(config.get("tag")) if "group" not in config else ():
                    tags.setdefault(tag, []).append(name)
        configs |= {tag: {"task": names} for tag, names in tags.items()} | own
    return {name: _local_task(name, configs) for name in configs}


def digest_of(folders: Sequence[Path]) -> str:
    """Return a digest that changes when a file in a task folder changes, or a file elsewhere that the task files need."""
    digest = hashlib.sha256()
    for folder in folders:
        paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        paths += [needed for path in folder.rglob("*.yaml") for needed in _files_needed(path)]
        for name, path in sorted({os.path.relpath(path, folder): path for path in paths}.items()):
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _with_includes(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a task file's content, merged over the content of the files that it includes. `chain` lists the files
    whose includes led to this one. Raises SuiteError if an included file, or a module with a function of the task, is
    missing, or if a file includes itself."""
    if path.resolve() in chain:
        raise SuiteError(f"{path}: includes itself; leave out one include of {', '.join(file.name for file in chain)}")
    config = read_yaml(path, TaskLoader, "a task file")
    if not isinstance(config, dict):
        raise SuiteError(f"{path}: holds no mapping, expected a task (task: NAME) or a group (group: NAME)")
    _check_task(path, config)
    included = _listed(config.pop("include", None))
    modules = [(_module_of(name), f"!function {name}") for name in _functions(config)]
    for file, reason in [*((name, "include") for name in included), *modules]:
        if not os.path.isfile(path.parent / file) and not (reason != "include" and _is_installed(file)):
            known = next((found for found in (FILES / "tasks").rglob("*") if found.name == Path(file).name), None)
            remedy = f"copy {known} there" if known else "copy it from the source of the task file"
            raise SuiteError(f"{path}: needs {path.parent / file} ({reason}), which is missing; {remedy}")
    merged: dict[str, Any] = {}
    for file in included:
        merged |= _with_includes(path.parent / file, (*chain, path.resolve()))
    return merged | config


def _files_needed(path: Path) -> Iterator[Path]:
    """Yield the files that a task file includes, directly or through others, and the modules of the functions in all of
    them."""
    config = read_yaml(path, TaskLoader, "a task file")
    modules = (path.parent / _module_of(name) for name in _functions(config))
    yield from filter(os.path.isfile, modules)
    for file in _listed(config.get("include")):
        yield path.parent / file
        yield from _files_needed(path.parent / file)


def _check_task(path: Path, config: dict[str, Any]) -> None:
    """Raise SuiteError if a key that this module reads from a task file has a value of the wrong type."""
    kwargs = config.get("dataset_kwargs")
    for key, value, kinds, what in (
        *(("include", file, str, "the name of a file") for file in _listed(config.get("include"))),
        *(("tag", tag, str, "a name, or a list of names") for tag in _listed(config.get("tag"))),
        ("task", config.get("task"), str | list, "a name, or the list of a group's tasks"),
        ("group", config.get("group"), str, "a name"),
        ("dataset_kwargs", kwargs, dict, "a mapping"),
        ("dataset_kwargs.file", kwargs.get("file") if isinstance(kwargs, dict) else None, str, "the name of a file"),
    ):
        if value is not None and not isinstance(value, kinds):
            raise SuiteError(f"{path}: {key} is {format_value(value)}, expected {what}")


def _functions(value: Any) -> Iterator[str]:
    """Yield the names of the functions in a task file."""
    if isinstance(value, TaskFunction):
        yield str(value)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _functions(part)


def _module_of(function: str) -> str:
    return f"{function.rpartition('.')[0].replace('.', '/')}.py"


def _is_installed(module: str) -> bool:
    """Return whether a module that is not next to the task file is part of an installed package. False for a module without
    a package, because a forgotten file, such as code.py, may have the name of a module of Python's standard library."""
    names = module.removesuffix(".py").split("/")
    folders: Sequence[str] | None = None  # at first those of sys.path
    for name in names:
        spec = PathFinder.find_spec(name, folders) if name.isidentifier() else None
        if spec is None:
            return False
        folders = spec.submodule_search_locations or ()
    return len(names) > 1


def _listed(value: Any) -> list[Any]:
    """Return the value of a key as a list. A single value becomes a list of one, and None an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]


OWN = {"dataset_path", "custom_dataset", "class"}
"""Keys that mark a complete task. Settings without any of these keys change another task."""


def _local_task(name: str, configs: dict[str, dict[str, Any]]) -> LocalTask:
    files, elsewhere, inline = [], [], []
    for member, is_local, settings in _tasks_of(name, configs):
        file = settings["dataset_kwargs"].get("file") if isinstance(settings.get("dataset_kwargs"), dict) else None
        if isinstance(file, str):
            files.append(file)
        if not is_local:
            (inline if settings.keys() & OWN else elsewhere).append(str(member))
    return LocalTask(name, *(tuple(dict.fromkeys(found)) for found in (files, elsewhere, inline)))


def _tasks_of(
    member: Any, configs: dict[str, dict[str, Any]], changes: dict[str, Any] | None = None, groups: tuple[str, ...] = ()
) -> Iterator[tuple[Any, bool, dict[str, Any]]]:
    """Yield (name, whether a local folder defines it, settings) for each task of `member`, a name or an entry of a
    group. `changes` are settings of the enclosing `groups`, which override those in the task's file, as in
    lm-evaluation-harness."""
    given = member if isinstance(member, dict) else {"task": member}
    name = given.get("group", given.get("task"))
    config = configs.get(name) if isinstance(name, str) else None
    if config is not None and name in groups:
        raise SuiteError(f"task {name}: is a member of itself; leave it out of its group")
    settings = (config or {}) | (changes or {}) | (given if isinstance(member, dict) else {})
    members = (given if config is None else config).get("task")
    if isinstance(members, list):
        passed = {key: value for key, value in settings.items() if key not in ("group", "task", "tag")}
        for each in members:
            yield from _tasks_of(each, configs, passed, (*groups, str(name)))
    else:
        yield name, config is not None, settings
