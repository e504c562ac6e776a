"""Starts from weights of a transformers folder: fitting weights are read exactly, others are refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoConfig, LlamaConfig, LlamaForCausalLM

from llmtrain.config import Recipe
from llmtrain.errors import UserError
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import check_here, check_start
from llmtrain.launch.preview import preview
from llmtrain.model import PREFIX, blocks_of, build, initialize, model_config, named_weights
from llmtrain.parallel.world import World
from llmtrain.pretrained import Pretrained, architecture_keys, find_pretrained
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.train.checkpoint_files import digests
from llmtrain.train.initial_weights import InitialWeights, check_initial_weights
from tests.unit.test_checkpoint_files import ALONE, flip
from tests.unit.test_export import byte_tokenizer

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NEO = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
LLAMA = LlamaConfig(vocab_size=257, max_position_embeddings=64, rms_norm_eps=1e-5, **SIZES)
TIED = LlamaConfig(vocab_size=257, max_position_embeddings=64, tie_word_embeddings=True, **SIZES)
GPT_NEO = GPTNeoConfig(vocab_size=257, max_position_embeddings=64, window_size=4, **NEO)
CPU = torch.device("cpu")


def save(folder: Path, config: object = LLAMA, tokenizer: bool = True, **options: object) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "weights")


def recipe_of(folder: Path, *keys: str, model: str = "") -> Recipe:
    """Return a recipe that starts from `folder` with its tokenizer."""
    path = folder.parent / "mine.yaml"
    path.write_text(f"model: {{from_weights: {folder}{model}}}\ntrain: {{steps: 10, sequence_length: 32}}\n")
    return load_recipe(path, [f"data.tokenizer={folder}", f"run.out_dir={folder.parent}/runs", *keys])


def refusal(recipe: Recipe) -> str:
    with pytest.raises(UserError) as caught:
        check_initial_weights(recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite model.safetensors with other tensors. Names have `__` in place of dots, and None removes a tensor."""
    changed = {name.replace("__", "."): value for name, value in tensors.items()}
    kept = {name: value for name, value in (load_file(folder / "model.safetensors") | changed).items()}
    save_file({name: value for name, value in kept.items() if value is not None}, folder / "model.safetensors")


