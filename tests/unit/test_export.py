"""Tests of exports without a run: choices of weights, files, model cards, parity with training, and tokenizers."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmtrain.config import Recipe
from llmtrain.errors import CheckpointError, DataError, ModelError, TrainingError, UserError
from llmtrain.eval.texts import generate
from llmtrain.export import card, parity
from llmtrain.export.card import read_scores
from llmtrain.export.export import export
from llmtrain.export.folder import copy_tokenizer, write_configs, write_manifest, write_weights
from llmtrain.export.parity import Parity
from llmtrain.export.request import MEAN, Request, WeightSource
from llmtrain.export.source import OTHER, Source
from llmtrain.model import model_config
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.checkpoint_reader import FullTensorReader
from tests.unit.test_export_folder import MANIFEST

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", ["data.source=hf:owner/name", "run.name=mine"])


@pytest.fixture
def source(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Provide a checkpoint of two replicas with two shards each, whose files do not exist."""
    monkeypatch.setattr(Source, "load_tokenizer", lambda self: SimpleNamespace(eos_token="<|endoftext|>"))
    source = Source(tmp_path, 1000, tmp_path / "checkpoints/step-00001000", recipe)
    progress = {
        "predicted_tokens": 1024,
        "last_line": {"train/loss": 4.1},
        "last_eval": {"loss": 4.5, "tokens": 99},
        "last_evaluated": 950,
        "method": {"report": {"count": 13}},
    }
    vars(source)["state"] = {"mesh": [2, 2], "ranks": [progress] * 4}
    return source


@pytest.mark.parametrize(
    ("text", "choice", "ending"),
    [
        ("mean", MEAN, ""),
        ("anchor", WeightSource("anchor"), "-anchor"),
        ("replica:0", WeightSource("replica", 0), "-replica0"),
        ("replica:12", WeightSource("replica", 12), "-replica12"),
    ],
)
def test_weights_have_names(source: Source, text: str, choice: WeightSource, ending: str) -> None:
    assert WeightSource.parse(text) == choice and str(choice) == text
    assert Request(choice).folder_of(source) == source.run / f"export/step-00001000{ending}"
    assert Request(choice, "bf16").folder_of(source) == source.run / f"export/step-00001000{ending}-bf16"


@pytest.mark.parametrize("text", ["best", "", "replica", "replica:", "replica:-1", "replica:x", "Mean", "mean "])
def test_unknown_weights(text: str) -> None:
    with pytest.raises(UserError, match=r"--weights is '.*'; expected mean, anchor, or replica:K such as replica:0"):
        WeightSource.parse(text)


def test_unknown_dtype() -> None:
    with pytest.raises(UserError, match="--dtype is 'fp16'; expected fp32 or bf16"):
        Request(dtype="fp16")


class FewWeights:
    """Stand-in for a checkpoint's weights."""

    def __init__(self) -> None:
        self.shapes = dict.fromkeys("abcde", torch.Size([1000]))

    def read(self, name: str) -> torch.Tensor:
        return torch.full((1000,), float(ord(name)))


