"""Mistakes in llmtrain itself, q to z."""

TABLES = {
    "llmtrain/recipe_check.py": r"""
    seen by unit/test_batch_shares.py
        shares: replicas without a share
          - if shares and len(shares) != replicas:
          + if False:
        shares: parts that are not complete micro-batches
          - at_once = batch_unit(train.micro_batch, ranks, shares)
          + at_once = train.micro_batch
    seen by unit/test_wsd.py
        wsd: warm-up and decay may take more than the run
          - if recipe.schedule.kind == "wsd" and recipe.schedule.warmup_steps
          + if False and recipe.schedule.warmup_steps
        wsd: the plateau may not be empty
          - recipe.schedule.warmup_steps + decay > total
          + recipe.schedule.warmup_steps + decay >= total
        wsd: other schedules must have room for its decay
          - recipe.schedule.kind == "wsd" and recipe
          + recipe
    seen by unit/test_recipe_wrong.py
        documents: a run's length in tokens is accepted
          - if train.tokens is not None and recipe.data.packing == "none":
          + if False:
        documents: blocks are accepted, and not shuffled as such
          - if recipe.data.shuffle == "blocks" and recipe.data.packing == "none":
          + if False:
        recipe check: a warm-up as long as the run
          - if warmup_steps(recipe) >= total:
          + if warmup_steps(recipe) > total:
        zero: rounds of seconds wait in stage 3
          - recipe.sync.period.is_timed,␣
          + False,␣
    seen by unit/test_recipe_check.py
        recipe check: a tied head is a block of its own
          - (1 if config.tie_word_embeddings else 2)
          + (2 if config.tie_word_embeddings else 1)
        zero: any key of DeepSpeed is passed on
          - if key in OWN_DEEPSPEED:
          + if False:
    seen by unit/test_recipe_wrong.py, unit/test_recipe.py, unit/test_recipes_dir.py
        recipe check: a sequence may not take all positions
          - recipe.train.sequence_length > positions
          + recipe.train.sequence_length >= positions
    """,
    "llmtrain/recipe_diff.py": r"""
    seen by unit/test_recipe.py
        recipe: a difference names here and there the wrong way round
          - f"{key}: {a} there, {b} here"
          + f"{key}: {b} there, {a} here"
    seen by unit/test_cli.py
        recipes: a diff shows equal values, too
          - for key in keys if left.get(key, ...) != right.get(key, ...)}
          + for key in keys}
    """,
    "llmtrain/recipe_files.py": r"""
    seen by unit/test_cli.py
        recipes: a diff takes no run directories
          - if is_run(given) else found
          + if False else found
    seen by unit/test_recipe_files.py
        recipes: a name of the package wins over a file here
          -  or os.path.isfile(given) or
          +  or
        recipes: a copy replaces a file that differs
          - if path.exists() and (not path.is_file() or path.read_bytes() != text):
          + if False:
        recipes: a copy lacks the files it is based on
          -             found |= _with_references(other)
          -
          +             pass
          +
    seen by unit/test_recipe.py
        recipe: a base file is never the package's
          - return packaged if is_packaged and not os.path.isfile(near) else near
          + return near
    """,
    "llmtrain/recipe_loader.py": r"""
    seen by unit/test_recipe_wrong.py
        overrides: the value > is an empty text
          - or (text.startswith(("|", ">")) and "\n" in text)
          + or text.startswith(("|", ">"))
    seen by unit/test_run_dir.py
        resume: a recipe on a disk that does not answer is a wrong one
          -             raise_if_no_answer(path, error)
          +             pass
        resume: a renamed folder is left for another run
          - if run.name != folder.name and "name"
          + if False and "name"
        run directory: a moved folder begins another run
          - if run.name == folder.name and "out_dir" not in given:
          + if False:
        run directory: a new name alone opens the copy that is elsewhere
          - {folder.name}{out_dir} to continue what
          + {folder.name} to continue what
    seen by unit/test_text_list.py
        lists: a base file's text stays beside the list above it
          - data = merge(_without_other_texts(data, layer.data), layer.data)
          + data = merge(data, layer.data)
    seen by unit/test_recipe.py
        recipe: the command line lies under the file
          - layers = [*_read_with_bases(path, ()), Overlay(COMMAND_LINE, parse_overrides(overrides))]
          + layers = [Overlay(COMMAND_LINE, parse_overrides(overrides)), *_read_with_bases(path, ())]
        recipe: a name is the number that YAML reads
          - ["run"]["name"]  # which reads text only
          + ["run"]["name"] and str(run["name"])
        recipe: the splits of a hub dataset are those of files
          - if str(above.get("source")).startswith(HUB) else {"subset", "split", "validation"}
          +
        recipe: a hub dataset loses the splits of another one
          - {"subset"} if str(above.get("source")).startswith(HUB) else {"subset", "split", "validation"}
          + {"subset", "split", "validation"}
        recipe: a hub dataset keeps the subset of another one
          - {"subset"} if str(above
          + set() if str(above
        recipe: a method's own wire stays with another method
          - & {key for preset in presets for key in preset}
          + & {*presets[1]}
        recipe: a wire lies above the one of the new method's preset
          - & {key for preset in presets for key in preset}
          + & {*presets[0]}
        recipe: the learning rate that ends a synchronous phase outlives its method
          - dropped |= {"wire", "warmup_until_lr"} &
          + dropped |= {"wire"} &
        recipe: gradients lose their wire with the method
          - if not isinstance(wire, dict) or not wire.get("gradients"):
          + if True:
        recipe: a period without a kind is not the old method's
          - below: dict[str, Any] = {"sync": presets[0]}
          + below: dict[str, Any] = {"sync": {}}
        recipe: a run's own recipe.yaml keeps the optimizer of another method
          - "optim": {*inner_preset(before), *inner_preset(method)}
          + "optim": ()
        recipe: the key that YAML reads names a text
          - if type(key) not in (str, int):
          + if False:
        recipe: another method keeps the old one's pull
          - dropped = {"reduction", "outer", "schedule", "pull", "moments"}
          + dropped = {"reduction", "outer", "schedule", "moments"}
    seen by unit/test_auto_outer.py
        outer: auto counts synchronous steps as rounds
          - outer_for(rounds, local_steps(recipe) / rounds)
          + outer_for(rounds, recipe.train.total_steps / rounds)
    seen by unit/test_overrides.py
        overrides: text after a comment sign is dropped
          - if text[end:].lstrip().startswith("#"):
          + if False:
        overrides: a number with a leading zero is in base 8
          - if not isinstance(number, str):
          + if False:
        overrides: a separator that YAML skips is null
          - if value is None and text
          + if False and text
        overrides: text is what YAML makes of it
          - isinstance(value, str) and value != text
          + False
    """,
    "llmtrain/recipe_messages.py": r"""
    seen by unit/test_recipe_wrong.py
        recipe messages: other programs' names are not known
          - if name in theirs), None)
          + if False), None)
    seen by unit/test_recipe_messages.py
        recipe messages: blames the first place that gave a key
          - for layer in reversed(layers) if
          + for layer in layers if
    """,
    "llmtrain/reshard.py": r"""
    seen by unit/test_reshard.py, distributed/test_reshard.py
        reshape: rounding errors are averaged, not summed
          - return self.old_replicas / self.replicas if kind in SUMMED else 1.0
          + return 1.0
    seen by unit/test_reshard.py
        reshape: the remainder of a count is lost
          - return total // count + (index < total % count)
          + return total // count
    seen by unit/test_data_sites.py
        sites: a rank sees its own replica's state alone
          - rule.combine(self, [rank[name] for rank in ranks])
          + rule.combine(self, [rank[name] for rank in ranks[: self.old_shards]])
    """,
    "llmtrain/run_files.py": r"""
    seen by unit/test_checkpoint_files.py
        integrity: half-written folders count as checkpoints
          - sorted(path.parent for path in directory.glob(f"step-{'[0-9]' * 8}/{STATE_FILE}"))
          + checkpoint_folders(directory)
    """,
    "llmtrain/run_list.py": r"""
    seen by unit/test_run_list.py
        runs: a run that is locked has stopped
          -     except BlockingIOError:
          -         return True
          +     except BlockingIOError:
          +         return False
        runs: an old loss is the loss at the end
          - return self.validation_step if self.validation_step != self.steps else None
          + return None
        runs: a folder that may not be read ends the list
          -     for path, below, files in os.walk(folder):
          -
          +     for path, below, files in os.walk(folder, onerror=os.fspath):
          +
    """,
    "llmtrain/run_plots.py": r"""
    seen by unit/test_run_plots.py
        plots: a round ends at the first line of the next one
          - return line["tokens"] * (1 - line["sync/round_step"] / line["step"])
          + return line["tokens"]
        plots: the warm-up ends at the last line in it
          - return max(earlier["tokens"], _start_of_round(later) - before)
          + return earlier["tokens"]
        plots: every round is marked
          - if number % stride == 0:
          + if number:
    """,
    "llmtrain/running_moments.py": r"""
    seen by unit/test_running_moments.py
        moments: powers are torch's
          -     while exponents.any():
          +     return base ** exponents.double()
          +     while exponents.any():
    seen by SCENARIOS
        penalty: no bias correction of the running moments
          - a = (self.ema / (1 - power(1 - self.ema, count))).clamp(max=1)
          + a = torch.full_like(self.mean, self.ema)
        penalty: the new deviation enters the variance unweighted
          - (1 - a) * (self.variance + a * distance**2)
          + (1 - a) * self.variance + a * distance**2
    seen by unit/test_reshard.py
        penalty: pooled counts are the largest, not the mean
          - self.count.double().mean(0).round().long()
          + self.count.amax(0)
    seen by distributed/test_methods_resume.py, distributed/test_sync_oracle.py, unit/test_reshard.py
        penalty: the count is not in the checkpoint
          - STATE_NAMES = ("count", "mean", "variance")
          + STATE_NAMES = ("mean", "variance")
    """,
    "llmtrain/startup.py": r"""
    seen by end_to_end/test_start.py
        start: transformers imports scipy
          deep: it starts an interpreter of its own, which imports all
          - "is_scipy_available", lambda: False
          + "is_scipy_available", lambda: True
        start: transformers reads all files of all models twice
          deep: it starts an interpreter of its own, which imports all
          -         sys.modules.setdefault(models.__name__, models)
          -
    seen by unit/test_startup.py
        start: the time of the boot is rounded down
          - if not hasattr(time, "CLOCK_BOOTTIME"):
          + if True:
    """,
    "llmtrain/suites.py": r"""
    seen by unit/test_suites.py
        suites: a folder of tasks that is not there has no tasks
          - if missing := next((folder for folder in folders if not os.path.isdir(folder)), None):
          + if missing := None:
    seen by unit/test_eval_arguments.py
        recipe: a mistyped device of a suite is found out at the first checkpoint
          - check_device_name(section.device, f"{KEY}.device")
          + pass
    seen by unit/test_wrong_files.py
        suites: a folder's name that is too long ends in a traceback
          - not os.path.isdir(folder)
          + not folder.is_dir()
    """,
    "llmtrain/task_files.py": r"""
    seen by unit/test_suites.py
        suites: a task file may lack the module of its functions
          - not (reason != "include" and _is_installed(file)):
          + reason == "include":
        suites: a task file that includes itself is read without end
          - if path.resolve() in chain:
          + if path in chain[:0]:
        suites: an included task file wins over the one that includes it
          - return merged | config
          + return config | merged
        eval: files that a task includes from elsewhere may change
          -         paths += [needed for path in folder.rglob("*.yaml") for needed in _files_needed(path)]
          -
        suites: the data of a tag's tasks is not known
          - configs |= {tag: {"task": names} for tag, names in tags.items()} | own
          + configs |= own
        suites: a group's settings do not change its members
          - settings = (config or {}) | (changes or {})
          + settings = (changes or {}) | (config or {})
        suites: a group that is its own member is read without end
          - if config is not None and name in groups:
          + if False:
    seen by unit/test_wrong_files.py
        suites: a task file's include may be a number
          -     _check_task(path, config)
          -
    """,
    "llmtrain/threads.py": r"""
    seen by unit/test_mirror.py
        mirror: the checkpoint that waits may be deleted
          - for step in (self._running, self._waiting) if step
          + for step in (self._running,) if step
    seen by unit/test_shared_flag.py
        store thread: it may outlive its block
          -         thread.join(LAST_ANSWER_SECONDS)
          +         pass
    """,
    "llmtrain/trace.py": r"""
    seen by unit/test_device_time.py
        times: a span of the device is not written before the end
          -         _recording.step = step
          -         _recording.write_known()
          -
          +         _recording.step = step
          +
    seen by unit/test_trace.py
        trace: any thread asks the device for its times
          -                 self._unwritten.append((start, end, line))
          -
          -
          +                 self._unwritten.append((start, end, line))
          +         self.write_known()
          +
          +
        trace: the last traced step is left out
          - self.first <= self.step <= self.last
          + self.first <= self.step < self.last
        trace: a later start erases what was recorded
          - if line["step"] <= resumed_at]
          + if False]
    """,
    "llmtrain/turns.py": r"""
    seen by unit/test_turns.py, distributed/test_in_process.py
        turns: all threads draw from one generator
          - torch.set_rng_state(self._generators[0])
          + self._generators[0].clone()
        turns: a failure is the others' error, not the first one
          - raise self._errors[0]
          + raise self._errors[-1]
    seen by unit/test_turns.py
        turns: two threads run at once
          - (self._holder is None and self._queue[0] == number)
          + self._queue[0] == number
        turns: timers count what others do
          - for _, end in reversed(self.timers):
          + for _, end in reversed(self.timers[:0]):
        turns: a wait ends although somebody works
          - return 0.0 if self._holder is not None else
          + return
        turns: a step lasts while others run
          - return time.monotonic() - (0.0 if turn is None else turn.away_seconds)
          + return time.monotonic()
    """,
    "llmtrain/validated_text.py": r"""
    seen by unit/test_text_list.py
        lists: mixtures of other weights are compared
          - texts = [_text_keys(entry) | weight for
          + texts = [_text_keys(entry) for
        lists: the bytes per token are those of the whole, which losses change
          -  for entry in entries} or {"eval/": 1.0}
          +  for entry in entries[:0]} or {"eval/": 1.0}
    seen by unit/test_compare_runs.py
        documents: losses with and without other documents before them are ranked
          - self.contexts[key] != other.contexts[key]:
          + False:
        compare: different tokenizers are compared by loss per token
          - if not other.has_tokenizer_of(text):
          + if False:
        compare: a text with another path is another text
          - math.isclose(*ratios, rel_tol=TOLERANCE)
          + False
        compare: an edited text is the same
          - RATIO if are_known and not math.isclose(*ratios, rel_tol=CLEARLY) else None
          + None
        compare: texts of which more is validated are the same
          - if self.tokens != other.tokens:
          + if False:
    """,
    "llmtrain/waiting.py": r"""
    seen by unit/test_export_folder.py, unit/test_data_prepare.py
        export: waits on a lock where no file can be made
          -     tempfile.TemporaryFile(dir=path.parent).close()
          -
    seen by unit/test_export_folder.py
        export: waits for another export without a word
          - return lock.acquire(timeout=0)
          + return lock.acquire(timeout=seconds)
    seen by unit/test_waiting.py
        waiting: a process waits for the lock file that it has created
          - tempfile.TemporaryFile(dir=path.parent).close()
          + path.touch()
        waiting: NFS without a lock server is a folder that can't be written
          - error.errno != errno.ENOLCK:
          + True:
        waiting: a slow wait is silent
          -     timer.start()
          -
    """,
}
