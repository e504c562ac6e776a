"""Tests of the project's own rules on its source: imports between modules, names, lengths of files, and no traces of a machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from llmtrain.sync.methods import METHODS

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "llmtrain").rglob("*.py"))
PYTHON = PACKAGE + sorted(path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py"))

LAYERS = [
    {
        "errors",
        "files",
        "run_files",
        "checkpoint_retention",
        "config",
        "consistency",
        "seeding",
        "lr",
        "trace",
        "threads",
        "turns",
        "startup",
        "stop_signals",
        "compiling",
        "attention",
        "pieces",
        "process_limits",
        "reshard",
        "running_moments",
        "waiting",
        "quantities",
        "recipe_messages",
    },
    {"loss", "model", "data", "parallel"},
    {"sync"},
    {
        "completion",
        "console_table",
        "recipe_loader",
        "recipe_check",
        "recipe_diff",
        "machine_check",
        "recipe_files",
        "recipe_keys",
        "recipe_schema",
        "run_list",
        "run_plots",
        "validated_text",
        "plan",
        "pretrained",
        "step_counts",
        "suites",
        "task_files",
    },
    {"train"},
    {"launch", "doctor", "export"},
    {"compare", "eval"},
    {"recipe_commands"},
    {"cli", "usage_errors", "__main__"},
]
"""Parts of llmtrain by layer. A module imports only from its own layer and from those above it in this list."""
BANNED = """
    ahead alike arrived beside brought ending errand everybody everyone heirs meet meeting place places reshape said says settle
    stale tell tells together told unread whole
"""
"""Words that names must not have, because there is a standard term: `reshard` and not `reshape`, `in flight` and not `under way`."""
BRITISH = re.compile(r"isation|ynchronis|ormalis|nitialis|okenis|uantis|colour|neighbour")

SYNC_SEES = {
    "config",
    "errors",
    "recipe_messages",
    "seeding",
    "lr",
    "trace",
    "reshard",
    "pieces",
    "running_moments",
    "parallel",
    "sync",
    "turns",
}
COMMANDS = {"cli", "recipe_commands"}
"""Modules whose functions have the names of commands."""
MAX_LINES = 400
FACTORIES = {f"torch.{name}" for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn")}
PUBLIC_IN_SPITE_OF_ITS_NAME = {"os._exit"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def at_fault(found: Mapping[str, Collection[str]]) -> dict[str, Collection[str]]:
    """Return the entries of `found`, by file, that are not empty."""
    return {name: names for name, names in found.items() if names}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a module. They are cached, because walking through a module takes longer than all searches in it."""
    return tuple(ast.walk(tree))


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports, wherever in it: `from a.b import c` is `a.b.c`."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported(tree: ast.Module) -> set[str]:
    """Return the parts of llmtrain (`sync`, `data`, ...) that a module imports."""
    return {name.split(".")[1] for name in imported(tree) if name.startswith("llmtrain.")}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "llmtrain").with_suffix("").parts[0]


