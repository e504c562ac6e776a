"""The package's recipes: functions that find, list and copy them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from llmtrain.errors import RecipeError
from llmtrain.files import check_path
from llmtrain.run_files import RECIPE, is_run

T = TypeVar("T", str, Path | None, list[str], list[Path])


def recipes_of(package: Path) -> Path:
    """Return the folder of the package's recipes. In a wheel, it is `package`/recipes. In a checkout, that is a link to the top-level
    recipes/, which is returned itself in a copy without links (SkyPilot's uploads)."""
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


PACKAGED = recipes_of(Path(__file__).parent)
COMPARISONS, SCHEMA = "compare", "schema.json"


def find_recipe(given: Path) -> Path:
    """Return the file that a RECIPE argument names: an existing file, or else the package's recipe of that name, such as
    `quickstart` or `compare/traffic`. Raises UserError if the path is not usable."""
    check_path(given)
    if not given.name or given.suffix or given.is_absolute() or os.path.isfile(given) or ".." in given.parts:
        return given
    packaged = PACKAGED / given.with_suffix(".yaml")
    return packaged if os.path.isfile(packaged) else given


def find_recipe_or_run(given: Path) -> Path:
    """Return the recipe of a run if the argument is a run directory, and otherwise the result of `find_recipe`."""
    found = find_recipe(given)
    return given / RECIPE if is_run(given) else found


def recipe_named_in(file: Path, given: str) -> Path:
    """Return the recipe to which `file` refers as `given`: a path relative to the file's folder, or else the package's recipe of
    that name."""
    near, packaged = file.parent / given, PACKAGED / f"{given}.yaml"
    is_packaged = not Path(given).suffix and ".." not in Path(given).parts and os.path.isfile(packaged)
    return packaged if is_packaged and not os.path.isfile(near) else near


def usable_paths(given: T) -> T:
    """Check the paths in an argument or option (none, one or several) and return its value unchanged. Raises UserError if a path is
    too long for a file system, or leads through a folder that may not be read."""
    for path in [given] if isinstance(given, str | Path) else given or ():
        check_path(path)
    return given


def usable_arguments(arguments: list[str]) -> list[str]:
    """Check the paths among `arguments` as `usable_paths` does, and return `arguments` unchanged. Paths are the first argument, and
    later ones without `=`."""
    usable_paths([argument for number, argument in enumerate(arguments) if not number or "=" not in argument])
    return arguments


def recipe_names() -> list[str]:
    """Return the names of the package's recipes and comparisons, without the base files in base/."""
    files = [*sorted(PACKAGED.glob("*.yaml")), *sorted((PACKAGED / COMPARISONS).glob("*.yaml"))]
    return [file.relative_to(PACKAGED).with_suffix("").as_posix() for file in files]


def list_recipes() -> None:
    """List the recipes that come with the package.

    A name works like a file: llmtrain launch quickstart
    """
    names = recipe_names()
    width = max(map(len, names))
    for name in names:
        lines = (PACKAGED / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        # The first line of a comparison is its command, and the second one its question.
        typer.echo(f"{name:<{width}}  {lines[name.startswith(COMPARISONS)].removeprefix('# ')}")


def copy_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name in llmtrain recipe list, e.g. quickstart.")],
    to: Annotated[Path, typer.Option(help="Folder to copy to.", callback=usable_paths)] = Path("recipes"),
) -> None:
    """Copy a recipe of the package, and the files it is based on, to a folder here.

    A file that exists is kept if it is equal; one that differs is never replaced.
    """
    from llmtrain.recipe_messages import closest

    names = recipe_names()
    if name not in names:
        near = closest(name, names)
        hint = f"did you mean {near}?" if near else "llmtrain recipe list shows their names"
        raise RecipeError(f"{name}: the package has no such recipe; {hint}")
    texts = {to / file: (PACKAGED / file).read_bytes() for file in [*_with_references(f"{name}.yaml"), SCHEMA]}
    for path, text in texts.items():
        if path.exists() and (not path.is_file() or path.read_bytes() != text):
            raise RecipeError(
                f"{path} exists and differs from the package's; rename it, or choose another folder: --to"
            )
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    except OSError as error:
        raise RecipeError(
            f"{error.filename} can't be written ({error.strerror}); choose another folder: --to"
        ) from None
    for path in texts:
        typer.echo(path)


def _with_references(file: str) -> dict[str, None]:
    """Return a recipe's file and, recursively, the package's recipes that it names, such as in `base:` or `recipe:`. Paths are
    relative to the package's folder, in the order of their discovery."""
    import yaml

    found = {file: None}
    for text in _texts(yaml.safe_load((PACKAGED / file).read_text(encoding="utf-8"))):
        other = os.path.normpath(os.path.join(os.path.dirname(file), text))
        if text.endswith(".yaml") and (PACKAGED / other).is_file():
            found |= _with_references(other)
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