def change_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def started(weights: InitialWeights, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that starts from the weights."""
    model = build(model_config(recipe.model), 16)
    for block in blocks_of(model):
        initialize(model, block, 1, CPU, torch.float32, weights.read)
    return {name.removeprefix(PREFIX): parameter.detach() for name, _, _, parameter in named_weights(model)}


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT_NEO], ids=["llama", "tied", "gpt_neo"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "3KB"}], ids=["one file", "sharded"])
def test_a_model_starts_from_exactly_the_weights(tmp_path: Path, config: object, options: dict) -> None:
    folder = save(tmp_path / "weights", config, **options)
    assert (folder / "model.safetensors.index.json").exists() is bool(options)
    recipe = recipe_of(folder)
    weights = check_initial_weights(recipe)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict(theirs.named_parameters(remove_duplicate=False))
    found = started(weights, recipe)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert weights.describe() == f"weights: from {folder} ({len(dict(theirs.named_parameters()))} tensors)"


def test_bf16_is_upcast(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LLAMA).to(torch.bfloat16).save_pretrained(tmp_path / "weights")
    byte_tokenizer().save_pretrained(tmp_path / "weights")
    recipe = recipe_of(tmp_path / "weights")
    found, stored = started(check_initial_weights(recipe), recipe), load_file(tmp_path / "weights/model.safetensors")
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], stored[name].float()) for name in stored)


@pytest.mark.parametrize(
    "config",
    [LLAMA, TIED, GPT_NEO, *map(AutoConfig.for_model, ("gpt2", "qwen3", "gemma3_text", "gpt_neox"))],
    ids=lambda config: config.model_type,
)
def test_an_architecture_survives_the_recipe(tmp_path: Path, config: object) -> None:
    config.save_pretrained(tmp_path / "weights")
    recipe = recipe_of(tmp_path / "weights")
    assert recipe.model.type == config.model_type and "num_hidden_layers" in {
        *recipe.model.config,
        *config.attribute_map,
    }
    assert architecture_keys(model_config(recipe.model)) == architecture_keys(config)
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(recipe))
    shutil.rmtree(tmp_path / "weights")  # a recipe that gives the architecture does not need them
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


def test_a_run_has_the_architecture_in_its_own_recipe(folder: Path) -> None:
    recipe = recipe_of(folder)
    run = folder.parent / "runs/mine"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(resolved_yaml(recipe))
    (folder / "config.json").unlink()
    assert recipe_of(folder) == recipe
    with pytest.raises(
        UserError, match=r"weights is a folder without a config.json; give a run, one of its checkpoints"
    ):
        recipe_of(folder, "run.name=another")


@pytest.mark.parametrize(
    ("keys", "fragment"),
    [
        ({"hidden_size": 16}, "has hidden_size 8, but the recipe's model has 16; give model.config.hidden_size=8, or"),
        ({"tie_word_embeddings": True}, "has tie_word_embeddings false, but the recipe's model has true"),
        ({"rms_norm_eps": 1e-6}, "has rms_norm_eps 1e-05, but the recipe's model has 1e-06"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "has rope_parameters {rope_theta:10000.0,rope_type:default}, but the recipe's model has {",
        ),
        ({"vocab_size": 300}, "has vocab_size 257, but the recipe's model has 300"),
        ({"num_hidden_layers": 3}, "has num_hidden_layers 2, but the recipe's model has 3"),
        ({"initializer_range": 0.5, "max_position_embeddings": 512, "attention_dropout": 0.1}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_model_is_refused_by_the_key(folder: Path, keys: dict, fragment: str | None) -> None:
    config = architecture_keys(LLAMA) | keys
    recipe = recipe_of(folder, model=f", config: {json.dumps(config)}")
    if fragment is None:
        assert check_initial_weights(recipe) is not None
        return
    found = refusal(recipe)
    assert found.startswith(f"model.from_weights: {folder} {fragment}")
    assert found.endswith("leave out model.type, config and from_config to take the architecture of the weights")


def test_another_type_is_refused(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"model.type is gpt_neo, but model.from_weights=.* is a llama model; leave model.type"
    ):
        recipe_of(folder, model=", type: gpt_neo")
    recipe = recipe_of(folder, model=f", type: gpt_neo, config: {json.dumps(NEO)}")
    assert "is a llama model, but the recipe's is gpt_neo; leave out model.type" in refusal(recipe)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_refused_also_with_weights(tmp_path: Path, kind: str) -> None:
    """The weights of gpt_oss have the names of the model's parameters, so they would otherwise be read."""
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 257}
    recipe = recipe_of(save(tmp_path / "weights", AutoConfig.for_model(kind, **sizes)), "sync.warmup_steps=2")
    expected = f"model: {kind} is a mixture of experts"
    assert refusal(recipe).startswith(expected)
    with pytest.raises(UserError, match=expected):
        check_here(recipe, Nodes(1), 1)


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (lambda f: change(f, model__norm__weight=None), "lacks model.norm.weight of the recipe's model; give complete"),
        (
            lambda f: change(f, model__norm__weight=None, lm_head__weight=None),
            "lacks model.norm.weight and 1 more tensors of",
        ),
        (lambda f: change(f, v_head=torch.ones(1)), "has v_head, which the recipe's model lacks; give weights of this"),
        (lambda f: change(f, model__norm__weight=torch.ones(4)), "has model.norm.weight of shape [4], but the recipe's model has [8]"),
        (lambda f: change(f, model__norm__weight=torch.ones(8, dtype=torch.int8)), "model.norm.weight has type I8"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no header"), "model.safetensors is damaged or cut short ("),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "has pytorch_model.bin and no model.safetensors; reading a pickled file can run code, so convert it",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors; give a run, one of its checkpoints"),
        (lambda f: (f / "config.json").write_text("{"), "config.json' is not a valid JSON file"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer in "),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "can't be read (its values are not of the expected"),
    ],
)  # fmt: skip
def test_what_is_missing_unexpected_or_damaged_is_named(
    folder: Path, damage: Callable[[Path], object], fragment: str
) -> None:
    recipe = recipe_of(folder)
    damage(folder)
    assert fragment in refusal(
        recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": "train:9"})})
    )


