"""Tests of exported models against the checkpoints that they come from: either engine, several meshes, in the middle of a round."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.data.dataset import open_dataset
from llmtrain.data.loader import eval_batches
from llmtrain.data.prepare import cache_path as cache_folder
from llmtrain.data.prepare import prepare
from llmtrain.errors import CheckpointError, DataError, TrainingError, UserError
from llmtrain.eval.texts import generate, load_model_and_tokenizer
from llmtrain.export import export as export_module
from llmtrain.export.export import export, exported
from llmtrain.export.folder import read_manifest
from llmtrain.export.parity import training_logits, training_model
from llmtrain.export.request import MEAN, Request, WeightSource
from llmtrain.export.source import ChosenWeights, Source, find_source
from llmtrain.loss import IGNORE_INDEX
from llmtrain.model import model_config
from llmtrain.train.checkpoint_files import dump_state, read_state
from tests.distributed.export_runs import IN_A_ROUND, LAST, ExportRun, make_run
from tests.distributed.pool import RankPool

MODELS = [(model, tied) for model in ("llama", "gpt_neo") for tied in (False, True)]
FSDP2 = [ExportRun(*model, replicas=2, shard=2) for model in MODELS]
FSDP2 += [ExportRun("llama", True, replicas=1, shard=4), ExportRun("gpt_neo", False, replicas=1, shard=4)]
FSDP2 += [ExportRun("llama", False, replicas=4, shard=1), ExportRun("gpt_neo", True, replicas=4, shard=1)]
ZERO = [
    *(ExportRun(*model, "zero3") for model in MODELS),
    ExportRun(engine="zero1"),
    ExportRun("llama", True, "zero3", 1, 2),
]
PLAIN = FSDP2[0]
PAIRS = [
    PLAIN,
    ExportRun("gpt_neo", False, replicas=1, shard=4),
    ExportRun("llama", True, "zero3", replicas=1, shard=2),
]
"""Runs of the fast tests: either model, tied and untied weights, both engines."""
RUNS = [
    run if run in PAIRS else pytest.param(run, marks=pytest.mark.deep)
    for run in FSDP2 + (ZERO if find_spec("deepspeed") else [])
]


class Runs:
    """Run directories, each of which is made when it is first asked for."""

    def __init__(self, folder: Path, pool: RankPool):
        self.folder, self.pool = folder, pool

    def path(self, run: ExportRun) -> Path:
        path = self.folder / "runs" / str(run)
        if not path.exists():
            self.pool.run(make_run, run.recipe(self.folder), world_size=run.replicas * run.shard, timeout=280)
        return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Provide runs on a pool of their own, because DeepSpeed keeps much global state."""
    pool = RankPool(4)
    yield Runs(tmp_path_factory.mktemp("export"), pool)
    pool.close()


@pytest.fixture
def plain(runs: Runs) -> Path:
    """Provide the directory of one of the runs."""
    return runs.path(PLAIN)


@pytest.fixture
def run(plain: Path, tmp_path: Path) -> Path:
    """Provide a copy of that directory, which a test may damage."""
    return shutil.copytree(plain, tmp_path / "run", ignore=shutil.ignore_patterns("export"))


def raw(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors by torch's own converter."""
    dcp_to_torch_save(checkpoint, folder / "raw.pt")
    return torch.load(folder / "raw.pt")


def weights_of(source: Source) -> ChosenWeights:
    return ChosenWeights(source.open_tensors(), source.state, MEAN)


def validation_loss(model: torch.nn.Module, source: Source) -> float:
    """Return the loss of a transformers model on the tokens on which training validates."""
    recipe, total, count = source.recipe, 0.0, 0
    tokens = open_dataset(cache_folder(recipe.data), {"validation": recipe.eval.tokens + 2}).tokens("validation")
    batches = eval_batches(
        tokens,
        max_tokens=recipe.eval.tokens,
        sequence_length=recipe.train.sequence_length,
        micro_batch=8,
        rank=0,
        world=1,
    )
    for inputs, labels in batches:
        logits = model(inputs).logits.double()
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        ).item()
        count += int((labels != IGNORE_INDEX).sum())
    return total / count


