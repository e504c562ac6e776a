"""Wrong recipes, each refused in one line that names the key, the given value, and the allowed values or a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.config import SyncSection
from llmtrain.errors import RecipeError, UserError
from llmtrain.recipe_check import check, check_vocabulary
from llmtrain.recipe_loader import load_recipe
from llmtrain.recipe_messages import one_of
from llmtrain.sync.methods import METHODS
from tests.unit.wrong_lists import WRONG_LISTS

RECIPE = """
model: {type: llama, config: {hidden_size: 160, num_hidden_layers: 2, num_attention_heads: 5, max_position_embeddings: 256}}
data: {source: stdlib, tokenizer: "train:2048"}
train: {steps: 200, sequence_length: 128, global_batch: 32, micro_batch: 8}
parallel: {replicas: 2, shards: 2}
sync: {method: edit, warmup_steps: 40, period: {kind: steps, every: 16}}
"""
PROCESSES = 4

GPT_NEO = """
train: {{steps: 10, sequence_length: 64}}
sync: {{method: diloco}}
model: {{type: gpt_neo, config: {{hidden_size: 64, num_heads: {heads}, num_layers: {layers}, attention_types: [[[global, local], 1]]}}}}
"""

WRONG_OVERRIDES = [
    *WRONG_LISTS,
    # unknown keys and sections
    ("optim.lrr=1", ["optim.lrr is not a key", "did you mean optim.lr?"]),
    ("optim.learning_rate=1", ["optim.learning_rate is not a key", "did you mean optim.lr?"]),
    ("train.batch_size=8", ["train.batch_size is not a key", "did you mean train.global_batch?"]),
    ("sync.H=20", ["sync.H is not a key", "did you mean sync.period?"]),
    ("batch_size=8", ["batch_size is not a section", "did you mean train.global_batch?"]),
    ("data.sorce=x", ["data.sorce is not a key", "did you mean data.source?"]),
    ("train.batch=3", ["train.batch is not a key", "did you mean train."]),
    ("parallel.replica=2", ["parallel.replica is not a key", "did you mean parallel.replicas?"]),
    ("train.lr=1", ["train.lr is not a key", "did you mean optim.lr?"]),
    ("sync.perod.every=3", ["sync.perod is not a key", "did you mean sync.period?"]),
    ("sync.period.evry=3", ["sync.period.evry is not a key", "did you mean sync.period.every?"]),
    ("sync.reduction.zz=1", ["sync.reduction.zz is not a key", "did you mean sync.reduction.z?"]),
    ("sync.period={kind:qsr}", ["sync.period.kind:qsr is not a key", "a space after the colon"]),
    ("optim={1: 2}", ["optim.1 is not a key", "kind, muon, lr, betas"]),
    ("modle.type=llama", ["modle is not a section", "did you mean model?"]),
    ("lr=1", ["lr is not a section", "did you mean optim.lr?"]),
    ("foo.bar=1", ["foo is not a section", "sections are run, model, data, train"]),
    # choices
    (
        "sync.method=edti",
        ['sync.method is "edti"', f"expected {one_of(METHODS)}", "did you mean edit?"],
    ),
    ("sync.method=null", ["sync.method is null", f"expected {one_of(METHODS)}"]),
    ("sync.period.kind=hours", ['sync.period.kind is "hours"', "expected steps, qsr, seconds or every_step"]),
    ("sync.period=qsr", ["sync.period.alpha is not given", "in units of the learning rate"]),
    ("sync.method=qsr", ["sync.period.alpha is not given", "in units of the learning rate"]),
    ("sync.period=hours", ['sync.period.kind is "hours"', "expected steps, qsr, seconds or every_step"]),
    ("sync.outer={kind: nesterov, rounds: auto}", ['sync.outer.rounds is "auto", expected a mapping of keys']),
    ("sync.outer={kind: null}", ["sync.outer.kind is null", "expected average, sgd, nesterov, momentum, gpa or auto"]),
    (
        "sync.outer={kind: average, momentum: 0.9}",
        ["sync.outer.momentum belongs to kind nesterov", "sync.outer.kind is average", "leave momentum out"],
    ),
    ("parallel.precision=fp16", ['parallel.precision is "fp16"', "'bf16', 'fp32' or 'fp64'"]),
    ("parallel.shards=two", ['parallel.shards is "two"', "expected a whole number or 'auto'"]),
    # wrong types and ranges
    ("optim.lr=fast", ['optim.lr is "fast"', "expected a number"]),
    ("optim.lr=-1", ["optim.lr is -1", "greater than 0"]),
    ("optim.lr=.inf", ["optim.lr is Infinity", "expected a finite number"]),
    ("optim.betas=[0.9]", ["optim.betas is [0.9]", "expected one more value"]),
    ("optim.betas=[0.9,0.9,0.9]", ["optim.betas is [0.9, 0.9, 0.9]", "expected at most 2 values"]),
    ("optim.betas=[0.9,1.0]", ["optim.betas[1] is 1.0", "less than 1"]),
    ("optim.betas=0.9", ["optim.betas is 0.9", "expected a list"]),
    ("train.micro_batch=0", ["train.micro_batch is 0", "greater than 0"]),
    (f"train.micro_batch={10**30}", ["not a multiple of micro_batch x replicas x shards", "train.micro_batch=8"]),
    ("train.micro_batch=2.5", ["train.micro_batch is 2.5", "expected a whole number"]),
    ("train.steps=0", ["train.steps is 0", "greater than 0"]),
    (f"train.steps={10**30}", [f"train.steps is {10**30}", "at most 100,000,000", "shorten the run"]),
    ("train.steps=true", ["train.steps is true", "expected a whole number"]),
    ("schedule.final_ratio=1.5", ["schedule.final_ratio is 1.5", "less than or equal to 1"]),
    ("checkpoint.every=0", ["checkpoint.every is 0", "greater than 0 or null"]),
    ("sync.outer.momentum=1.5", ["sync.outer.momentum is 1.5", "less than 1"]),
    ("sync.reduction=off", ["sync.reduction is false", "a mapping of keys"]),
    ("parallel.compile=maybe", ['parallel.compile is "maybe"', "expected true or false"]),
    ("data.source=3", ["data.source is 3", "expected text"]),
    ("train=5", ["train is 5", "expected a mapping of keys"]),
    (
        "sync.period=2.5",
        ["sync.period is 2.5", "expected a number of steps, steps, qsr, seconds, every_step or a mapping"],
    ),
    ("sync.period=0", ["sync.period.every is 0", "greater than 0"]),
    ("sync.schedule=3", ["sync.schedule is 3", "expected blocking, layerwise,", "or a mapping of keys"]),
    ("eval.suite=3", ["eval.suite is 3", "a mapping of keys or null"]),
    ("eval.suite=smal", ["eval.suite.name smal: there is no such suite", "did you mean small?"]),
    ("--dry", ["command line: --dry is neither an option", "nor --section.key=value"]),
    ("run.name=a/b", ['run.name is "a/b"', "letters, digits"]),
    ("run.name=null", ["run.name is null", "expected text"]),
    # arguments that are no overrides
    ("optim.lr", ["'optim.lr' is not an override", "section.key=value"]),
    ("=3", ["'=3' is not an override", "section.key=value"]),
    ("optim..lr=3", ["'optim..lr=3' is not an override", "section.key=value"]),
    ("optim.betas[0]=0.8", ["'optim.betas[0]=0.8' is not an override", "section.key=value"]),
    ("--optim.lr", ["'--optim.lr' is not an override", "section.key=value"]),
    ("optim.lr=[1", ["'optim.lr=[1' is not YAML", "put it in quotes"]),
    ("eval.sample_prompt=a\tb", [r"'eval.sample_prompt=a\tb' is not YAML", "put it in quotes"]),
    ("optim.lr=1e-3\t", [r"'optim.lr=1e-3\t' is not YAML", "put it in quotes"]),
    ("data.source=\udcff.txt", [r"'data.source=\udcff.txt' is not YAML", "put it in quotes"]),
    ("eval.sample_prompt=>", ["YAML reads 'eval.sample_prompt=>' as", "quotes"]),
    ("checkpoint.mirror=''", ['checkpoint.mirror is ""', "expected a path"]),
    ("checkpoint.mirror=file:///", ['checkpoint.mirror is "file:///"', "expected a path"]),
    ("run.timeout_seconds=1e10", ["run.timeout_seconds is 10000000000.0", "less than or equal to 100000000"]),
    ("optim.lr=${train.lr}", ["optim.lr is '${train.lr}'", "no interpolation"]),
    # length
    ("train.tokens=1e6", ["train.steps and train.tokens", "both are given", "one of them"]),
    ("train.steps=null", ["train.steps and train.tokens", "neither is given", "one of them"]),
    ("data.packing=None", ['data.packing is "None"', "expected 'packed' or 'none'"]),
    ("data.packing=null", ["data.packing is null", "expected 'packed' or 'none'"]),
    ("data.packing=false", ["data.packing is false", "expected 'packed' or 'none'"]),
    (f"train={{steps: null, tokens: {10**30}}}", [f"train.tokens={10**30} is", "at most 100,000,000"]),
    ("train={steps: null, tokens: 100}", ["train.tokens is 100", "4096 tokens", "give more tokens or a smaller batch"]),
    ("schedule.warmup_steps=201", ["schedule.warmup_steps is 201", "the run has 200 steps", "lower it"]),
    # a suite
    ("eval.suite.name=smal", ["eval.suite.name smal: there is no such suite", "did you mean small?"]),
    ("eval.suite.name=none.yaml", ["eval.suite.name none.yaml: there is no such file", "or tinystories"]),
    ("eval.suite.name=offline", ["task offline_lambada_openai", "give the folder", "with eval.suite.data_dir"]),
    ("eval.suite={every: 2}", ["eval.suite.name is not given", "a suite of the package"]),
    ("eval.suite={name: small, evry: 2}", ["eval.suite.evry is not a key", "did you mean eval.suite.every?"]),
    ("eval.tokens=10", ["eval.tokens is 10", "train.sequence_length = 128", "give at least that many"]),
    ("sync.warmup_steps=200", ["sync.warmup_steps is 200", "none of 200 steps", "sync.method=synchronous"]),
    # batch and mesh
    (
        "train.global_batch=40",
        ["train.global_batch is 40", "8 x 4 = 32", "train.global_batch=32 or 64", "train.micro_batch=5"],
    ),
    ("train.global_batch=6", ["train.global_batch is 6", "8 x 4 = 32", "use train.global_batch=32"]),
    ("parallel.replicas=4", ["4 x 2 needs 8 processes", "there are 4", "--num_accelerators 8", "shards=auto"]),
    (
        "parallel={replicas: 3, shards: auto}",
        ["parallel.replicas is 3", "does not divide 4 processes", "a multiple of 3"],
    ),
    # engine
    ("parallel.zero_offload=true", ["parallel.zero_offload", "engine is fsdp2", "use engine=zero"]),
    ("parallel.deepspeed.steps_per_print=9", ["parallel.deepspeed", "engine is fsdp2", "use engine=zero"]),
    ("parallel={engine: zero, precision: fp64}", ["parallel.precision is fp64", "DeepSpeed", "fp32"]),
    ("parallel={engine: zero, compile: true}", ["parallel.compile", "zero_stage=3", "use zero_stage=2"]),
    (
        "parallel={engine: zero, zero_offload: true, replica_backend: nccl}",
        ["parallel.replica_backend is nccl", "CPU memory", "use auto or gloo"],
    ),
    (
        "parallel={engine: zero, deepspeed: {zero_optimization: {stage: 2}}}",
        ["parallel.deepspeed.zero_optimization.stage is 2", "parallel.zero_stage"],
    ),
    ("parallel={engine: zero, deepspeed: {bf16: {enabled: true}}}", ["parallel.deepspeed.bf16", "parallel.precision"]),
    # model
    ("model.type=lama", ["model.type is 'lama'", "causal language models", "did you mean llama?"]),
    ("model.type=t5", ["model.type is 't5'", "causal language models", "llama and gpt_neo"]),
    (
        "model.config.hiden_size=3",
        ["model.config.hiden_size is not a key of llama's config", "model.config.hidden_size?"],
    ),
    ("model.config.hidden_size=161", ["model.config", "161", "multiple of the number of attention heads (5)"]),
    ("model.config.num_attention_heads=0", ["model.config.num_attention_heads is 0", "greater than 0"]),
    ("model.config.num_hidden_layers=many", ['model.config.num_hidden_layers is "many"', "expected int"]),
    ("model.config.num_key_value_heads=2", ["5 attention heads", "num_key_value_heads 2", "change one of them"]),
    ("model.from_config=no/such", ["model.from_config='no/such' can't be read", "give a folder with config.json"]),
    ("train.sequence_length=512", ["train.sequence_length is 512", "256 positions", "max_position_embeddings"]),
    # a synchronous run has no rounds
    ("sync={method: synchronous, wire: int8}", ["sync.wire is int8", "sync.wire.gradients=true"]),
    ("sync={wire: {gradients: true}}", ["sync.wire.gradients", "fp32 rounds nothing", "use bf16"]),
    ("sync={method: synchronous, pull: {probability: 0.1}}", ["sync.pull={probability", "no anchor", "sync.pull=null"]),
    (
        "sync={method: a_edit, schedule: overlapped}",
        ["sync.period=seconds", "sync.schedule=overlapped", "use sync.schedule=blocking, layerwise or delayed, or"],
    ),
    (
        "sync={method: a_edit, warmup_steps: 0, schedule: {kind: delayed, fragments: 2}}",
        ["sync.schedule.fragments is 2", "timed rounds", "give 1"],
    ),
    ("sync={method: a_edit, schedule: wait_avoiding}", ["sync.period=seconds", "sync.schedule=wait_avoiding"]),
    (
        "sync={method: edit, schedule: wait_avoiding}",
        ["sync.reduction=edit_penalty", "sync.schedule=wait_avoiding", "weights", "or sync.reduction=mean"],
    ),
    (
        "sync={method: edit, schedule: delayed, period: 1}",
        ["sync.period.every is 1", "sync.reduction=edit_penalty", "give at least 2"],
    ),
    (
        "sync={method: co2, schedule: {fragments: 99}}",
        ["sync.schedule.fragments is 99", "blocks", "at most"],
    ),
    (
        "sync={method: diloco, wire: {error_feedback: true}}",
        ["sync.wire.error_feedback=true", "sync.wire=fp32", "are not rounded", "or sync.wire.error_feedback=false"],
    ),
    (
        "sync={method: wagma, wire: {kind: int8, error_feedback: true}}",
        ["sync.wire.error_feedback=true", "wait_avoiding", "more than once"],
    ),
    (
        "sync={method: palsgd, pull: {strength: 1000}}",
        ["a pull would go beyond the anchor", "at most 1", "sync.pull.strength to"],
    ),
    (
        "sync={method: wagma, schedule: {group_size: 3}}",
        ["sync.schedule.group_size is 3", "a power of two from 2 to the 2 replicas"],
    ),
    (
        "sync={method: wagma, schedule: {group_size: 8}}",
        ["sync.schedule.group_size is 8", "a power of two from 2 to the 2 replicas"],
    ),
    ("sync={method: palsgd, pull: {probability: 1}}", ["sync.pull.probability is 1", "less than 1"]),
    (
        "sync={method: streaming_diloco, period: {every: 3}}",
        ["sync.schedule.steps is 5", "sync.period.every is 3", "at most 3"],
    ),
    (
        "sync={method: streaming_diloco, reduction: edit_penalty, schedule: {steps: 1}}",
        ["sync.schedule.steps is 1", "sync.reduction=edit_penalty", "give at least 2"],
    ),
    (
        "sync={method: streaming_diloco, period: {every: 5}, schedule: {alpha: 0}}",
        ["sync.schedule.steps is 5, a whole round", "sync.schedule.alpha is 0", "sync.schedule=delayed"],
    ),
    (
        "sync={method: streaming_diloco, schedule: {fragments: 99}}",
        ["sync.schedule.fragments is 99", "blocks", "at most"],
    ),
    ("eval={sets: {x: stories}}", ["eval.sets.x is stories, expected a file or folder"]),
    ("eval={sets: {x: 'hf:o/d'}}", ["eval.sets.x is hf:o/d, expected a file or folder"]),
    ("sync={method: post_local_sgd, warmup_until_lr: 0.0001}", ["sync.warmup_until_lr is 0.0001", "never falls to"]),
    (
        "sync={method: synchronous, schedule: layerwise}",
        ["sync.schedule=layerwise", "every_step", "use sync.schedule=blocking, or another sync.period"],
    ),
    (
        "sync={method: synchronous, reduction: edit_penalty}",
        ["can't be combined with sync.reduction=edit_penalty", "use sync.reduction=mean, or another sync.period"],
    ),
    ("sync={method: diloco, wire: topk}", ["=false can't be combined with sync.wire=topk", "never be sent"]),
    ("sync={method: diloco, wire: 2bit}", ["=false can't be combined with sync.wire=2bit", "never be sent"]),
    ("sync={method: synchronous, outer: nesterov}", ["sync.outer=nesterov", "every_step", "use sync.outer=average"]),
    (
        "sync={method: synchronous, period: {every: 5}}",
        ["sync.period.every belongs to kind steps", "kind is every_step"],
    ),
]

WRONG_FILES = [
    (
        "data: {packing: none}\ntrain: {tokens: 100000}\nsync: {method: local_sgd}\n",
        ["train.tokens is 100000", "with data.packing=none a step has as many tokens as its documents", "train.steps"],
    ),
    (
        "data: {packing: none, shuffle: blocks}\ntrain: {steps: 10}\nsync: {method: local_sgd}\n",
        ["data.shuffle is blocks", "data.packing=none needs the lengths of all documents", "shuffle=auto or all"],
    ),
    (
        "model: {type: gemma3}\ntrain: {steps: 10}\nsync: {method: local_sgd}\n",
        ["gemma3 is not only a language model", "choose its text model, as gemma3_text"],
    ),
    (
        "train: {steps: 10}\noptim: {nonfinite: skip}\nparallel: {engine: zero}\nsync: {method: synchronous}",
        ["optim.nonfinite=skip is not", "use stop, or engine=fsdp2"],
    ),
    ("train: {steps: 99}\nparallel: {engine: zero}\nsync: {method: palsgd}", ["sync.pull can't be", "zero_stage=3"]),
    ("train: {steps: 2000}\nparallel: {engine: zero}\nsync: {method: a_edit}", ["period=seconds", "zero_stage=3"]),
    (
        "train: {steps: 2000, batch_shares: [2, 1]}\nparallel: {engine: zero}",
        ["train.batch_shares can't be", "zero_stage=3"],
    ),
    ("train: {steps: 9}\nparallel: {engine: zero}\nsync: {method: muloco}", ["optim.kind is muon", "kind=adamw"]),
    (
        "train: {steps: 10}\noptim: {nonfinite: rollback}\nsync: {method: local_sgd}",
        ["optim.nonfinite is rollback", "sync.method=local_sgd keeps no anchor", "use skip or stop"],
    ),
    (
        "train: {steps: 10}\noptim: {nonfinite: rollback}\nsync: {method: synchronous}",
        ["optim.nonfinite is rollback", "sync.method=synchronous keeps no anchor"],
    ),
    ("train: {steps: 3, stepz: 4}", ["recipe.yaml: train.stepz is not a key", "did you mean train.steps?"]),
    ("optim: {1: 2}", ["recipe.yaml: optim.1 is not a key", "kind, muon, lr, betas"]),
    ("[1, 2]", ["recipe.yaml", "holds a list", "expected sections"]),
    ("just text", ["recipe.yaml: just text is not a section", "sections are run, model"]),
    ("train: [1", ["recipe.yaml:2: not YAML", "expected ',' or ']'"]),
    ("optim: {lr: 1, lr: 2}", ["recipe.yaml:1: not YAML", "duplicate key lr"]),
    ("base: nowhere.yaml", ["nowhere.yaml: there is no such file", "named by `base:` in recipe.yaml"]),
    ("base: recipe.yaml", ["recipe.yaml: base files form a circle (recipe.yaml -> recipe.yaml)", "remove one"]),
    ("base: 3", ["recipe.yaml: base is 3", "expected a file name or a list of file names"]),
    (GPT_NEO.format(heads=5, layers=2), ["hidden_size 64 is not divisible by 5 attention heads", "change one of them"]),
    (GPT_NEO.format(heads=0, layers=2), ["model.config.num_heads is 0", "greater than 0"]),
    (GPT_NEO.format(heads=4, layers=3), ["model.config", "gpt_neo", "config.num_layers = 3", "attention_types"]),
]


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """Write a recipe that is right, and return its path."""
    path = tmp_path / "right.yaml"
    path.write_text(RECIPE)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """Return the message with which a recipe is refused when it is read or checked."""
    with pytest.raises(UserError) as caught:
        check(load_recipe(path, overrides), PROCESSES)
    return str(caught.value)


def assert_one_line_with(message: str, fragments: list[str]) -> None:
    assert len(message.splitlines()) == 1, message
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} not in {message!r}"


@pytest.mark.parametrize(("override", "fragments"), WRONG_OVERRIDES, ids=[override for override, _ in WRONG_OVERRIDES])
def test_override_is_refused(right: Path, override: str, fragments: list[str]) -> None:
    assert_one_line_with(refusal(right, override), fragments)


@pytest.mark.parametrize(("text", "fragments"), WRONG_FILES, ids=[text.strip() for text, _ in WRONG_FILES])
def test_file_is_refused(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert_one_line_with(refusal(path), fragments)


def test_what_the_overrides_start_from_is_right(right: Path) -> None:
    check(load_recipe(right), PROCESSES)


def test_missing_file_suggests_a_neighbor(right: Path) -> None:
    message = refusal(right.with_name("rigth.yaml"))
    assert_one_line_with(message, ["rigth.yaml: there is no such file", "did you mean", "right.yaml?"])


@pytest.mark.parametrize("given", ["whatever.yaml", "wrong.yaml", "edit.yaml"])
def test_a_file_name_that_is_not_close_gets_no_suggestion(right: Path, given: str) -> None:
    assert_one_line_with(refusal(right.with_name(given)), ["there is no such file", "recipes are YAML files"])
    assert_one_line_with(refusal(right.parent), ["is a folder; give one of the recipes in it"])


def test_short_forms_are_those_of_mappings(right: Path) -> None:
    short = load_recipe(right, ["sync.period=10", "eval.suite=small"])
    assert short == load_recipe(right, ["sync.period={kind: steps, every: 10}", "eval.suite={name: small}"])
    assert load_recipe(right, ["sync.period=10", "sync.period.every=12", "eval.suite=small", "eval.suite.every=2"]) == (
        load_recipe(right, ["sync.period={kind: steps, every: 12}", "eval.suite={name: small, every: 2}"])
    )
    above = right.with_name("above.yaml")
    above.write_text("base: right.yaml\nrun: {name: right}\nsync: {period: 10}\neval: {suite: small}\n")
    assert load_recipe(above) == short
    method = load_recipe(right, ["sync.method=a_edit", "sync.period=10"]).sync
    assert (method.period.kind, method.period.every) == ("steps", 10), "a number is one of steps, never of seconds"
    assert SyncSection(method="diloco", period=7).period.every == 7


def test_circle_over_two_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    assert_one_line_with(refusal(tmp_path / "a.yaml"), ["base files form a circle (a.yaml -> b.yaml -> a.yaml)"])


def test_small_vocabulary_is_refused_only_when_given(right: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        check_vocabulary(load_recipe(right, ["model.config.vocab_size=1000"]), 2048)
    assert_one_line_with(
        str(caught.value), ["model.config.vocab_size is 1000", "train:2048 has 2048 tokens", "at least 2048"]
    )
    check_vocabulary(load_recipe(right, ["model.config.vocab_size=2048"]), 2048)
    check_vocabulary(load_recipe(right), 2048)


def test_a_smaller_vocabulary_of_a_foreign_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 1000}')
    (tmp_path / "recipe.yaml").write_text(f"model: {{from_config: {tmp_path}}}\ntrain: {{steps: 10}}\n")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(
        RecipeError, match=r"vocab_size is 1000, but the tokenizer .* has 2048 tokens; .* belongs to the model"
    ):
        check_vocabulary(recipe, 2048)
    check_vocabulary(recipe, 1000)


def test_batch_is_checked_without_processes_where_the_mesh_is_given(right: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.global_batch is 40"):
        check(load_recipe(right, ["train.global_batch=40"]), None)
    check(load_recipe(right, ["train.global_batch=40", "parallel.shards=auto"]), None)
