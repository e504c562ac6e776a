"""Tests of lists of texts in a recipe: what entries take from `data`, which node prepares which text, and what may change when a
run continues."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.config import DataSection, Recipe
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.text_list import key_of, texts_of
from llmtrain.errors import DataError, RecipeError
from llmtrain.launch.attempts import Attempt
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import Preflight, check_here
from llmtrain.launch.torchrun import _replicas_left, _texts_left
from llmtrain.recipe_check import check, check_group
from llmtrain.recipe_keys import key_groups_at
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.train.prepare_data import describe_kept_texts, prepare_texts
from llmtrain.train.run_dir import recipe_changes
from llmtrain.validated_text import common_unit, read_validated_text
from tests.unit.test_compare_runs import lines_of, write
from tests.unit.test_preflight import RECIPE, SMALL

TWO = "[{source: hf:owner/one, weight: 3, subset: s}, {source: texts/two.jsonl.gz, text_key: body, separator: null}]"
SITES = "[{source: a.txt}, {source: a.txt}, {source: b.txt}]"


def recipe(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, [*SMALL, *overrides])


def test_an_entry_takes_from_data_what_it_does_not_give() -> None:
    made = recipe(f"data.sources={TWO}", "data.validation_fraction=0.2", "data.text_key=content", "data.max_tokens=500")
    assert made.data.source is None and [entry.weight for entry in made.data.sources] == [3, 1]
    one, two = made.data.texts().values()
    assert list(made.data.texts()) == ["one", "two"]
    assert (one.source, one.subset, one.text_key, one.separator) == ("hf:owner/one", "s", "content", "<|endoftext|>")
    assert (two.source, two.subset, two.text_key, two.separator) == ("texts/two.jsonl.gz", None, "body", None)
    assert {(text.validation_fraction, text.max_tokens, text.is_list) for text in (one, two)} == {(0.2, 500, False)}
    assert key_of(made.data, "two") == "data.sources[1].source" and key_of(recipe().data, "") == "data.source"
    assert recipe().data.texts() == {"": recipe().data}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.source=texts", "data.validation=texts"], "data.validation is texts, the text that is trained on"),
        (["data.source=hf:owner/one", "data.validation=train"], "data.validation is train, the text"),
        (["data.sources=[{source: a.txt, validation: a.txt}]"], "data.validation of a is a.txt, the text"),
    ],
)
def test_a_text_is_not_validated_on_itself(keys: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        check(recipe(*keys), 1)


def test_a_resolved_recipe_with_a_list_reads_back_the_same(tmp_path: Path) -> None:
    for key, entries in (("sources", TWO), ("per_replica", SITES)):
        made = recipe(f"data.{key}={entries}", "data.separator=null", "run.name=a")
        (tmp_path / "a.yaml").write_text(resolved_yaml(made))
        assert load_recipe(tmp_path / "a.yaml") == made
        plain = load_recipe(tmp_path / "a.yaml", ["data.source=stories"])
        assert plain.data.source == "stories" and not plain.data.is_list, "an override names another text"
        assert load_recipe(tmp_path / "a.yaml", ["data.separator=x"]).data.is_list


def test_the_keys_of_entries_are_in_the_reference() -> None:
    (group,) = key_groups_at("data.sources")
    assert [key.name for key in group.keys][:2] == ["source", "name"] and group.keys[-1].name == "weight"
    (key,) = key_groups_at("data.per_replica.validation")[0].keys
    assert key.default == "`null`"


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_needs_an_entry_per_replica(replicas: int) -> None:
    made = recipe("data.per_replica=[{source: a.txt}, {source: b.txt}]", "data.tokenizer=gpt2")
    if replicas <= 2:
        return check_group(made, replicas)
    with pytest.raises(RecipeError, match=r"data.per_replica has 2 entries, but the run has 3 .*parallel.replicas=2"):
        check_group(made, replicas)


def test_a_node_has_the_texts_of_its_replicas() -> None:
    data = recipe(f"data.per_replica={SITES}").data
    assert (
        list(texts_of(data, [0, 1])) == ["a"]
        and list(texts_of(data, [2])) == ["b"]
        and list(texts_of(data)) == ["a", "b"]
    )
    mixed = recipe(f"data.sources={TWO}").data
    assert list(texts_of(mixed, [0])) == ["one", "two"], "every replica reads both texts of a mixture"
    two = Preflight(processes=6, replicas=3, shards=2, reason="", memory=0)
    assert [list(two.replicas_of(Nodes(3, node))) for node in range(3)] == [[0], [1], [2]]
    assert [list(two.replicas_of(Nodes(2, node))) for node in range(2)] == [[0, 1], [1, 2]], (
        "the second replica is on both nodes"
    )


def test_nodes_that_are_left_keep_their_texts() -> None:
    made = recipe("data.per_replica=[{source: a.txt}, {source: b.txt, text_key: body}, {source: c.txt}]")
    start = Preflight(processes=3, replicas=3, shards=1, reason="", memory=0)
    replicas = _replicas_left(start, Nodes(3, 2), Attempt(1, Nodes(2, 1), (0, 2)))
    left = _texts_left(made, replicas)
    assert [entry.source for entry in recipe(*left).data.per_replica] == ["a.txt", "c.txt"]
    assert recipe_changes(made, recipe(*left)) == []
    assert _texts_left(recipe(), [0, 2]) == []


def test_sites_may_come_and_go_but_stay_what_they_are() -> None:
    before = recipe("data.per_replica=[{source: a.txt}, {source: b.txt}]")
    other = recipe("data.per_replica=[{source: c.txt}, {source: b.txt}, {source: a.txt}]")
    assert recipe_changes(before, other) == []
    moved = recipe("data.per_replica=[{source: elsewhere/a.txt}, {source: b.txt}]")
    assert recipe_changes(before, moved) == ["source of a in data.per_replica: 'a.txt' there, 'elsewhere/a.txt' here"]
    mixture = recipe("data.sources=[{source: a.txt}, {source: b.txt}]")
    assert any(line.startswith("data.sources: []") for line in recipe_changes(before, mixture))
    weighted = recipe("data.sources=[{source: a.txt, weight: 2}, {source: b.txt}]")
    assert len(recipe_changes(mixture, weighted)) == 1


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    for name in "ab":
        texts = (f"a text about {name} and {number}\n" * 20 for number in range(40))
        (tmp_path / f"{name}.txt").write_text("<|endoftext|>".join(texts))
    folders = [f"data.cache_dir={tmp_path}/data", f"run.out_dir={tmp_path}/runs", "data.validation_fraction=0.2"]
    return [*folders, "parallel.replicas=2", "parallel.shards=1", "data.tokenizer=train:300"]


def test_the_texts_of_a_mixture_have_one_tokenizer(
    tmp_path: Path, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is trained on the first text, or is one version of a tokenizer from the hub."""
    sources = f"data.sources=[{{source: {tmp_path}/a.txt}}, {{source: {tmp_path}/b.txt}}]"
    made = recipe(*keys, sources)
    check(made, 2)
    assert check_here(made).prepared is None
    texts = prepare_texts(made, show_progress=False)
    alone = prepare(DataSection(**made.data.texts()["a"].model_dump(exclude={"sources", "per_replica"})), 1, 1)
    assert texts["a"].directory == alone.directory
    first, second = ((text.directory / "tokenizer/tokenizer.json").read_text() for text in texts.values())
    assert first == second and texts["b"].directory != cache_path(made.data.texts()["b"])
    assert list(check_here(made).texts) == ["a", "b"]

    hub = recipe(*keys[:-1], "data.tokenizer=org/model", sources)
    monkeypatch.setattr("llmtrain.train.prepare_data.prepare", lambda data, *_, **__: texts[Path(data.source).stem])
    assert prepare_texts(hub, show_progress=False) == texts
    texts["b"] = replace(texts["b"], index=texts["b"].index.model_copy(update={"eos_id": 7}))
    with pytest.raises(DataError, match=r"\S+/b-\S+ has a different version of org/model \(\S+\) than \S+/a-"):
        prepare_texts(hub, show_progress=False)
    assert prepare_texts(made, show_progress=False) == texts, "a folder's name has a digest of its trained tokenizer"