def greedy(source: Source, ids: list[int], count: int) -> list[int]:
    """Continue `ids` by the training modules until a text ends, with one whole forward pass per token."""
    tokenizer = source.load_tokenizer()
    model = training_model(model_config(source.recipe.model, len(tokenizer)), weights_of(source))
    for _ in range(count):
        ids = [*ids, int(training_logits(model, torch.tensor([ids]))[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    return ids


@pytest.mark.parametrize("which", RUNS, ids=str)
@torch.no_grad()
def test_the_exported_model_is_the_trained_one(runs: Runs, tmp_path: Path, which: ExportRun) -> None:
    source = find_source(runs.path(which), IN_A_ROUND)
    there = raw(source.checkpoint, tmp_path)
    folder, manifest = export(source, Request())
    assert folder == source.run / "export" / f"step-{IN_A_ROUND:08d}"
    assert manifest.parity.difference < 1e-5 and manifest.parity.scale > 0.1

    stored = load_file(folder / "model.safetensors")
    names = {name.partition("weights.causal_lm.")[2] for name in there if ".weights." in name}
    assert stored.keys() == names
    differing = 0
    for name, weight in stored.items():
        own = [there[f"replica{r}.weights.causal_lm.{name}"].double() for r in range(which.replicas)]
        assert torch.equal(weight, (sum(own) / len(own)).float()), name
        differing += not torch.equal(own[0], own[-1])
    assert differing == (len(stored) if which.replicas > 1 else 0), "replicas differ within a round"
    assert ("lm_head.weight" in stored) is not which.tied

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert tied is which.tied
    progress = source.state["ranks"][0]
    assert progress["last_evaluated"] == IN_A_ROUND  # by the engine that trained, with the mean of the replicas
    assert validation_loss(model, source) == pytest.approx(progress["last_eval"]["loss"], rel=1e-6)
    prompt = torch.tensor([[1, 300, 17]])
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
    assert written[0].tolist() == greedy(source, prompt[0].tolist(), 20)


def test_the_tokenizer_gives_the_ids_of_training(plain: Path, tmp_path: Path) -> None:
    """This includes special tokens that a text spells out, and the tokenizer that `generate` loads."""
    source, text = find_source(plain), "Every <unk> round: 3 × “steps”,\n\n then\tmore <|endoftext|> or less"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    shutil.copytree(source.tokenizer_folder, tmp_path / "tokenizer")
    names = {"source": "text.jsonl", "validation": "text.jsonl", "tokenizer": "tokenizer", "cache_dir": "cache"}
    data = source.recipe.data.model_copy(update={key: f"{tmp_path}/{name}" for key, name in names.items()})
    tokens = prepare(data, 1, 1, show_progress=False).tokens("train")
    *ids, eos = tokens.window(0, len(tokens)).tolist()
    folder = exported(source.run)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert (
        load_model_and_tokenizer(folder).tokenizer(text, add_special_tokens=False)["input_ids"] == ids and len(ids) > 30
    )
    assert tokenizer.decode(ids) == text and not {eos, tokenizer.unk_token_id} & set(ids)
    assert tokenizer.eos_token_id == eos == AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id


def test_anchor_and_replicas_are_their_own(plain: Path, tmp_path: Path) -> None:
    source = find_source(plain, IN_A_ROUND)
    there = raw(source.checkpoint, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    for choice, stored, ending in (
        ("anchor", "anchor.", "-anchor"),
        ("replica:0", "replica0.weights.", "-replica0"),
        ("replica:1", "replica1.weights.", "-replica1"),
    ):
        folder, _ = export(source, Request(WeightSource.parse(choice)))
        assert folder.name == f"step-{IN_A_ROUND:08d}{ending}"
        assert torch.equal(load_file(folder / "model.safetensors")[name], there[f"{stored}causal_lm.{name}"])
    assert not torch.equal(there[f"anchor.causal_lm.{name}"], there[f"replica0.weights.causal_lm.{name}"])


def test_after_the_last_synchronization_mean_anchor_and_replicas_are_equal(plain: Path) -> None:
    source = find_source(plain)
    assert source.step == LAST
    mean, *others = (
        load_file(export(source, Request(WeightSource.parse(text)))[0] / "model.safetensors")
        for text in ("mean", "anchor", "replica:0", "replica:1")
    )
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in mean.items())


def test_bf16_in_several_files(plain: Path) -> None:
    source = find_source(plain, IN_A_ROUND)
    folder, manifest = export(source, Request(dtype="bf16", max_shard_size="20KB"))
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and (folder / "model.safetensors.index.json").exists()
    assert manifest.parity.difference < 1e-5 < manifest.parity.rounding
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = load_file(export(source, Request())[0] / "model.safetensors")
    assert model.dtype == torch.bfloat16 and len(whole) == len(dict(model.named_parameters()))
    assert all(torch.equal(weight, whole[name].bfloat16()) for name, weight in model.named_parameters())


def test_a_complete_export_is_reused_and_a_damaged_one_made_again(run: Path) -> None:
    weights = exported(run) / "model.safetensors"
    made = weights.stat().st_ino
    assert exported(run) == weights.parent and weights.stat().st_ino == made
    with weights.open("r+b") as file:
        file.truncate(1000)
    assert exported(run) == weights.parent and weights.stat().st_size > 1000
    state = run / f"checkpoints/step-{LAST:08d}/state.json"  # the same step of a run trained anew
    state.write_text(dump_state({**read_state(state.parent), "trained": "anew"}))
    before = weights.stat().st_ino, read_manifest(weights.parent).checkpoint
    exported(run)
    assert (weights.stat().st_ino, read_manifest(weights.parent).checkpoint) != before
    assert [path.name for path in weights.parent.parent.iterdir() if not path.name.endswith(".lock")] == [
        weights.parent.name
    ]


def test_a_model_that_differs_is_an_error_and_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = export_module.write_weights

    def write_wrongly(weights: ChosenWeights, folder: Path, *rest: object) -> None:
        write(weights, folder, *rest)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][3] += 1e-3
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(export_module, "write_weights", write_wrongly)
    with pytest.raises(TrainingError, match=r"not the trained one: largest logit difference .* nothing was written"):
        exported(run)
    assert not [path for path in (run / "export").iterdir() if path.is_dir()]


def test_a_card_that_fails_leaves_no_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no card")

    monkeypatch.setattr(export_module, "model_card", fail)
    with pytest.raises(RuntimeError, match="no card"):
        exported(run)
    assert not [path for path in (run / "export").iterdir() if path.is_dir()]


def test_a_complete_export_that_can_not_be_written_is_used(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export of another user's run may be such a one."""
    folder = exported(run)
    monkeypatch.setattr(export_module, "can_write", lambda folder: False)
    monkeypatch.delattr(export_module, "locked")
    assert exported(run) == folder


def flip_a_bit(checkpoint: Path) -> None:
    """Flip a bit in the middle of the file, where the tensors are."""
    file = checkpoint / "__2_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_last_byte(checkpoint: Path) -> None:
    file = checkpoint / "__3_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: os.truncate(path / "__3_0.distcp", 5000),
            r"has 5000 bytes, \d+ were written; copy the",
        ),
        (lose_last_byte, r"__3_0\.distcp has \d+ bytes, \d+ were written"),
        (flip_a_bit, r"step-00000005 is damaged: __2_0\.distcp is not what was written: its digest differs; copy the"),
        (lambda path: (path / "__1_0.distcp").unlink(), r"__1_0\.distcp is gone"),
        (lambda path: (path / ".metadata").unlink(), r"step-00000005 is damaged: \.metadata is gone; copy"),
        (lambda path: (path / ".metadata").write_bytes(b"torn"), r"\.metadata has 4 bytes, \d+ were written"),
        (lambda path: (path / "state.json").write_text("{"), r"state\.json can't be read"),
    ],
    ids=["truncated", "a byte short", "a bit flipped", "missing", "no metadata", "damaged metadata", "damaged state"],
)
def test_a_damaged_checkpoint_is_one_line(run: Path, damage, message: str) -> None:
    damage(run / f"checkpoints/step-{LAST:08d}")
    with pytest.raises(CheckpointError, match=message) as failure:
        exported(run)
    assert "\n" not in str(failure.value)
    assert not list(run.glob("export/step-*"))
    assert exported(run, IN_A_ROUND).name == f"step-{IN_A_ROUND:08d}"


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("hidden_size: 32", "hidden_size: 48", r"\S+ is \[\d+, 32\] there, \[\d+, 48\] by the recipe"),
        ("num_hidden_layers: 2", "num_hidden_layers: 1", r"model\.layers\.1\.\S+ is \[.*\] there, none by the recipe"),
        ("tie_word_embeddings: false", "tie_word_embeddings: true", r"lm_head\.weight is .* there, none by the recipe"),
    ],
)
def test_a_checkpoint_of_another_model(run: Path, old: str, new: str, name: str) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(old, new))
    with pytest.raises(CheckpointError, match=f"is of another model than the run's recipe.yaml: {name}"):
        exported(run)


