"""Tests of `llmtrain eval` with a tiny model, compared with lm-evaluation-harness itself."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import DataError, ModelError, SuiteError
from llmtrain.eval import units
from llmtrain.eval.command import evaluate
from llmtrain.eval.harness import run_task, task_manager
from llmtrain.eval.texts import load_model_and_tokenizer, losses
from llmtrain.suites import FILES, TaskSection
from tests.mother import session
from tests.unit.test_export_folder import complete

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install -c constraints.txt -e '.[eval]'"
)


SUITE = """
batch_size: 4
tasks:
  - {task: offline_arc_easy, show: [acc_norm, bits_per_byte]}
  - {task: offline_lambada_openai, show: [acc, perplexity, bits_per_byte]}
  - {task: offline_blimp}
"""
NAMES = ("Tom", "Lily", "Sam", "Mia", "Ben", "Sue", "Max", "Amy")
PARADIGMS = sorted(path.stem for path in (FILES / "tasks/blimp").glob("*.yaml"))


def arc(number: int) -> dict[str, Any]:
    options = ["a red ball", "the big tree", "two cats", "rain", "the moon"][: 4 + number % 2]
    labels = list("ABCDE" if number % 3 else "12345")[: len(options)]
    question = f"What did {NAMES[number]} see {number} times?"
    return {"question": question, "choices": {"text": options, "label": labels}, "answerKey": labels[number % 4]}


def processed(row: dict[str, Any]) -> dict[str, Any]:
    gold = row["choices"]["label"].index(row["answerKey"])
    return {"query": f"Question: {row['question']}\nAnswer:", "choices": row["choices"]["text"], "gold": gold}


def hellaswag(number: int) -> dict[str, Any]:
    return {
        "ind": number,
        "activity_label": "Playing [header] ball",
        "ctx_a": f"{NAMES[number]} [title] throws a ball.",
        "ctx_b": "then  the dog",
        "ctx": "",
        "endings": ["runs [step] away.", " catches it.", "sleeps.  ", "flies."],
        "label": str(number % 4),
    }


ROWS = {
    "arc_easy/validation.jsonl": [arc(i) for i in range(8)],
    "arc_challenge/validation.jsonl": [arc(i) for i in range(4)],
    "arc_easy/test.processed.jsonl": [processed(arc(i)) for i in range(8)],
    "hellaswag/rubriks_subset.original.jsonl": [hellaswag(i) for i in range(4)],
    "lambada_openai/test.jsonl": [{"text": f"{name} had a red ball. It was the ball of {name}"} for name in NAMES],
    "piqa/validation.jsonl": [
        {"goal": f"Find {n}.", "sol1": "Look.", "sol2": "Sleep now.", "label": i % 2} for i, n in enumerate(NAMES)
    ],
    "openbookqa/validation.jsonl": [
        {**arc(i), "question_stem": arc(i)["question"], "answerKey": " " + arc(i)["answerKey"]} for i in range(4)
    ],
    "boolq/validation.jsonl": [
        {"question": f"is {n} tall", "answer": i % 3 == 0, "passage": f"{n} is here."} for i, n in enumerate(NAMES)
    ],
    **{
        f"blimp/{paradigm}.jsonl.gz": [
            {"sentence_good": f"{name} sees a cat.", "sentence_bad": f"{name} see a cat."} for name in NAMES[:4]
        ]
        for paradigm in PARADIGMS
    },
}
STORIES = [f"{name} had a ball.\nThe ball was red, and {name} was glad: très bien!" for name in NAMES]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a few documents for each offline task and a text, and return their folder."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    (folder / "stories.txt").write_text("\n<|endoftext|>\n".join(STORIES))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama whose tokenizer has a token for each byte, and return its folder."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def write_model(folder: Path, seed: int) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def suite(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(SUITE)
    return str(tmp_path / "mine.yaml")


def run_harness(*arguments: str) -> None:
    """Run `lm_eval run ARGUMENTS` in this process, a fork of the mother. lm-eval indexes only the tasks in the given
    folder, without its own thousands of tasks."""
    import lm_eval.tasks
    from lm_eval.__main__ import cli_evaluate

    lm_eval.tasks.TaskManager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    sys.argv = ["lm_eval", "run", *arguments]
    cli_evaluate()


@pytest.fixture(scope="module")
def scored(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of `llmtrain eval`, which is also in its output file."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "mine.yaml").write_text(SUITE)
    (result,) = evaluate([model], str(folder / "mine.yaml"), data_dir=data, device="cpu", out=folder)
    assert json.loads((folder / "tiny/mine.json").read_text()) == result
    return result


def test_an_accuracy_is_beside_that_of_chance(scored: dict[str, Any]) -> None:
    assert 0 < scored["results"]["offline_arc_easy"]["acc"] < 1
    assert scored["tasks"]["offline_arc_easy"]["chance"] == pytest.approx((1 / 4 + 1 / 5) / 2)


def test_the_harness_itself_gives_the_same_scores(
    scored: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    arguments = {
        "--model": "hf",
        "--model_args": f"pretrained={model}",
        "--tasks": "offline_arc_easy,offline_lambada_openai,offline_blimp",
        "--include_path": str(FILES / "tasks"),
        "--metadata": json.dumps({"data_dir": str(data)}),
        "--batch_size": "4",
        "--device": "cpu",
        "--output_path": str(tmp_path / "theirs"),
    }
    flat = [part for pair in arguments.items() for part in pair]
    process = session().fork(run_harness, *flat, cwd=tmp_path, capture=True)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output[-2000:]
    theirs = json.loads(next((tmp_path / "theirs").rglob("results_*.json")).read_text())["results"]
    compared = 0
    for task, metrics in theirs.items():
        for key, value in metrics.items():
            metric, comma, _ = key.partition(",")
            if comma and metric != "perplexity_stderr":  # theirs is from another number of random resamples
                assert scored["results"][task][metric] == value, (task, key)
                compared += 1
    assert set(theirs) == set(scored["results"]) and compared == 4 + 3 + 2 * 7


def requests(task: Any) -> list[tuple[Any, ...]]:
    """Return a task's requests to the model, with the right answers."""
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [(*instance.args, task.doc_to_target(instance.doc)) for instance in task.instances]