def test_every_text_is_checked_before_a_start_by_its_key(tmp_path: Path, keys: list[str]) -> None:
    entries = f"[{{source: {tmp_path}/a.txt}}, {{source: {tmp_path}/none.txt}}]"
    with pytest.raises(Exception, match=r"data.sources\[1\].source: .*none.txt: no such file"):
        check_here(recipe(*keys, f"data.sources={entries}"))
    sites = recipe(*keys[:-1], f"data.tokenizer={tmp_path}/tokenizer", f"data.per_replica={entries}")
    trained = prepare(recipe(*keys, f"data.source={tmp_path}/a.txt").data, 1, 1)
    trained.directory.joinpath("tokenizer").rename(tmp_path / "tokenizer")
    with pytest.raises(Exception, match=r"data.per_replica\[1\].source: .*none.txt: no such file"):
        check_here(sites)
    assert list(prepare_texts(sites, show_progress=False, replicas=[0])) == ["a"], "the other site's text is not needed"
    short = recipe(
        *keys[:-1], f"data.tokenizer={tmp_path}/tokenizer", f"data.per_replica={entries}", "data.max_tokens=300"
    )
    prepare_texts(short, show_progress=False, replicas=[0])
    check_here(short, Nodes(2, 0), 1)
    with pytest.raises(Exception, match=r"a: training data: 300 tokens, but one step .* needs 513"):
        check_here(recipe_with_batch(short, 32), Nodes(2, 0), 1)


