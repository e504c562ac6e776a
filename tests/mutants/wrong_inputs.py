"""Mistakes in how wrong variables, files and waits are answered."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VARIABLES = ("tests/unit/test_wrong_variables.py",)
FILES = ("tests/unit/test_wrong_files.py",)
COMMANDS = ("tests/unit/test_wrong_commands.py",)
WAITS = ("tests/unit/test_waiting.py",)

MUTANTS = [
    Mutant(
        "errors: a process with LOCAL_RANK=1 alone is silent",
        "llmtrain/errors.py",
        "        if 0 <= numbers[0] < numbers[1] and numbers[2] > 0:\n",
        "        if numbers[2] > 0:\n",
        VARIABLES,
    ),
    Mutant(
        "errors: a name that is too long ends in a traceback",
        "llmtrain/files.py",
        "    if is_too_long(path):\n",
        "    if not path:\n",
        COMMANDS,
    ),
    Mutant(
        "files: a path through a locked folder ends in a traceback",
        "llmtrain/files.py",
        "    except PermissionError as error:\n",
        "    except BlockingIOError as error:\n",
        COMMANDS,
    ),
    Mutant(
        "suites: a folder's name that is too long ends in a traceback",
        "llmtrain/suites.py",
        "not os.path.isdir(folder)",
        "not folder.is_dir()",
        FILES,
    ),
    Mutant(
        "prepare: Ctrl-C says nothing",
        "llmtrain/cli.py",
        "    except KeyboardInterrupt:\n",
        "    except ZeroDivisionError:\n",
        ("tests/unit/test_cli.py",),
    ),
    Mutant(
        "run directory: damaged weights leave a run behind",
        "llmtrain/train/run.py",
        "    directory.reserve()\n",
        "    directory.open()\n",
        ("tests/end_to_end/test_training.py",),
    ),
    Mutant(
        "runs: a folder that may not be read ends the list",
        "llmtrain/run_list.py",
        "    for path, below, files in os.walk(folder):\n",
        "    for path, below, files in os.walk(folder, onerror=os.fspath):\n",
        ("tests/unit/test_run_list.py",),
    ),
    Mutant(
        "config: a key's path may be too long",
        "llmtrain/config/section.py",
        "    if is_too_long(path):\n",
        "    if not path:\n",
        COMMANDS,
    ),
    Mutant(
        "tokens: a long file name makes a folder's name that is too long",
        "llmtrain/data/prepare.py",
        '[:100]}-{digest}"',
        '}-{digest}"',
        ("tests/unit/test_data_prepare.py",),
    ),
    Mutant(
        "errors: an interpreter's message is shown",
        "llmtrain/errors.py",
        "    if isinstance(error, AttributeError | TypeError | LookupError):\n",
        "    if False:\n",
        FILES,
    ),
    Mutant(
        "world: a Slurm job's number may be text",
        "llmtrain/parallel/world.py",
        'environment_number("SLURM_JOB_ID", 0)',
        'int(env.get("SLURM_JOB_ID", "0"))',
        VARIABLES,
    ),
    Mutant(
        "run directory: a damaged summary counts as none",
        "llmtrain/train/run_dir.py",
        '            raise RecipeError(f"{path} is damaged; delete it, and the run continues from its newest checkpoint")\n',
        "            return None\n",
        FILES,
    ),
    Mutant(
        "suites: a task file's include may be a number",
        "llmtrain/suites.py",
        "    _check_task(path, config)\n",
        "",
        FILES,
    ),
    Mutant(
        "tokens: an index without a split is fine",
        "llmtrain/data/dataset.py",
        "    if missing := [split for split in SPLITS if split not in index.splits]:\n",
        "    if missing := []:\n",
        FILES,
    ),
    Mutant(
        "waiting: a slow wait is silent",
        "llmtrain/waiting.py",
        "    timer.start()\n",
        "",
        WAITS,
    ),
    Mutant(
        "wagma: a last group average that never ends is ignored",
        "llmtrain/sync/group_averager.py",
        "            if self._thread.is_alive():\n                raise",
        "            if False:\n                raise",
        WAITS,
    ),
    Mutant(
        "errors: a library's panic passes all handlers",
        "llmtrain/errors.py",
        'if type(error).__name__ != "PanicException":',
        "if True:",
        ("tests/unit/test_data_tokenizer.py",),
    ),
    Mutant(
        "prepare: the end of a whole file is estimated",
        "llmtrain/data/extend.py",
        "        remaining = sys.maxsize\n",
        "        pass\n",
        ("tests/unit/test_data_prepare.py",),
    ),
    Mutant(
        "launch: a node that was given up ends the others' run",
        "llmtrain/launch/node_rendezvous.py",
        "isinstance(error, RecipeError | ReturnedError) and",
        "isinstance(error, RecipeError) and",
        ("tests/unit/test_launch_again.py",),
    ),
    Mutant(
        "launch: nodes may start unequal numbers of processes",
        "llmtrain/launch/node_rendezvous.py",
        "if len(set(processes)) > 1:",
        "if False:",
        ("tests/unit/test_launch.py",),
    ),
    Mutant(
        "library: parameters may move before a state is loaded",
        "llmtrain/sync/local_updates.py",
        "if not self._has_stepped:",
        "if self.step == 1:",
        ("tests/distributed/test_library_mistakes.py",),
    ),
    Mutant(
        "zero: any key of DeepSpeed is passed on",
        "llmtrain/recipe_check.py",
        "if key in OWN_DEEPSPEED:",
        "if False:",
        ("tests/unit/test_gaps_recipe.py",),
    ),
    Mutant(
        "checkpoint: one that can't be read now is damaged",
        "llmtrain/train/checkpoint.py",
        "            raise_if_transient(self.path, error)\n",
        "            pass\n",
        ("tests/unit/test_foreign_checkpoints.py",),
    ),
    Mutant(
        "mirror: one that can't be reached now is no use",
        "llmtrain/train/mirror.py",
        "except UNUSABLE as error:",
        "except Exception as error:",
        ("tests/unit/test_mirror.py",),
    ),
    Mutant(
        "data: a shard that can't be read now is damaged",
        "llmtrain/data/dataset.py",
        "    except FileNotFoundError as error:\n        problem",
        "    except OSError as error:\n        problem",
        ("tests/unit/test_data_damage.py",),
    ),
    Mutant(
        "data: an index whose time can't be read ends the thread",
        "llmtrain/data/stream.py",
        "        stamp = 0\n",
        "",
        ("tests/unit/test_data_stream.py",),
    ),
    Mutant(
        "run: only the newest checkpoint's state counts",
        "llmtrain/train/run_dir.py",
        "for _, path in reversed(list_checkpoints(self.checkpoints)):",
        "for _, path in list_checkpoints(self.checkpoints)[-1:]:",
        ("tests/distributed/test_run_length.py",),
    ),
    Mutant(
        "zero: rounds of seconds wait in stage 3",
        "llmtrain/recipe_check.py",
        "recipe.sync.period.is_timed, ",
        "False, ",
        ("tests/unit/test_recipe_wrong.py",),
    ),
]