def layer_of(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the functions, classes and attributes of `self` that a module defines."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def given_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that readers of other files see: functions, classes, parameters and attributes of `self`."""
    yield from defined(tree)
    yield from (node.arg for node in nodes(tree) if isinstance(node, ast.arg))


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake case or camel case, in lower case."""
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def repeated(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Return the names that occur in more than one file, with these files."""
    places: dict[str, list[str]] = {}
    for name, path in names:
        places.setdefault(name, []).append(name_of(path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


@cache
def our_names() -> frozenset[str]:
    return frozenset(name for path in PYTHON for name in defined(parsed(path)))


def private_names(tree: ast.Module, ours: frozenset[str]) -> list[str]:
    """Return the private names of libraries that a module imports or uses: an `x._y` where no `_y` is ours."""
    names = [
        name for name in imported(tree) if not name.startswith("llmtrain.") and any(map(is_private, name.split(".")))
    ]
    reached = [node for node in nodes(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)]
    names += [ast.unparse(node) for node in reached if node.attr not in ours]
    return [name for name in names if name not in PUBLIC_IN_SPITE_OF_ITS_NAME]


def method_comparisons(tree: ast.Module) -> list[str]:
    """Return the comparisons and `case`s with the name of a method, alone or in a collection."""
    places = [node for node in nodes(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    constants = ((place, node) for place in places for node in ast.walk(place) if isinstance(node, ast.Constant))
    return [ast.unparse(place) for place, node in constants if node.value in METHODS]


def kept_texts() -> list[Path]:
    """Return the text files that are, or are about to be, under version control."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed, so there is no list of the repository's files")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def test_imports_point_one_way() -> None:
    package, *modules = PACKAGE
    assert set().union(*LAYERS) == {part_of(path) for path in modules}
    assert package == ROOT / "llmtrain" / "__init__.py" and not parts_imported(parsed(package))
    above = {
        name_of(path): [part for part in parts_imported(parsed(path)) if layer_of(part) > layer_of(part_of(path))]
        for path in modules
    }
    assert not at_fault(above), "these modules import modules that are built on them"


def test_sync_knows_no_model_recipe_or_data() -> None:
    found = {
        name_of(path): parts_imported(parsed(path)) - SYNC_SEES
        | {"Recipe"} & {name.rpartition(".")[2] for name in imported(parsed(path))}
        for path in PACKAGE
        if part_of(path) == "sync"
    }
    assert found and not at_fault(found)


def test_only_parallel_imports_fsdp_and_deepspeed() -> None:
    engines = ("torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")
    found = {
        name_of(path): [name for name in imported(parsed(path)) if name.startswith(engines)]
        for path in PACKAGE
        if part_of(path) != "parallel"
    }
    assert found and not at_fault(found)


def test_methods_are_known_by_their_choices_alone() -> None:
    found = {name_of(path): method_comparisons(parsed(path)) for path in PACKAGE if "methods" not in path.parts}
    assert found and not at_fault(found), "let the method's PRESET make this choice"


USERS_OF_PRIVATE_TORCH = {ROOT / "tests/emulated_gpu/races.py", ROOT / "tests/inside_torch.py"}
"""Files that use private parts of torch, for which there is no public API: they tell torch's search for data races what its streams
would tell it, keep a stream busy, count compilations, and empty caches."""


def test_tensors_of_the_host_name_their_device() -> None:
    """In a user's own loop, torch's default device may be a GPU."""

    def names_none(node: ast.AST) -> bool:
        is_factory = isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
        return is_factory and "device" not in {keyword.arg for keyword in node.keywords}

    files = [path for path in PACKAGE if part_of(path) in ("sync", "running_moments")]
    assert files and not at_fault({name_of(path): [*filter(names_none, nodes(parsed(path)))] for path in files})


def test_no_private_names_of_others() -> None:
    found = {
        name_of(path): private_names(parsed(path), our_names()) for path in PYTHON if path not in USERS_OF_PRIVATE_TORCH
    }
    assert found and not at_fault(found)


def test_a_collective_that_is_only_started_says_so_in_its_name() -> None:
    tree = parsed(ROOT / "llmtrain/parallel/comms.py")
    [comms] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Comms")
    methods = [node for node in comms.body if isinstance(node, ast.FunctionDef)]
    pending = {
        node.name for node in methods if node.returns and ast.unparse(node.returns).endswith(("Collective", "Work"))
    }
    assert "start_all_reduce" in pending and pending == {
        node.name for node in methods if node.name.startswith("start_")
    }


def test_no_class_public_function_or_module_has_the_name_of_another() -> None:
    classes = ((node.name, path) for path in PACKAGE for node in nodes(parsed(path)) if isinstance(node, ast.ClassDef))
    assert not repeated(classes)
    functions = (
        (node.name, path)
        for path in PACKAGE
        if part_of(path) not in COMMANDS
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef) and not is_private(node.name) and node.name != "main"
    )
    assert not repeated(functions)
    assert not repeated((path.stem, path) for path in PACKAGE if path.stem != "__init__")


def test_names_are_standard_terms_in_american_spelling() -> None:
    found = {
        name_of(path): [
            name
            for name in (path.stem, *given_names(parsed(path)))
            if words_of(name) & words_of(BANNED) or "under_way" in name or BRITISH.search(name)
        ]
        for path in PACKAGE
    }
    assert found and not at_fault(found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("read_whole", {"read", "whole"}),
        ("_Errand", {"errand"}),
        ("DCPReader", {"dcpreader"}),
        ("isDone", {"is", "done"}),
    ],
)
def test_names_are_split_into_words(name: str, words: set[str]) -> None:
    assert words_of(name) == words


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in PYTHON}
    assert not {name: length for name, length in lengths.items() if length >= MAX_LINES}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._utils import x", ["torch._utils.x"]),
        ("from torch.distributed import _x", ["torch.distributed._x"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch as t\nt.nn._x", ["t.nn._x"]),
        ("module._x", ["module._x"]),
        ("class A(nn.Module):\n  def f(self): self._x", ["self._x"]),
        ("from torch import __version__\nmodule.__class__", []),
        ("self._x\nself._x = 1\nother._x", []),
        ("def _x(): ...\nmodule._x", []),
        ("os._exit(1)", []),
    ],
)
def test_private_names_are_found(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    assert private_names(tree, frozenset(defined(tree))) == found


@pytest.mark.parametrize(
    "source", ["a == 'edit'", "'edit' != a", "a in ('x', 'diloco')", "match a:\n  case 'edit': pass"]
)
def test_comparisons_with_methods_are_found(source: str) -> None:
    assert method_comparisons(ast.parse(source))


def test_nothing_of_this_machine_is_kept() -> None:
    # Spelled in parts, so that this file does not match.
    machine = re.compile(r"(?<![\w./-])/(?:wor" + r"k|roo" + r"t|hom" + r"e/\w+|User" + r"s/\w+)/")
    registry = re.compile(r"index-ur" + r"l[ =]+\S+|https?://\S+/simp" + r"le\b\S*|regist" + r"ry[ =]+https?://\S+")
    found = []
    for path in kept_texts():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if machine.search(line) or registry.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_help_does_not_import_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "llmtrain", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "train" in shown.stdout
    modules = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in modules and not modules & {"torch", "transformers", "datasets", "deepspeed", "numpy"}


LIBRARY = """
import pkgutil, sys
import llmtrain.sync
for module in pkgutil.walk_packages(llmtrain.sync.__path__, "llmtrain.sync."):
    __import__(module.name)
llmtrain.sync.LocalUpdates
print(*sys.modules)
"""


@pytest.mark.fresh
def test_own_loops_import_no_transformers() -> None:
    ran = subprocess.run([sys.executable, "-c", LIBRARY], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(ran.stdout.split())
    assert {"llmtrain.sync.own_loop.local_updates", "llmtrain.sync.methods.edit", "torch"} <= modules
    unneeded = modules & {"transformers", "datasets", "deepspeed", "accelerate", "omegaconf", "pandas", "jinja2"}
    assert not unneeded
