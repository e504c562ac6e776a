"""Forms of overrides, and values on the command line that YAML does not read as they are written."""

from __future__ import annotations

import pytest

from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import parse_overrides


@pytest.mark.parametrize("arguments", [["optim.lr=2"], ["--optim.lr=2"], ["--optim.lr", "2"]])
def test_three_forms_of_override(arguments: list[str]) -> None:
    assert parse_overrides(arguments) == {"optim": {"lr": 2}}


def test_overrides_merge_and_the_last_wins() -> None:
    arguments = ["optim.lr=1", "--optim.eps", "3", "optim.lr=2", "eval.sample_prompt=a=b", "data.subset=null"]
    expected = {"optim": {"lr": 2, "eps": 3}, "eval": {"sample_prompt": "a=b"}, "data": {"subset": None}}
    assert parse_overrides(arguments) == expected


def test_override_takes_a_negative_number_and_a_mapping() -> None:
    assert parse_overrides(["--run.seed", "-1"]) == {"run": {"seed": -1}}
    assert parse_overrides(["sync.period={kind: steps, every: 4}"]) == {
        "sync": {"period": {"kind": "steps", "every": 4}}
    }


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("train.steps=0400", "YAML reads 0400 in 'train.steps=0400' as 256;"),
        ("run.seed=-010", "YAML reads -010 .* as -8;"),
        ("checkpoint.every=1:30", "YAML reads 1:30 .* as 90;"),
        ("optim.betas=[0.9, 010]", "YAML reads 010 .* as 8;"),
        ("eval.sample_prompt=# Title", "the end of .*, from # on, as a comment; put text in quotes within quotes"),
        ("eval.sample_prompt=C # is not", "from # on, as a comment"),
        ("sync={method: edit} # for now", "from # on, as a comment"),
        (r"data.separator=\n\n", r"data\.separator is .*, with a backslash: .* write data\.separator='\"\\n\\n\"'"),
        (r"data={separator: '\t'}", r"data\.separator is \\t, with a backslash"),
        ("data.separator=---", "YAML reads no value in .*; write null, or text in quotes within quotes"),
        ("data.separator=\n\n", "YAML reads no value"),
        ("eval.sample_prompt=", "YAML reads no value"),
        ("eval.sample_prompt=--- Title", 'YAML reads .* as "Title"; put text in quotes within quotes'),
        ("eval.sample_prompt=def ", 'YAML reads .* as "def"'),
        ("data.separator=a\nb", 'YAML reads .* as "a b"'),
    ],
)
def test_a_value_that_yaml_reads_as_another_is_refused(argument: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=f"^command line: .*{reason}"):
        parse_overrides(["optim.lr=1", argument])


def test_values_that_yaml_reads_as_written() -> None:
    """Quoted text and names are read as written, too."""
    seeds = {text: parse_overrides([f"run.seed={text}"])["run"]["seed"] for text in ("0", "-1", "1_000", "08", "1:99")}
    assert seeds == {"0": 0, "-1": -1, "1_000": 1000, "08": "08", "1:99": "1:99"}
    prompts = {
        text: parse_overrides([f"eval.sample_prompt={text}"])["eval"]["sample_prompt"]
        for text in ("'a # b'", "a#b", "''", "|\n  a", "~", "Null")
    }
    assert prompts == {"'a # b'": "a # b", "a#b": "a#b", "''": "", "|\n  a": "a", "~": None, "Null": None}
    assert parse_overrides(["run={name: 010, seed: 4}", "run.out_dir=1:00h"])["run"] == {
        "name": "010",
        "seed": 4,
        "out_dir": "1:00h",
    }
    assert parse_overrides([r'data.separator="\n\n"'])["data"]["separator"] == "\n\n"