def test_a_checkpoint_of_another_recipe_with_the_same_model(run: Path) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lr: 0.01\n", "lr: 0.02\n"))
    message = (
        r"step-00000005 is of another recipe than \S+/recipe.yaml \(optim.lr: 0.01 there, 0.02 here\); put back the"
    )
    with pytest.raises(CheckpointError, match=message):
        exported(run)


def test_what_a_run_does_not_have(run: Path) -> None:
    for wanted, message in (
        (lambda: find_source(run, 3), r"has no checkpoint of step 3; there are: 4, 5"),
        (lambda: find_source(run.parent / "rum"), r"rum does not exist; give one that training made"),
        (lambda: find_source(run.parent), r"is not a run directory \(it has no recipe.yaml\)"),
        (lambda: export(find_source(run), Request(WeightSource.parse("replica:2"))), r"has replica:0 to replica:1"),
        (lambda: export(find_source(run), Request(max_shard_size="big")), r"--max-shard-size is 'big'; expected"),
        (lambda: export(find_source(run), Request(), run), r"exists and is not an exported model"),
    ):
        with pytest.raises(UserError, match=message):
            wanted()
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        find_source(run)


def test_without_an_anchor(plain: Path) -> None:
    source = find_source(plain, IN_A_ROUND)
    source.state["shared"]["anchor"] = []
    with pytest.raises(UserError, match=r"has no anchor \(.*\); use mean"):
        weights = ChosenWeights(source.open_tensors(), source.state, WeightSource.parse("anchor"))
        weights.read("model.norm.weight")


