"""Mistakes in what the command line checks, warns of, estimates and lists."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREFLIGHT = ("tests/unit/test_preflight.py",)
RECIPES = ("tests/unit/test_recipe_files.py",)

MUTANTS = [
    Mutant(
        "warnings: outer momentum overshoots with a warm-up, too",
        "llmtrain/plan/harmful_keys.py",
        " and not outer.rounds.momentum_warmup",
        "",
        ("tests/unit/test_preflight.py",),
    ),
    Mutant(
        "warnings: outer momentum overshoots with one replica",
        "llmtrain/plan/harmful_keys.py",
        " and recipe.parallel.replicas != 1",
        "",
        ("tests/unit/test_preflight.py",),
    ),
    Mutant(
        "warnings: rounds are counted in synchronous steps, too",
        "llmtrain/plan/harmful_keys.py",
        "recipe.train.total_steps - warmup_of(sync, LRSchedule.of(recipe))",
        "recipe.train.total_steps",
        ("tests/unit/test_preflight.py",),
    ),
    Mutant(
        "preflight: a model that can't be initialized is fine",
        "llmtrain/launch/preflight.py",
        "    check_initial_values(model)\n",
        "",
        PREFLIGHT,
    ),
    Mutant(
        "preflight: a tokenizer that would be trained is not compared with the model",
        "llmtrain/launch/preflight.py",
        "            check_vocabulary(recipe, size)\n",
        "            pass\n",
        PREFLIGHT,
    ),
    Mutant(
        "preflight: a run directory of another recipe is fine",
        "llmtrain/launch/preflight.py",
        "    directory.check_recipe()\n",
        "",
        PREFLIGHT,
    ),
    Mutant(
        "preflight: a start takes another machine's packages and GPUs",
        "llmtrain/launch/preflight.py",
        "    check_machine(recipe)\n",
        "",
        PREFLIGHT,
    ),
    Mutant(
        "preflight: a prepared text of eval.sets may be too short",
        "llmtrain/launch/preflight.py",
        "                check_set(recipe, name, text)\n",
        "",
        PREFLIGHT,
    ),
    Mutant(
        "warnings: synchronous steps count as local ones",
        "llmtrain/plan/ineffective_keys.py",
        "local = total - warmup_of(sync, LRSchedule.of(recipe))",
        "local = total",
        PREFLIGHT,
    ),
    Mutant(
        "warnings: none in training",
        "llmtrain/train/run.py",
        'console.print(f"warning: {line}")',
        "pass",
        ("tests/end_to_end/test_training.py",),
    ),
    Mutant(
        "show: offloaded memory is free on a CPU",
        "llmtrain/plan/show.py",
        "memory.total(hardware.on_gpu)",
        "memory.device_total",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "show: a card reaches its peak",
        "llmtrain/plan/hardware.py",
        "HardwareRates(GPU_EFFICIENCY * card.peak_flops, mbit, latency_ms)",
        "HardwareRates(card.peak_flops, mbit, latency_ms)",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "runs: a run that is locked has stopped",
        "llmtrain/run_list.py",
        "    except BlockingIOError:\n        return True",
        "    except BlockingIOError:\n        return False",
        ("tests/unit/test_run_list.py",),
    ),
    Mutant(
        "completion: bash's words are taken for whole ones",
        "llmtrain/completion.py",
        'if before[-1:] == ["="]:',
        "if False:",
        ("tests/unit/test_completion.py",),
    ),
    Mutant(
        "runs: an old loss is the loss at the end",
        "llmtrain/run_list.py",
        "return self.validation_step if self.validation_step != self.steps else None",
        "return None",
        ("tests/unit/test_run_list.py",),
    ),
    Mutant(
        "recipes: a number is a period of seconds",
        "llmtrain/config/section.py",
        'return {"kind": "steps", "every": value}',
        'return {"kind": "seconds", "every": value}',
        ("tests/unit/test_recipe_wrong.py",),
    ),
    Mutant(
        "recipes: a name of the package wins over a file here",
        "llmtrain/recipe_files.py",
        " or os.path.isfile(given) or",
        " or",
        RECIPES,
    ),
    Mutant(
        "recipes: a copy replaces a file that differs",
        "llmtrain/recipe_files.py",
        "if path.exists() and (not path.is_file() or path.read_bytes() != text):",
        "if False:",
        RECIPES,
    ),
    Mutant(
        "recipes: a copy lacks the files it is based on",
        "llmtrain/recipe_files.py",
        "            found |= _with_references(other)\n",
        "            pass\n",
        RECIPES,
    ),
    Mutant(
        "recipes: compare knows files only",
        "llmtrain/cli.py",
        "run_comparison(find_recipe(Path(file)),",
        "run_comparison(Path(file),",
        RECIPES,
    ),
    Mutant(
        "recipe: a name is the number that YAML reads",
        "llmtrain/recipe_loader.py",
        '["run"]["name"]  # which reads text only',
        '["run"]["name"] and str(run["name"])',
        ("tests/unit/test_recipe.py",),
    ),
    Mutant(
        "recipe: a period of 1e1 is refused",
        "llmtrain/config/section.py",
        "    value = _count(value)\n",
        "",
        ("tests/unit/test_recipe.py",),
    ),
    Mutant(
        "compare: --retry is ignored for given runs",
        "llmtrain/cli.py",
        "if is_of_runs and (retry or not shaping):",
        "if is_of_runs and not shaping:",
        ("tests/unit/test_compare_runs.py",),
    ),
    Mutant(
        "warnings: defaults that have no effect are named",
        "llmtrain/plan/ineffective_keys.py",
        "!= type(section).model_fields[key].default:",
        "is not None:",
        ("tests/unit/test_preflight.py",),
    ),
]