def recipe_with_batch(recipe: Recipe, batch: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"global_batch": batch})})


def test_prepare_makes_all_texts(tmp_path: Path, keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    entries = f"data.sources=[{{source: {tmp_path}/a.txt}}, {{source: {tmp_path}/b.txt}}]"
    with pytest.raises(SystemExit) as left:
        main(["prepare", str(RECIPE), *SMALL, *keys, entries])
    assert not left.value.code and capsys.readouterr().out.count("vocabulary 300") == 2


def test_an_interrupted_preparation_says_what_it_keeps_of_each_text(tmp_path: Path, keys: list[str]) -> None:
    made = recipe(*keys, f"data.sources=[{{source: {tmp_path}/a.txt}}, {{source: {tmp_path}/b.txt}}]")
    assert describe_kept_texts(made.data) == "no tokens are written yet; no tokens are written yet"
    prepare(made.data.texts()["a"], 1, 1)
    assert re.fullmatch(r"\S+/a-\S+ keeps .* tokens; no tokens are written yet", describe_kept_texts(made.data))
    prepare_texts(made, show_progress=False)
    assert re.fullmatch(r"\S+/a-\S+ keeps .* tokens; \S+/b-\S+ keeps .* tokens", describe_kept_texts(made.data))


def test_losses_of_lists_are_compared_if_the_texts_are_the_same(tmp_path: Path) -> None:
    def unit_of(*lists: str):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        ratios = (3.0, 3.5)
        runs = [
            (name, read_validated_text(write(folder, name, 4.0, keys, ratio=ratio), lines_of(4.0, ratio)))
            for name, keys, ratio in zip("xy", lists, ratios, strict=True)
        ]
        return common_unit(runs)

    mixture = "data.sources=[{source: a, weight: 3}, {source: b, weight: 1}]"
    assert unit_of(mixture, "data.sources=[{source: b, weight: 1}, {source: a, weight: 3, name: z}]").is_ranked
    other = unit_of(mixture, "data.sources=[{source: a, weight: 2}, {source: b, weight: 1}]")
    assert not other.is_ranked and "data.sources is" in other.note
    assert not unit_of(mixture, "data.source=a").is_ranked
    sites = "data.per_replica=[{source: a}, {source: b}]"
    assert unit_of(sites, "data.per_replica=[{source: b}, {source: a}, {source: a}]").is_ranked
    assert not unit_of(sites, "data.per_replica=[{source: b}, {source: c}]").is_ranked


@pytest.mark.parametrize("number", [0, 1])
def test_the_recipes_of_the_page_are_right(tmp_path: Path, number: int) -> None:
    page = (RECIPE.parents[1] / "docs" / "texts.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "recipe.yaml").write_text(
        blocks[number].replace("quickstart.yaml", str(RECIPE.parent / "quickstart.yaml"))
    )
    made = load_recipe(tmp_path / "recipe.yaml")
    check(made, made.parallel.replicas * made.parallel.shards if number else None)
    assert list(made.data.texts()) == ["stories", "stdlib"]


def test_the_texts_of_a_mixture_are_known_by_their_own_bytes_per_token(tmp_path: Path) -> None:
    def identity(weights: str, *losses: float):
        parts = zip(("eval/a/", "eval/b/", "eval/"), (*losses, sum(losses)), (3.0, 2.0, 9.0), strict=True)
        line = {}
        for prefix, loss, ratio in parts:
            line |= {f"{prefix}loss": loss, f"{prefix}bpb": loss / math.log(2) / ratio}
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        data = {"sources": [{"name": name, "weight": int(w)} for name, w in zip("ab", weights, strict=True)]}
        (path / "recipe.yaml").write_text(json.dumps({"data": data}))
        return read_validated_text(path, [{"step": 1}, line]).bytes_per_token

    assert identity("31", 4.0, 5.0) == pytest.approx(2.75) == identity("31", 3.0, 4.9)
    assert identity("11", 4.0, 5.0) == pytest.approx(2.5) and identity("11", 4.0, 0.0) is None