@pytest.mark.parametrize(("size", "files"), [("5GB", 1), ("8KB", 3), ("4KB", 5)])
def test_weights_are_cut_into_files_that_others_may_read(tmp_path: Path, size: str, files: int) -> None:
    write_weights(FewWeights(), tmp_path, torch.float32, size)
    names = [path.name for path in tmp_path.glob("*.safetensors")]
    assert len(names) == files
    seen = {}
    for name in names:
        assert (tmp_path / name).stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o666
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            seen |= {key: (name, file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118
    assert all(torch.equal(seen[key][1], FewWeights().read(key)) for key in "abcde")
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() is (files > 1)
    if files > 1:
        content = json.loads(index.read_text())
        assert content["weight_map"] == {key: name for key, (name, _) in seen.items()}
        assert content["metadata"]["total_size"] == 20_000
    else:
        assert names == ["model.safetensors"]


@pytest.mark.parametrize("size", ["many", "5", "5 XB", "GB", "-1GB"])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(UserError, match=f"--max-shard-size is '{size}'; expected a size such as 500MB or 5GB"):
        Request(max_shard_size=size)


@pytest.mark.parametrize("size", ["8KB", "1.5 gb", "100MB"])
def test_a_size_that_the_hub_reads(tmp_path: Path, size: str) -> None:
    write_weights(FewWeights(), tmp_path, torch.float32, Request(max_shard_size=size).max_shard_size)


def test_configurations_name_what_begins_and_ends_a_text(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, tie_word_embeddings=True)
    write_configs(config, "LlamaForCausalLM", 7, tmp_path, torch.bfloat16)
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    expected |= {"bos_token_id": 7, "eos_token_id": 7, "tie_word_embeddings": True, "hidden_size": 32}
    assert {key: written[key] for key in expected} == expected
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [7, 7, 7]


def header_of(text: str) -> dict:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def test_a_card_says_what_the_model_is(source: Source) -> None:
    text = card.model_card(source, MANIFEST)
    assert header_of(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llmtrain", "edit", "llama"],
        "datasets": ["owner/name"],
    }
    for line in (
        "# mine",
        "| method | `edit`: 13 synchronizations |",
        "| steps | 1,000 of 300 |",
        "| tokens | 4,096, sequences of 128 |",
        "| mesh | 2 replicas x 2 shards (FSDP2), fp32 |",
        "| validation loss | 4.5000 nats per token (perplexity 90.02), replicas' mean after step 950 |",
        "| weights | the mean of 2 replicas, after step 1,000, fp32 |",
        "Not evaluated on benchmarks yet.",
    ):
        assert line in text.splitlines(), line
    recipe = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["sync"]["method"] == "edit"


def test_a_card_shows_the_results_of_its_own_step(source: Source) -> None:
    folder = source.run / "eval"
    folder.mkdir()
    results = {"piqa": {"acc,none": 0.53, "acc_stderr,none": 0.0116, "alias": "piqa"}, "blimp": {"acc": 1, "n": None}}
    quick = {"suite": "quick", "checkpoint_step": 1000, "limit": 200, "results": {"quiz": {"acc": 0.27, "n": 200}}}
    for step in (1000, 500):
        content = {"suite": f"suite{step}", "checkpoint_step": step, "results": results}
        (folder / f"{step}.json").write_text(json.dumps(content))
    (folder / "zero.json").write_text(json.dumps(quick))
    (folder / "torn.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "odd.json").write_text('{"checkpoint_step": 1000, "results": {"a": 3}}')
    scores = read_scores(folder, 1000, "new")
    assert [(s.suite, s.task, s.metric, s.value, s.stderr) for s in scores] == [
        ("suite1000", "piqa", "acc", 0.53, 0.0116),
        ("suite1000", "blimp", "acc", 1.0, None),
        ("quick", "quiz", "acc", 0.27, None),
    ]
    text = card.model_card(source, MANIFEST)
    assert "| suite1000 | piqa | acc | – | 0.5300 ± 0.0116 |" in text and "suite500" not in text
    assert "| quick | quiz | acc | 200 | 0.2700 |" in text, "an evaluation of few documents is not in the header"
    [entry] = header_of(text)["model-index"]
    assert entry["name"] == "mine"
    for other in ({"weights": "replica:0"}, {"weights": "anchor"}, {"dtype": "bf16"}):
        of_other = card.model_card(source, MANIFEST.model_copy(update=other))
        assert "suite1000" not in of_other, "the scores are those of the mean"
    found = {(r["dataset"]["type"], r["metrics"][0]["type"], r["metrics"][0]["value"]) for r in entry["results"]}
    assert found == {("piqa", "acc", 0.53), ("blimp", "acc", 1.0)}


def test_a_run_that_diverged_has_a_card(source: Source) -> None:
    source.state["ranks"][0]["last_eval"]["loss"] = 1289.25
    assert "1289.2500 nats per token (perplexity over e^100)" in card.model_card(source, MANIFEST)


def test_a_model_is_exported_to_the_current_folder_but_not_to_the_root(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain.export.export._write", lambda source, request, folder: MANIFEST)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export(source, Request(), Path("."))[0] == tmp_path / "here"
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["README.md"]
    with pytest.raises(UserError, match=r"^/ can't be replaced by an export; choose another folder: export RUN --out"):
        export(source, Request(), Path("/"))


def test_another_export_to_the_same_folder_keeps_the_results(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain.export.export._write", lambda *given: write_manifest(given[2], MANIFEST) or MANIFEST)
    source.checkpoint.mkdir(parents=True)
    (source.checkpoint / "state.json").write_text("{}")  # its digest is not the one in the manifest
    results = tmp_path / "out/eval/small.json"
    export(source, Request(), tmp_path / "out")
    results.parent.mkdir()
    results.write_text("scores")
    export(source, Request(), tmp_path / "out")
    assert results.read_text() == "scores"
    for number, changed in enumerate((("checkpoint", "other"), ("weights", "anchor"), ("dtype", "bf16"))):
        others = MANIFEST.model_copy(update=dict([changed]))
        monkeypatch.setattr("llmtrain.export.export._write", lambda *given, m=others: write_manifest(given[2], m) or m)
        export(source, Request(), tmp_path / "out")
        assert not results.exists(), "the results are of other weights"
        old = tmp_path / f"out/eval.old{number or ''}/small.json"
        assert old.read_text() == "scores"
        results.parent.mkdir()
        results.write_text("scores")


def test_models_whose_logits_are_all_0_do_not_differ() -> None:
    assert Parity(0.0, 0.0, 0.0).relative == 0.0 and "0.0e+00 of the largest" in Parity(0.0, 0.0, 0.0).describe()


def test_parity_is_relative_to_the_largest_logit() -> None:
    line = Parity(2e-7, 8.0).describe()
    assert "2.0e-07, 2.5e-08 of the largest logit (allowed: 1e-05)" in line and "bf16" not in line
    assert "rounding to bf16 moved logits by up to 4.0e-02, 5.0e-03" in Parity(0.0, 8.0, 0.04).describe()


@pytest.mark.parametrize(
    ("difference", "largest", "is_same"), [(5e-4, 100.0, True), (2e-3, 100.0, False), (5e-6, 1e-3, False)]
)
def test_models_whose_logits_differ_by_more_than_rounding_are_not_the_same(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float, largest: float, is_same: bool
) -> None:
    """Logits may differ by 1e-5 of the largest logit, however large it is."""
    logits = torch.linspace(-1, 1, 11, dtype=torch.float64) * largest
    exported = SimpleNamespace(logits=logits + difference * torch.eye(11, dtype=torch.float64)[4])
    monkeypatch.setattr(parity, "training_model", lambda *_: None)
    monkeypatch.setattr(parity, "training_logits", lambda *_: logits)
    monkeypatch.setattr(parity, "load_exported", lambda _: lambda *_, **__: exported)
    expected = nullcontext() if is_same else pytest.raises(TrainingError, match="is not the trained one")
    with expected:
        parity.check_logits(model_config(recipe.model, 400), None, tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("request_", "is_met"),
    [
        (Request(), True),
        (Request(dtype="bf16"), False),
        (Request(WeightSource("anchor")), False),
        (Request(max_shard_size="5GB"), True),
        (Request(max_shard_size="1GB"), False),
    ],
    ids=["the same", "dtype", "weights", "the same size", "size"],
)
def test_an_export_in_another_form_is_another_export(source: Source, request_: Request, is_met: bool) -> None:
    vars(source)["digest"] = MANIFEST.checkpoint
    assert request_.is_met_by(MANIFEST, source) is is_met
    vars(source)["digest"] = "trained anew"
    assert not request_.is_met_by(MANIFEST, source)


def byte_tokenizer(**settings: bool | str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and an eos token."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    settings["clean_up_tokenization_spaces"] = False
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=tokens[-1], **settings)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a random Llama that has no bos token and sees 8 tokens at once."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=8, bos_token_id=None, eos_token_id=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_prompt_has_a_token_and_leaves_room_for_one(model: Path) -> None:
    assert generate(model, "abc", tokens=2).startswith("abc")
    with pytest.raises(UserError, match=r"--prompt is empty and this model has no token that begins a text; give a w"):
        generate(model, "")
    with pytest.raises(
        UserError, match="--prompt has 8 tokens, but the model has room for 8, including one new token; shorten it"
    ):
        generate(model, "12345678")
    with pytest.raises(UserError, match=r"--prompt is '\\udcff', which is not UTF-8"):
        generate(model, "\udcff")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": "x"}))
    with pytest.raises(ModelError, match=r"can't be loaded by transformers \(its values are not of the expected kinds"):
        generate(model, "abc")


@pytest.mark.parametrize(
    ("key", "value"), [("bos_token_id", "x"), ("eos_token_id", "x"), ("eos_token_id", [1, "x"]), ("pad_token_id", 257)]
)
def test_a_token_that_the_model_lacks_is_named(model: Path, key: str, value: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({key: value, "repetition_penalty": "x"}))
    message = rf"generation_config.json has {key}={re.escape(repr(value))}, expected the number of a token"
    with pytest.raises(ModelError, match=message):
        generate(model, "abc")
    (model / "generation_config.json").write_text(json.dumps({key: 3, "repetition_penalty": "x"}))
    assert generate(model, "abc", tokens=2).startswith("abc")


def test_a_weight_of_another_name_is_found_out(model: Path) -> None:
    assert parity.load_exported(model).dtype == torch.float32
    weights = load_file(model / "model.safetensors")
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainingError, match="does not find the exported model's weights by their names") as refused:
        parity.load_exported(model)
    assert "'missing_keys': ['model.norm.weight']" in str(refused.value)
    assert "'unexpected_keys': ['model.norm.scale']" in str(refused.value)


def test_special_tokens_that_a_text_spells_out_are_split_as_in_training(model: Path, tmp_path: Path) -> None:
    """The check refuses a folder that transformers loads without `split_special_tokens`."""
    with pytest.raises(TrainingError, match=r"tokenizer on '<unk> or <\|endoftext\|>'; nothing was written"):
        parity.check_tokenizer(byte_tokenizer(), model)
    (tmp_path / "exported").mkdir()
    byte_tokenizer().save_pretrained(tmp_path / "of training")
    copy_tokenizer(byte_tokenizer(), tmp_path / "of training", tmp_path / "exported")
    parity.check_tokenizer(byte_tokenizer(), tmp_path / "exported")
    ids = AutoTokenizer.from_pretrained(tmp_path / "exported")("<|endoftext|>")["input_ids"]
    assert len(ids) == len("<|endoftext|>") and 256 not in ids


def test_weights_that_a_folder_lacks_are_not_drawn_at_random_to_generate(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights of the model in its config.json, such as model\.norm\.wei"):
        generate(model, "abc")


@pytest.mark.parametrize(("part", "other"), [("normalizer", normalizers.Lowercase()), ("decoder", decoders.Fuse())])
def test_a_tokenizer_that_is_not_the_one_of_training_is_found_out(model: Path, part: str, other: object) -> None:
    trained_with = byte_tokenizer()
    byte_tokenizer(split_special_tokens=True).save_pretrained(model)
    parity.check_tokenizer(trained_with, model)
    setattr(trained_with.backend_tokenizer, part, other)
    with pytest.raises(TrainingError, match=r'tokenizer on "Once upon .*; nothing was written, please report'):
        parity.check_tokenizer(trained_with, model)


@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_is_not_exported(tmp_path: Path, value: float) -> None:
    tensors = {"good": torch.ones(3), "bad": torch.tensor([1.0, value])}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    stored = FullTensorReader(tmp_path, "copy it again", OTHER)
    assert torch.equal(stored.read_full_tensor("good"), torch.ones(3))
    with pytest.raises(CheckpointError, match=r"bad holds a value that is not finite; export another with --step"):
        stored.read_full_tensor("bad")


def test_without_its_data_a_tokenizer_can_not_be_found(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"data.source={tmp_path}/gone.txt"])
    with pytest.raises(DataError) as refused:
        _ = Source(tmp_path, 10, tmp_path, recipe).tokenizer_folder
    said = str(refused.value)
    assert said.startswith(f"the tokenizer of {tmp_path} can't be found (data.source: ") and "gone.txt" in said
    assert said.endswith(f"prepare its data again: llmtrain prepare {tmp_path}/recipe.yaml")


def test_a_damaged_tokenizer_is_one_line(recipe: Recipe, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source = Source(tmp_path, 10, tmp_path, recipe)
    assert source.load_tokenizer().split_special_tokens
    (tmp_path / "tokenizer/tokenizer.json").write_text('{"version": ')
    with pytest.raises(
        DataError, match=r"the tokenizer in \S+/tokenizer can't be read \(.*\); copy it again from where"
    ):
        source.load_tokenizer()