def without_data(run: Path) -> None:
    """Make a run look as on another machine than the one that trained it."""
    lines = (run / "recipe.yaml").read_text().splitlines()
    moved = [f"  cache_dir: {run.parent}/gone" if "cache_dir" in line else line for line in lines]
    (run / "recipe.yaml").write_text("\n".join(moved))


def test_without_the_tokenizer(run: Path) -> None:
    without_data(run)
    message = r"the tokenizer of \S+ is neither in \S+/tokenizer nor in \S+gone\S+ .*llmtrain prepare \S+recipe.yaml"
    with pytest.raises(DataError, match=message):
        exported(run)


def test_the_runs_own_copy_of_its_tokenizer_is_enough(run: Path) -> None:
    beside_the_data = find_source(run).tokenizer_folder
    shutil.copytree(beside_the_data, run / "tokenizer")
    without_data(run)
    assert find_source(run).tokenizer_folder == run / "tokenizer"
    assert (exported(run) / "tokenizer.json").read_bytes() == (beside_the_data / "tokenizer.json").read_bytes()


def test_generate_writes_the_same_from_a_run_and_from_its_export(plain: Path) -> None:
    run = plain
    text = generate(run, "Every round", tokens=12, seed=3)
    assert text.startswith("Every round") and len(text) > len("Every round")
    assert generate(exported(run), "Every round", tokens=12, seed=3) == text
    greedy_text = generate(run, "Every", tokens=12, temperature=0, seed=1)
    assert generate(run, "Every", tokens=12, temperature=0, seed=2) == greedy_text
    assert generate(run, "", tokens=500)  # stops where the model's positions end
    with pytest.raises(UserError, match=r"--prompt has \d+ tokens, but the model has room for 64"):
        generate(run, "Every round " * 40)
