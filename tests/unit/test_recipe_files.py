"""Recipes of the package by name: a file of that name comes first, names are listed, and copies read the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.errors import RecipeError
from llmtrain.recipe_files import PACKAGED, copy_recipe, find_recipe, recipe_names, recipes_of
from llmtrain.recipe_loader import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    return left.value.code or 0, captured.out + captured.err


def test_a_checkouts_recipes_are_those_of_the_package() -> None:
    files = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    assert files and all((PACKAGED / file).read_bytes() == (ROOT / "recipes" / file).read_bytes() for file in files)


def test_a_checkout_that_was_copied_without_links_has_its_recipes(tmp_path: Path) -> None:
    for folder in ("llmtrain", "recipes"):
        (tmp_path / folder).mkdir()
    assert recipes_of(tmp_path / "llmtrain") == tmp_path / "recipes"
    (tmp_path / "llmtrain/recipes").symlink_to("../recipes")
    assert recipes_of(tmp_path / "llmtrain") == tmp_path / "llmtrain/recipes"


def test_a_name_is_a_recipe_of_the_package_unless_it_is_a_file_here(elsewhere: Path) -> None:
    assert find_recipe(Path("quickstart")) == PACKAGED / "quickstart.yaml"
    assert find_recipe(Path("compare/traffic")) == PACKAGED / "compare" / "traffic.yaml"
    (elsewhere / "quickstart").mkdir()  # a run directory, perhaps
    assert find_recipe(Path("quickstart")) == PACKAGED / "quickstart.yaml"
    (elsewhere / "diloco_1b").write_text("train: {steps: 1}")
    for given in ("diloco_1b", "quickstart.yaml", "recipes/quickstart.yaml", "nothing", "../quickstart", "/quickstart"):
        assert find_recipe(Path(given)) == Path(given)


def test_every_command_takes_a_name(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = output(capsys, "recipe", "check", "quickstart", "--processes", "4")
    assert code == 0 and "fine" in shown
    for command in (["launch"], ["train"], ["prepare"], ["doctor"], ["recipe", "show"]):
        code, shown = output(capsys, *command, "quickstart", "optim.lrate=1")
        assert code == 2 and "optim.lrate is not a key" in shown, command
    code, shown = output(capsys, "compare", "compare/traffic", "optim.lrate=1")
    assert code == 2 and "there is no such file" not in shown
    assert not list(elsewhere.iterdir())


def test_a_file_that_does_not_exist_hints_at_the_package(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("recipes/quickstart.yaml", "quickstrat", "quickstart.yml"):
        code, shown = output(capsys, "launch", given)
        assert code == 2 and f"{given}: there is no such file; did you mean quickstart, which comes with" in shown
    code, shown = output(capsys, "launch", "mine.yaml")
    assert code == 2 and "names in llmtrain recipe list" in shown


def test_all_recipes_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = output(capsys, "recipe", "list")
    names = [line.split()[0] for line in shown.splitlines()]
    files = [path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")]
    assert code == 0 and names == recipe_names()
    assert sorted(names) == sorted(path.with_suffix("").as_posix() for path in files if path.parent.name != "base")
    assert all(len(line.split(maxsplit=1)[1]) > 20 and "#" not in line for line in shown.splitlines())


@pytest.mark.parametrize("name", ["quickstart", "edit_1b", "compare/traffic", "compare/bandwidth"])
def test_a_copy_is_complete_and_reads_the_same(elsewhere: Path, name: str) -> None:
    copy_recipe(name, Path("mine"))
    for copied in Path("mine").rglob("*.yaml"):
        original = PACKAGED / copied.relative_to("mine")
        assert copied.read_bytes() == original.read_bytes()
        if copied.parent.name not in ("compare", "base"):
            assert load_recipe(copied) == load_recipe(original)
    assert (Path("mine") / f"{name}.yaml").is_file() and Path("mine/schema.json").is_file()
    if name == "compare/traffic":
        named = ["quickstart", "edit_llama_stdlib"]
        assert any((Path("mine") / f"{other}.yaml").is_file() for other in named), "the named recipe is copied, too"


def test_a_copy_never_replaces_what_differs(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "recipe", "copy", "quickstart")[0] == 0
    assert output(capsys, "recipe", "copy", "quickstart")[0] == 0, "equal files are no obstacle"
    mine = Path("recipes/quickstart.yaml")
    mine.write_text("train: {steps: 1}")
    Path("recipes/schema.json").unlink()
    code, shown = output(capsys, "recipe", "copy", "quickstart")
    assert code == 2 and "recipes/quickstart.yaml exists and differs" in shown and "--to" in shown
    assert mine.read_text() == "train: {steps: 1}" and not Path("recipes/schema.json").exists()
    with pytest.raises(RecipeError, match=r"quikstart: the package has no such recipe; did you mean quickstart\?"):
        copy_recipe("quikstart", Path("there"))
    with pytest.raises(RecipeError, match=r"llmtrain recipe list shows their names"):
        copy_recipe("base/llama_1b", Path("there"))
    Path("file").write_text("")
    with pytest.raises(RecipeError, match=r"file.* can't be written \(.*\); choose another folder: --to"):
        copy_recipe("quickstart", Path("file"))
