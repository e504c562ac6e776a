"""Mistakes in llmtrain itself, a to p."""

TABLES = {
    "llmtrain/attention.py": r"""
    seen by unit/test_attention.py
        attention: products in bf16 without the mask
          - .masked_fill_(~sees, -torch.inf)
        documents: an eos token belongs to the document that it ends
          - return (input_ids == separator).cumsum(1)
          + return (input_ids == separator).cumsum(1) - (input_ids == separator).long()
        attention: a window one token wider
          - sees = (row < key) & (key <= row + window)
          + sees = (row <= key) & (key <= row + window)
    """,
    "llmtrain/compiling.py": r"""
    seen by unit/test_compile.py
        compiling: a stop signal ends the compiler's processes
          - with blocked_stop_signals():
          + if True:
    """,
    "llmtrain/consistency.py": r"""
    seen by unit/test_rendezvous.py
        recipe: a host may not have its own folders
          -  if key not in PER_HOST_KEYS}
          + }
        recipe: keys that the first recipe lacks are not compared
          - for key in dict.fromkeys(key for one in values for key in one):
          + for key in values[0]:
    """,
    "llmtrain/checkpoint_retention.py": r"""
    seen by unit/test_checkpoint_state.py
        checkpoint: the best one may be deleted while its loss can't be read
          - except ValueError:
          + except (OSError, ValueError):
    seen by unit/test_checkpoint_retention.py, distributed/test_best_checkpoint.py
        best: a checkpoint has the loss of an earlier step
          - return found if is_own and
          + return found if
        best: a loss that is not finite counts
          - is_own and math.isfinite(found.loss)
          + is_own
    seen by unit/test_checkpoint_retention.py
        best: losses over different validation tokens are compared
          -  if loss.tokens == tokens)
          + )
        best: the first of equal losses is the best
          - (loss.loss, -step, step)
          + (loss.loss, step, step)
    seen by unit/test_checkpoint_retention.py, distributed/test_best_checkpoint.py, unit/test_best_in_mirror.py
        best: the best is deleted with the others
          - if step != best and step not in kept]
          + if step not in kept]
    seen by unit/test_checkpoint_files.py, unit/test_mirror.py
        config: one checkpoint more is kept
          - sorted(losses)[: -section.keep]
          + sorted(losses)[: -section.keep - 1]
    seen by unit/test_doctor.py
        doctor: no room is needed for the checkpoint that replaces the oldest
          - section.keep + section.keep_best + for_good + 1
          + section.keep + section.keep_best + for_good
    """,
    "llmtrain/cli.py": r"""
    seen by end_to_end/test_start.py
        start: numpy starts threads in the launcher
          deep: the test starts a separate interpreter, which imports everything
          -     with single_threaded_imports():  # numpy's
          +     if True:
    seen by unit/test_cli.py
        help: the source's line breaks are shown
          - "\n\n".join(" ".join(paragraph.split()) for
          + "\n\n".join(paragraph for
        cli: launch forgets the exit code
          - raise typer.Exit(launch_torchrun(recipe, overrides or []))
          + launch_torchrun(recipe, overrides or [])
        prepare: Ctrl-C has no message of its own
          -     except KeyboardInterrupt:
          -
          +     except ZeroDivisionError:
          +
    seen by unit/test_recipe_files.py
        recipes: compare accepts files only, not names
          - run_comparison(find_recipe(Path(file)),
          + run_comparison(Path(file),
    seen by unit/test_compare_runs.py
        compare: --retry is ignored for given runs
          - if is_of_runs and (retry or not shaping):
          + if is_of_runs and not shaping:
    """,
    "llmtrain/completion.py": r"""
    seen by unit/test_completion.py
        completion: words that bash splits at = are taken for whole words
          - if before[-1:] == ["="]:
          + if False:
    """,
    "llmtrain/errors.py": r"""
    seen by unit/test_data_damage.py
        errors: a passing disk error is the text's fault
          - return (UnavailableError if getattr(error, "errno", None) in PASSING else DataError)(problem)
          + return DataError(problem)
    seen by unit/test_encodings.py
        errors: a character that the terminal can't encode ends the run
          - sys.stdout.reconfigure(errors="backslashreplace")
          + pass
    seen by unit/test_errors.py
        errors: a wrong recipe ends with exit code 1
          - leave(error.exit_code if isinstance(error, UserError) else FAILED)
          + leave(FAILED)
        errors: a rank that is first for one of two launchers prints errors
          - for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")):
          + for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"),):
    seen by unit/test_wrong_variables.py
        errors: a process with only LOCAL_RANK=1 prints no errors
          -         if 0 <= numbers[0] < numbers[1] and numbers[2] > 0:
          -
          +         if numbers[2] > 0:
          +
    seen by unit/test_wrong_files.py
        errors: the interpreter's message is shown as a reason
          -     if isinstance(error, AttributeError | TypeError | LookupError):
          -
          +     if False:
          +
    seen by unit/test_data_tokenizer.py
        errors: a library's panic passes all handlers
          - if type(error).__name__ != "PanicException":
          + if True:
    """,
    "llmtrain/files.py": r"""
    seen by unit/test_run_dir.py
        files: a full disk prevents a start, which would make room
          - if error.errno not in FULL:
          + if True:
    seen by unit/test_data_sources.py
        files: a folder that can't be listed is skipped
          - os.walk(start, onerror=refuse)
          + os.walk(start)
        files: a folder is read again for each link to it
          -                 below.clear()
          -                 continue
          -
          +                 below.clear()
          +
    seen by unit/test_run_dir.py
        run dir: the lock of a lost host counts as one of this host
          - return text != "" and not text.endswith(_this_host())
          + return False
    seen by unit/test_compare_runs.py
        files: the advice for a damaged recipe is to delete the run
          - {first_line(error)}); {remedy}")
          + {first_line(error)}); delete its folder")
    seen by unit/test_doctor.py
        files: an unreadable folder ends the search for an existing one above it
          - if os.path.exists(one))
          + if one.exists())
    seen by unit/test_wrong_commands.py
        errors: a name that is too long ends in a traceback
          -     if is_too_long(path):
          -
          +     if not path:
          +
        files: a path through a locked folder ends in a traceback
          -     except PermissionError as error:
          -
          +     except BlockingIOError as error:
          +
    """,
    "llmtrain/loss.py": r"""
    seen by unit/test_loss.py
        loss: gaps between rows of logits cause a graph break
          - if torch.compiler.is_compiling():
          + if False:
        loss: ignored positions count
          - [:, 0]).masked_fill(~counts, 0).sum()
          + [:, 0]).sum()
        loss: validation computes the head's gradients
          - torch.is_grad_enabled() and any(
          + any(
        loss: the gradient is not scaled
          - grad.mul_(factor)
          + grad
        loss: the factor of the gradient is rounded to the gradient's precision
          - grad.mul_(factor)
          + grad.mul_(factor.to(grad.dtype))
    """,
    "llmtrain/lr.py": r"""
    seen by unit/test_wsd.py
        wsd: the decay begins after the warm-up
          - self.last_peak_step if schedule.kind == "wsd" else schedule.warmup_steps
          + schedule.warmup_steps
        wsd: the length of the decay is rounded down
          - round(self.schedule.decay_fraction * self.total_steps)
          + int(self.schedule.decay_fraction * self.total_steps)
        wsd: a short decay has no steps
          - max(1, round(self.schedule.decay_fraction * self.total_steps))
          + round(self.schedule.decay_fraction * self.total_steps)
        wsd: the decay begins one step late
          - return self.total_steps - self.decay_steps
          + return self.total_steps - self.decay_steps + 1
        wsd: the decay is the root of the rest, not 1 minus the root of the progress
          - 1 - math.sqrt(progress)
          + math.sqrt(1 - progress)
        wsd: its shape applies to other schedules, too
          - schedule.kind == "wsd" and schedule.decay_shape
          + schedule.decay_shape
    seen by unit/test_lr.py, unit/test_period.py
        lr: the step schedule drops one step early
          - step > share * self.total_steps * (1 + 1e-12)
          + step >= share * self.total_steps
        lr: the step schedule drops early due to a rounded fraction
          - self.total_steps * (1 + 1e-12)
          + self.total_steps
        lr: the decay is a quarter of a cosine, not half of one
          - 0.5 * (1 + math.cos(math.pi * progress))
          + math.cos(math.pi * progress / 2)
        lr: the decay is cut off at the floor
          - (schedule.final_ratio + (1 - schedule.final_ratio) * remaining)
          + max(schedule.final_ratio, remaining)
    seen by unit/test_lr.py
        lr: the first step of the warm-up has rate 0
          - return self.peak * step / schedule.warmup_steps
          + return self.peak * (step - 1) / schedule.warmup_steps
        lr: the rate of a scheduler that counts from 0 counts as different
          - nearby = [self.at(step - 1) if step > 1 else at_0, self.at(step), self.at(step + 1)]
          + nearby = [self.at(step)]
    """,
    "llmtrain/machine_check.py": r"""
    seen by unit/test_preflight.py
        machine: a recipe for ZeRO starts without DeepSpeed
          -  and importlib.util.find_spec("deepspeed") is None
          +  and False
    """,
    "llmtrain/model.py": r"""
    seen by unit/test_plan_activations.py
        model: every layer makes its own mask of documents
          - if mask is not None and mask.dtype == torch.bool:
          + if False:
    seen by unit/test_pretrained.py::test_experts_are_refused_also_with_weights
        model: experts are trained without a loss that balances them
          - _check_dense(config)
          -         with init
          + with init
    seen by unit/test_model.py
        model: a config's head_dim is ignored
          - (getattr(config, "head_dim", None) or config.hidden_size // heads)
          + config.hidden_size // heads
        model: layers may have heads of different sizes
          -     _check_equal_layers(config)
          -     return
          +     return
        model: layers may be skipped at random
          -         _check_depth(config)
          +         pass
        model: GPT-2's projections have the deviation of other matrices
          - deviation = std_of_projections if is_projection else std
          + deviation = std
        model: a single thread draws all weights
          - ThreadPoolExecutor(torch.get_num_threads())
          + ThreadPoolExecutor(1)
        model: the last name of a shared weight counts
          - wanted.setdefault(id(one[3]), one)
          + wanted[id(one[3])] = one
        model: any key about experts makes a dense model a mixture
          - if experts is not None:
          + if True:
        model: only classes named like Mixtral's are experts
          - if "Experts" in kind or "MoE" in kind
          + if "Experts" in kind
        model: the search for experts allocates the weights
          - with torch.device("meta"):
          + with torch.device("cpu"):
        model: packed documents of Bloom attend to each other
          - if separator is not None and not is_masked:
          + if False:
        model: every matrix is drawn from the same seed
          - derive_seed(seed, "initialisation", name)
          + derive_seed(seed, "initialisation")
        model: parameters outside of all blocks are left out
          -     if outside is not None:
          -
          +     if False:
          +
    """,
    "llmtrain/pieces.py": r"""
    seen by distributed/test_engine.py
        engine: gradient norms are summed in fp32
          - torch.linalg.vector_norm(part, dtype=torch.float64)
          + torch.linalg.vector_norm(part)
    seen by unit/test_pieces.py
        pieces: the last rows are skipped
          - yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)
          + yield from list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))[:-1]
        pieces: a copy in float64 is as large as the tensor
          - if on_cpu else GPU_COPY_VALUES
          + if on_cpu else tensor.numel()
    """,
    "llmtrain/pretrained.py": r"""
    seen by unit/test_scaled_positions.py
        weights: scaled positions may be more or fewer
          - and not ("position" in key and _scales_positions(here))
          +
    seen by unit/test_pretrained.py
        weights: an index may name files outside of its folder
          - if not is_bare_file_name(name):
          + if False:
        weights: a run without them does not know its architecture
          - _recorded(run / RECIPE, section.from_weights)
          + None
    seen by unit/test_lost_weights.py
        weights: a run without its folder and them does not look at its mirror
          - recipe.mirror_url is None or not
          + True or not
    seen by unit/test_pretrained.py
        weights: the hub's pickled files are downloaded too
          - snapshot_download(name, allow_patterns=DOWNLOADED)
          + snapshot_download(name, allow_patterns=[*DOWNLOADED, "*.bin"])
    seen by unit/test_pretrained.py, distributed/test_initial_weights.py
        weights: another architecture of the same shapes is accepted
          - or mine.get(key) == theirs.get(key):
          + or True:
    seen by unit/test_from_config.py
        model: a config's foreign keys are taken for the model's
          - if key in known and not key
          + if key not in other and not key
    """,
    "llmtrain/process_limits.py": r"""
    seen by unit/test_process_limits.py
        limits: only the innermost cgroup counts
          - for folder in (innermost, *innermost.parents) if folder.is_relative_to(root)]
          + for folder in (innermost,)]
        limits: a quota below one core means no core
          - max(1, quota // period)
          + quota // period
    """,
}