@pytest.mark.parametrize(
    ("folder", "name", "file"),
    [
        ("arc", "arc_easy", "arc_easy/validation.jsonl"),
        ("arc", "arc_challenge", "arc_challenge/validation.jsonl"),
        ("hellaswag", "hellaswag", "hellaswag/rubriks_subset.original.jsonl"),
        ("piqa", "piqa", "piqa/validation.jsonl"),
        ("openbookqa", "openbookqa", "openbookqa/validation.jsonl"),
        ("super_glue/boolq", "boolq", "boolq/validation.jsonl"),
        ("lambada", "lambada_openai", "lambada_openai/test.jsonl"),
        ("blimp", "blimp_passive_1", "blimp/passive_1.jsonl.gz"),
    ],
)
def test_offline_tasks_ask_what_the_harness_asks(folder: str, name: str, file: str, data: Path, tmp_path: Path) -> None:
    import lm_eval.tasks

    rows = [dict(row) for row in ROWS[file]]
    for row in rows:
        if name == "boolq":  # the column's name in SuperGLUE
            row["label"] = int(row.pop("answer"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    its_own = Path(lm_eval.tasks.__file__).parent / folder
    local = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    splits = {"training_split": None, "validation_split": None, "test_split": "test"}
    overrides = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": local, **splits}
    group = {"group": "its_own", "task": [{"task": name, **overrides}]}
    theirs = lm_eval.tasks.TaskManager(include_path=its_own, include_defaults=False).load([group])["tasks"][name]
    ours = task_manager((FILES / "tasks",), data, False).load([f"offline_{name}"])["tasks"][f"offline_{name}"]
    assert requests(ours) == requests(theirs) and len(requests(ours)) >= 4
    assert [metric["metric"] for metric in ours.get_config("metric_list")] == [
        metric["metric"] for metric in theirs.get_config("metric_list")
    ]
    assert ours.VERSION == theirs.VERSION


def test_prompts_written_out_are_the_same_requests(data: Path) -> None:
    manager = task_manager((FILES / "tasks",), data, False)
    tasks = manager.load(["offline_arc_easy", "offline_arc_easy_test"])["tasks"]
    original, written_out = (requests(tasks[name]) for name in ("offline_arc_easy", "offline_arc_easy_test"))
    assert [request[:2] for request in original] == [request[:2] for request in written_out]
    assert [int(request[2]) for request in original] == [int(request[2]) for request in written_out]


def test_an_interrupted_evaluation_continues(
    model: Path, data: Path, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    ran = []

    def counted(section: TaskSection, *rest: Any) -> Any:
        if section.task == interrupted_at:
            raise KeyboardInterrupt
        ran.append(section.task)
        return run_task(section, *rest)

    def again() -> dict[str, Any]:
        return evaluate([model], suite, data_dir=data, device="cpu", out=tmp_path / "out")[0]

    monkeypatch.setattr(units, "run_task", counted)
    interrupted_at = "offline_lambada_openai"
    with pytest.raises(KeyboardInterrupt):
        again()
    assert ran == ["offline_arc_easy"] and not (tmp_path / "out/tiny/mine.json").exists()
    interrupted_at = ""
    first = again()
    assert ran == ["offline_arc_easy", "offline_lambada_openai", "offline_blimp"]
    assert again()["results"] == first["results"]
    assert len(ran) == 3  # the third evaluation runs no task


def test_wrong_tasks_are_refused(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    class OnlyOurs:
        all_tasks = ("offline_piqa", "piqa")

    monkeypatch.setattr("llmtrain.eval.harness.task_manager", lambda *_: OnlyOurs)  # lm-eval's whole index takes long
    (tmp_path / "bad.yaml").write_text("tasks: [{task: offline_pica}]")
    with pytest.raises(SuiteError) as error:
        evaluate([model], str(tmp_path / "bad.yaml"), data_dir=data)
    assert str(error.value) == (
        "task offline_pica: neither lm-evaluation-harness nor llmtrain has it; did you mean offline_piqa?"
    )
    manager = units.task_manager((FILES / "tasks",), data, False)
    with pytest.raises(SuiteError, match=r"few_shot is 2, but offline_blimp_.* always takes 0; leave few_shot out"):
        run_task(TaskSection(task="offline_blimp", few_shot=2), None, lambda: None, manager)


def test_an_answer_that_is_too_long_for_the_model_is_named(model: Path, tmp_path: Path) -> None:
    rows = [{"goal": "Wait", "sol1": "and " * length, "sol2": "no", "label": 0} for length in (3, 50)]
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "s.yaml").write_text("tasks: [{task: offline_piqa}]")
    arguments = {"data_dir": tmp_path, "device": "cpu", "out": tmp_path}
    with pytest.raises(ModelError) as error:
        evaluate([model], str(tmp_path / "s.yaml"), **arguments)
    assert str(error.value).startswith("task offline_piqa: an answer has 201 tokens and the model sees 128 at once")
    (result,) = evaluate([model], str(tmp_path / "s.yaml"), limit=1, **arguments)
    assert result["results"]["offline_piqa"]["n"] == 1


def test_data_that_is_only_on_the_hub_says_what_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    manager = lm_eval.tasks.TaskManager(
        include_path=Path(lm_eval.tasks.__file__).parent / "piqa", include_defaults=False
    )
    with pytest.raises(DataError, match=r"task piqa: its data is not available .*use --suite offline with --data-dir"):
        run_task(TaskSection(task="piqa"), None, lambda: None, manager)


def test_checkpoints_of_runs_over_time_against_a_baseline(model: Path, data: Path, tmp_path: Path) -> None:
    """Runs whose checkpoints are gone are evaluated from their exports."""
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "recipe.yaml").write_text("")
        steps = (10, 20) if run == "a" else (20,)
        lines = [{"step": step, "tokens": step * 1000} for step in steps]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in steps:
            folder = tmp_path / run / f"export/step-{step:08d}"
            write_model(folder, seed=step + len(run)) if run == "a" else shutil.copytree(model, folder)
            complete(folder)
    suite = tmp_path / "quick.yaml"
    suite.write_text(
        "tasks: [{task: offline_piqa}]\ntexts: [{name: stories, file: stories.txt, window: 16}]\n"
        "samples: {prompts: [Tom], tokens: 3}\n"
    )
    results = evaluate(
        [tmp_path / "a"], str(suite), over_time=True, data_dir=data, device="cpu", baseline=tmp_path / "b"
    )
    assert [(each["checkpoint_step"], each["tokens"]) for each in results] == [(10, 10_000), (20, 20_000), (20, 20_000)]
    assert json.loads((tmp_path / "a/eval/quick.json").read_text())["checkpoint_step"] == 20
    assert json.loads((tmp_path / "a/eval/quick-over-time.json").read_text())["checkpoints"] == results
    assert (tmp_path / "a/eval/quick-over-time.png").read_bytes().startswith(b"\x89PNG")
    assert results[0]["against"]["digest"] == results[2]["digest"] == "abc"
    assert "against" not in results[2] and not (tmp_path / "b/eval/quick.json").exists()
    tests = {(each["task"], each["metric"]): each["test"] for each in results[0]["against"]["scores"]}
    assert tests == {("offline_piqa", "acc"): "McNemar's exact test", ("stories", "bits_per_byte"): "paired bootstrap"}
    assert [each["prompt"] for each in results[0]["written"]] == ["Tom"]

    with (tmp_path / "a/export/step-00000010/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(ModelError, match=r"step-00000010 is damaged, .*its files are not those in export\.json"):
        evaluate([tmp_path / "a"], str(suite), step=10, data_dir=data)


def test_a_text_costs_what_predicting_it_token_by_token_costs(model: Path) -> None:
    import torch

    loaded = load_model_and_tokenizer(model, "cpu")
    nll, tokens = losses(STORIES[:3], loaded, window=16, batch_size=2)
    stream = [t for text in STORIES[:3] for t in (loaded.first_token, *loaded.tokenizer(text)["input_ids"])]
    owners = [i for i, text in enumerate(STORIES[:3]) for _ in range(1 + len(text.encode()))]
    expected, counts = [0.0] * 3, [0] * 3
    for place in range(len(stream) - 1):
        context = stream[place - place % 16 : place + 1]
        with torch.inference_mode():
            log_probabilities = loaded.model(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        expected[owners[place]] -= log_probabilities[stream[place + 1]].item()
        counts[owners[place]] += 1
    assert tokens == counts
    assert nll == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("file", "every", "known"),
    [
        pytest.param("valid", 10, 1.5075, marks=pytest.mark.deep),  # from a loop over windows in fp64
        pytest.param("valid", 1, 1.509, marks=pytest.mark.deep),
        pytest.param("train", 5, 1.380, marks=pytest.mark.deep),
    ],
)
def test_a_real_model_has_its_known_losses(
    file: str, every: int, known: float, shared_data: Path, tmp_path: Path
) -> None:
    """The known losses were measured separately, in fp32 where nothing else is said, with windows of 512 tokens."""
    (tmp_path / "s.yaml").write_text(
        f"batch_size: 8\ntexts: [{{name: text, file: tinystories/{file}.txt, every: {every}, window: 512}}]"
    )
    model = shared_data / "models/stories260K"
    (result,) = evaluate([model], str(tmp_path / "s.yaml"), data_dir=shared_data, device="cpu", out=tmp_path)
    scores = result["results"]["text"]
    assert scores["loss"] == pytest.approx(known, abs=0.002)
    assert scores["perplexity"] == math.exp(scores["loss"])
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] * scores["tokens"] / math.log(2) / scores["bytes"])