@pytest.mark.parametrize(
    ("index", "fragment"),
    [
        ("[]", "model.safetensors.index.json is damaged"),
        ('{"weight_map": {"a": "../secret"}}', "names '../secret', which is not a file in its folder"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "model-00001-of-00002.safetensors is missing"),
    ],
)
def test_an_index_that_is_wrong_is_one_line(folder: Path, index: str, fragment: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert fragment in refusal(recipe_of(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named(folder: Path, value: float) -> None:
    change(folder, model__norm__weight=torch.full((8,), value))
    recipe = recipe_of(folder)
    with pytest.raises(UserError, match=r"model.safetensors: model.norm.weight holds a value that is not finite"):
        started(check_initial_weights(recipe), recipe)


def test_names_of_old_files_are_understood(tmp_path: Path) -> None:
    """Old files lack the prefix of the model below the head, have masks, and store a tied head twice."""
    folder = save(tmp_path / "weights", GPT_NEO)
    stored = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in stored.items()}
    old |= {"h.0.attn.attention.bias": torch.ones(1, 1, 4, 4), "h.0.attn.attention.masked_bias": torch.tensor(-1e9)}
    save_file(old | {"lm_head.weight": stored["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    recipe = recipe_of(folder)
    found = started(check_initial_weights(recipe), recipe)
    assert all(torch.equal(found[name], value) for name, value in stored.items())
    save_file(old | {"lm_head.weight": torch.zeros(257, 8)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head.weight differs from wte.weight, but config.json ties them"):
        started(check_initial_weights(recipe), recipe)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    other = shutil.copytree(folder, folder.parent / "other", ignore=shutil.ignore_patterns("model*", "config*"))
    content = json.loads((other / "tokenizer.json").read_text())
    first, second = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)[:2]
    content["model"]["vocab"] |= {first: 1, second: 0}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert refusal(recipe_of(folder, f"data.tokenizer={other}")) == (
        f"model.from_weights: {folder} was trained with a different tokenizer than data.tokenizer={other}: its token 0, {first!r}, "
        f"is 1 there; give data.tokenizer={folder}"
    )
    for file in folder.glob("token*"):
        file.unlink()
    assert check_initial_weights(recipe_of(folder, f"data.tokenizer={other}")) is not None, "nothing to compare with"


def test_a_vocabulary_may_have_more_rows_and_a_tokenizer_more_tokens(tmp_path: Path) -> None:
    folder = save(tmp_path / "weights", LlamaConfig(vocab_size=300, max_position_embeddings=64, **SIZES))
    more = byte_tokenizer()
    more.add_tokens(["<new>"])
    more.save_pretrained(tmp_path / "more")
    assert check_initial_weights(recipe_of(folder, f"data.tokenizer={tmp_path}/more")) is not None
    config = {key: value for key, value in architecture_keys(LLAMA).items() if key != "vocab_size"}
    assert refusal(recipe_of(folder, model=f", config: {json.dumps(config | {'rms_norm_eps': 1e-6})}")) == (
        f"model.from_weights: {folder} has a vocabulary of 300, but the recipe's tokenizer has 257 tokens; give "
        f"data.tokenizer={folder}, or if it is that one, model.config.vocab_size=300"
    )


def test_a_folder_of_an_export_is_compared_with_its_digests(folder: Path) -> None:
    recipe = recipe_of(folder)
    files = digests(folder, [path.name for path in folder.iterdir()])
    (folder / "export.json").write_text(json.dumps({"files": files}))
    weights = check_initial_weights(recipe)
    weights.verify(ALONE)
    assert weights.recorded.keys() == {"path", "step", "digest"} and weights.recorded["path"] == str(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"weights on .* is damaged: model.safetensors is not what was written; copy it"
    ):
        check_initial_weights(recipe).verify(ALONE)
    (folder / "export.json").write_text('{"files": {"../a": [1, "b"]}}')
    assert "names '../a', which is not a file in its folder" in refusal(recipe)
    (folder / "export.json").write_text("{}")
    assert "export.json is damaged; export the model again" in refusal(recipe)


def test_hosts_with_other_files_are_named(folder: Path) -> None:
    recipe = recipe_of(folder)
    weights, theirs = (check_initial_weights(recipe) for _ in range(2))
    weights.verify(ALONE)
    digest = weights.recorded["digest"]
    seen: list[tuple] = []
    of_other = SimpleNamespace(
        all_gather_object=lambda mine, what: [mine] if mine is None else seen.append(mine) or [mine]
    )
    change(folder, model__norm__weight=torch.zeros(8))
    theirs.verify(SimpleNamespace(world=World(1, 2, 0, 1), all_ranks=of_other))
    assert theirs.recorded["digest"] != digest
    ((_, _), files) = seen[0]
    both = SimpleNamespace(
        all_gather_object=lambda mine, what: [None] if mine is None else [mine, ((1, "there"), files)]
    )
    change(folder, model__norm__weight=torch.ones(8))
    with pytest.raises(
        UserError,
        match=r"weights: rank 1 on there has a different model.safetensors than rank 0 on .*; copy the folder from",
    ):
        weights.verify(SimpleNamespace(world=World(0, 2, 0, 1), all_ranks=both))


def test_paths_that_are_no_weights_are_one_line(folder: Path) -> None:
    (folder.parent / "runs/none").mkdir(parents=True)
    (folder.parent / "runs/none/recipe.yaml").touch()
    (folder.parent / "state.json").write_text("[]")
    for path, fragment in (
        (folder / "model.safetensors", "is a file; give a run, one of its checkpoints, or a folder with config.json"),
        (folder.parent / "runs", "is a folder without a config.json"),
        (folder.parent / "runs/none", "has no complete checkpoint; train it until it writes one"),
        (folder.parent, "state.json is not of a checkpoint"),
    ):
        with pytest.raises(UserError, match=fragment):
            find_pretrained(str(path))
    with pytest.raises(
        UserError, match=r"model.from_weights: 'no/such/folder' is neither a file or folder here nor a model"
    ):
        find_pretrained("no/such/folder")


def test_a_model_of_the_hub_is_downloaded_once_and_without_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict] = []

    def snapshot_download(name: str, **options: object) -> str:
        asked.append(options)
        if not options.get("local_files_only"):
            (folder.parent / "aside").rename(folder / "model.safetensors")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("llmtrain.pretrained.require_on_hub", lambda *args, **options: None)
    (folder / "model.safetensors").rename(folder.parent / "aside")  # an interrupted download
    assert find_pretrained("owner/name") is None
    assert find_pretrained("owner/name", download=True) == Pretrained("owner/name", folder)
    assert find_pretrained("owner/name", download=True) == Pretrained("owner/name", folder)
    (allowed,) = [options["allow_patterns"] for options in asked if "allow_patterns" in options]
    assert not any(fnmatch(name, pattern) for pattern in allowed for name in ("pytorch_model.bin", "model.pt", "a.py"))


def test_a_start_is_checked_before_anything_is_written(folder: Path) -> None:
    (folder.parent / "text.txt").write_text(
        "<|endoftext|>".join(f"a text about {number}\n" * 20 for number in range(40))
    )
    keys = (f"data.source={folder.parent}/text.txt", f"data.cache_dir={folder.parent}/data", "sync.warmup_steps=2")
    keys += ("data.validation_fraction=0.2",)
    recipe = recipe_of(folder, *keys)
    assert f"weights: from {folder} (21 tensors)" in preview(Path("a.yaml"), recipe, check_here(recipe, Nodes(1), 1))
    change(folder, model__norm__weight=None)
    for start in (check_here, check_start):
        with pytest.raises(UserError, match=r"lacks model.norm.weight of the recipe's model"):
            start(recipe, Nodes(1), 1)
    assert not (folder.parent / "data").exists() and not (folder.parent / "runs").exists()


def test_a_run_that_has_begun_does_not_look_for_its_weights(folder: Path) -> None:
    recipe = recipe_of(folder)
    shutil.rmtree(folder)
    assert "neither a file or folder here" in refusal(recipe) or "needs the Hugging Face hub" in refusal(recipe)
    mirrored = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"mirror": f"{folder}-copy"})}
    )
    (folder.parent / "weights-copy/mine/checkpoints/step-00000005").mkdir(parents=True)
    assert refusal(mirrored), "the mirror's checkpoint is not complete"
    (folder.parent / "weights-copy/mine/checkpoints/step-00000005/state.json").touch()
    assert check_initial_weights(mirrored) is None
    (folder.parent / "runs/mine/checkpoints/step-00000005").mkdir(parents=True)
    assert check_initial_weights(recipe) is None
