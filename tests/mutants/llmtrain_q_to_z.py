"""Mistakes in llmtrain itself, q to z."""

TABLES = {
    "llmtrain/recipe_check.py": r"""
    seen by unit/test_batch_shares.py
        shares: replicas may lack a share
          - if shares and len(shares) != replicas:
          + if False:
        shares: parts may not be complete micro-batches
          - at_once = batch_unit(train.micro_batch, ranks, shares)
          + at_once = train.micro_batch
    seen by unit/test_wsd.py
        wsd: warm-up and decay may take more than the run
          - if recipe.schedule.kind == "wsd" and recipe.schedule.warmup_steps
          + if False and recipe.schedule.warmup_steps
        wsd: the plateau may not be empty
          - recipe.schedule.warmup_steps + decay > total
          + recipe.schedule.warmup_steps + decay >= total
        wsd: other schedules need room for a decay, too
          - recipe.schedule.kind == "wsd" and recipe
          + recipe
    seen by unit/test_recipe_wrong.py
        documents: unpacked documents allow a run's length in tokens
          - if train.tokens is not None and recipe.data.packing == "none":
          + if False:
        documents: unpacked documents allow shuffling in blocks
          - if recipe.data.shuffle == "blocks" and recipe.data.packing == "none":
          + if False:
        recipe check: a warm-up may be as long as the run
          - if warmup_steps(recipe) >= total:
          + if warmup_steps(recipe) > total:
        zero: timed rounds are accepted in stage 3
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
        recipe check: a sequence may not use all positions
          - recipe.train.sequence_length > positions
          + recipe.train.sequence_length >= positions
    """,
    "llmtrain/recipe_diff.py": r"""
    seen by unit/test_recipe.py
        recipe: a difference swaps here and there
          - f"{key}: {a} there, {b} here"
          + f"{key}: {b} there, {a} here"
    seen by unit/test_cli.py
        recipes: a diff shows equal values, too
          - for key in keys if left.get(key, ...) != right.get(key, ...)}
          + for key in keys}
    """,
    "llmtrain/recipe_files.py": r"""
    seen by unit/test_cli.py
        recipes: a diff accepts no run directories
          - if is_run(given) else found
          + if False else found
    seen by unit/test_recipe_files.py
        recipes: a packaged recipe wins over a local file
          -  or os.path.isfile(given) or
          +  or
        recipes: a copy replaces a file that differs
          - if path.exists() and (not path.is_file() or path.read_bytes() != text):
          + if False:
        recipes: a copy lacks its base files
          -             found |= _with_references(other)
          -
          +             pass
          +
    seen by unit/test_recipe.py
        recipe: a base file is never found in the package
          - return packaged if is_packaged and not os.path.isfile(near) else near
          + return near
    """,
    "llmtrain/recipe_loader.py": r"""
    seen by unit/test_recipe_wrong.py
        overrides: the value > is an empty text
          - or (text.startswith(("|", ">")) and "\n" in text)
          + or text.startswith(("|", ">"))
    seen by unit/test_run_dir.py
        resume: a recipe on a disk that does not answer is invalid
          -             raise_if_no_answer(path, error)
          +             pass
        mirror: its folder counts as a run that was moved
          - recipe.mirror_url or␣
        resume: a renamed folder starts a new run elsewhere
          - if run.name != folder.name and "name"
          + if False and "name"
        run directory: a moved folder starts a new run elsewhere
          - if run.name == folder.name and "out_dir" not in given:
          + if False:
        run directory: the advice for a copied folder lacks out_dir
          - {folder.name}{out_dir} to continue the
          + {folder.name} to continue the
    seen by unit/test_text_list.py
        lists: a base file's text remains beside an overlaid list
          - data = merge(_without_other_texts(data, layer.data), layer.data)
          + data = merge(data, layer.data)
    seen by unit/test_recipe.py
        recipe: the file overrides the command line
          - layers = [*_read_with_bases(path, ()), Overlay(COMMAND_LINE, parse_overrides(overrides))]
          + layers = [Overlay(COMMAND_LINE, parse_overrides(overrides)), *_read_with_bases(path, ())]
        recipe: a run's name is the number that YAML reads
          - ["run"]["name"]  # which reads text only
          + ["run"]["name"] and str(run["name"])
        recipe: a local text inherits the splits of a hub dataset
          - if str(above.get("source")).startswith(HUB) else {"subset", "split", "validation"}
          +
        recipe: a hub dataset loses the splits of another one
          - {"subset"} if str(above.get("source")).startswith(HUB) else {"subset", "split", "validation"}
          + {"subset", "split", "validation"}
        recipe: a hub dataset keeps the subset of another one
          - {"subset"} if str(above
          + set() if str(above
        recipe: the wire of the old method's preset stays
          - & {key for preset in presets for key in preset}
          + & {*presets[1]}
        recipe: a file's wire overrides that of the new method's preset
          - & {key for preset in presets for key in preset}
          + & {*presets[0]}
        recipe: the learning rate that ends a synchronous phase outlives its method
          - dropped |= {"wire", "warmup_until_lr"} &
          + dropped |= {"wire"} &
        recipe: a change of method drops the wire of gradients
          - if not isinstance(wire, dict) or not wire.get("gradients"):
          + if True:
        recipe: a period without a kind is not the old method's
          - below: dict[str, Any] = {"sync": presets[0]}
          + below: dict[str, Any] = {"sync": {}}
        recipe: a run's own recipe.yaml keeps the optimizer of another method
          - "optim": {*inner_preset(before), *inner_preset(method)}
          + "optim": ()
        recipe: a text's name may be any YAML key
          - if type(key) not in (str, int):
          + if False:
        recipe: another method keeps the old one's pull
          - dropped = {"reduction", "outer", "schedule", "pull", "moments"}
          + dropped = {"reduction", "outer", "schedule", "moments"}
    seen by unit/test_auto_outer.py
        outer: auto counts synchronous steps among those of rounds
          - outer_for(rounds, local_steps(recipe) / rounds)
          + outer_for(rounds, recipe.train.total_steps / rounds)
    seen by unit/test_overrides.py
        overrides: text after # is dropped
          - if text[end:].lstrip().startswith("#"):
          + if False:
        overrides: a number with a leading zero is in base 8
          - if not isinstance(number, str):
          + if False:
        overrides: a separator that YAML skips is null
          - if value is None and text
          + if False and text
        overrides: text is changed by YAML
          - isinstance(value, str) and value != text
          + False
    """,
    "llmtrain/recipe_messages.py": r"""
    seen by unit/test_recipe_wrong.py
        recipe messages: other programs' names of keys are unknown
          - if name in theirs), None)
          + if False), None)
    seen by unit/test_recipe_messages.py
        recipe messages: the first place that set a key is named, not the last
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
        runs: a locked run counts as stopped
          -     except BlockingIOError:
          -         return True
          +     except BlockingIOError:
          +         return False
        runs: an old loss counts as the loss at the end
          - return self.validation_step if self.validation_step != self.steps else None
          + return None
        runs: an unreadable folder ends the list
          -     for path, below, files in os.walk(folder):
          -
          +     for path, below, files in os.walk(folder, onerror=os.fspath):
          +
    """,
    "llmtrain/run_plots.py": r"""
    seen by unit/test_run_plots.py
        plots: a round ends at the first logged line of the next one
          - return line["tokens"] * (1 - line["sync/round_step"] / line["step"])
          + return line["tokens"]
        plots: the warm-up ends at its last logged line
          - return max(earlier["tokens"], _start_of_round(later) - before)
          + return earlier["tokens"]
        plots: every round is marked
          - if number % stride == 0:
          + if number:
    """,
    "llmtrain/running_moments.py": r"""
    seen by unit/test_running_moments.py
        moments: powers are computed by torch
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
          deep: the test starts a separate interpreter, which imports everything
          - "is_scipy_available", lambda: False
          + "is_scipy_available", lambda: True
        start: transformers reads all files of all models twice
          deep: the test starts a separate interpreter, which imports everything
          -         sys.modules.setdefault(models.__name__, models)
          -
    seen by unit/test_startup.py
        start: the boot time is cut to a whole second
          - if not hasattr(time, "CLOCK_BOOTTIME"):
          + if True:
    """,
    "llmtrain/suites.py": r"""
    seen by unit/test_suites.py
        suites: a missing folder of tasks is empty
          - if missing := next((folder for folder in folders if not os.path.isdir(folder)), None):
          + if missing := None:
    seen by unit/test_eval_arguments.py
        recipe: a mistyped device of a suite is only noticed at the first checkpoint
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
        suites: the data of a tag's tasks is unknown
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
        mirror: a queued checkpoint may be deleted
          - for step in (self._running, self._waiting) if step
          + for step in (self._running,) if step
    seen by unit/test_shared_flag.py
        store thread: the thread may outlive its block
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
        trace: the thread that adds a span asks the device for times
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
        trace: a later start erases earlier lines
          - if line["step"] <= resumed_at]
          + if False]
    """,
    "llmtrain/turns.py": r"""
    seen by unit/test_turns.py, distributed/test_in_process.py
        turns: all threads draw from one generator
          - torch.set_rng_state(self._generators[0])
          + self._generators[0].clone()
        turns: the error raised is the last one, not the first
          - raise self._errors[0]
          + raise self._errors[-1]
    seen by unit/test_turns.py
        turns: two threads run at once
          - (self._holder is None and self._queue[0] == number)
          + self._queue[0] == number
        turns: timers count the time of other threads
          - for _, end in reversed(self.timers):
          + for _, end in reversed(self.timers[:0]):
        turns: a wait times out although another thread is working
          - return 0.0 if self._holder is not None else
          + return
        turns: a step's time includes other threads
          - return time.monotonic() - (0.0 if turn is None else turn.away_seconds)
          + return time.monotonic()
    """,
    "llmtrain/validated_text.py": r"""
    seen by unit/test_text_list.py
        lists: mixtures with different weights are compared
          - texts = [_text_keys(entry) | weight for
          + texts = [_text_keys(entry) for
        lists: the bytes per token are those of the mixture, which depend on losses
          -  for entry in entries} or {"eval/": 1.0}
          +  for entry in entries[:0]} or {"eval/": 1.0}
    seen by unit/test_compare_runs.py
        documents: losses with and without other documents before them are ranked
          - self.contexts[key] != other.contexts[key]:
          + False:
        compare: different tokenizers are compared by loss per token
          - if not other.has_tokenizer_of(text):
          + if False:
        compare: a text with another path is a different text
          - math.isclose(*ratios, rel_tol=TOLERANCE)
          + False
        compare: an edited text counts as the same
          - RATIO if are_known and not math.isclose(*ratios, rel_tol=CLEARLY) else None
          + None
        compare: texts with different numbers of validation tokens count as the same
          - if self.tokens != other.tokens:
          + if False:
    """,
    "llmtrain/waiting.py": r"""
    seen by unit/test_export_folder.py, unit/test_data_prepare.py
        export: a lock is awaited in a folder that can't be written
          -     tempfile.TemporaryFile(dir=path.parent).close()
          -
    seen by unit/test_export_folder.py
        export: no line says that another export is awaited
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
