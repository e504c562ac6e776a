"""Mistakes in llmtrain/eval."""

TABLES = {
    "llmtrain/eval/arguments.py": r"""
    seen by unit/test_eval_arguments.py
        eval: a mistyped device is only noticed when the model is loaded
          - check_device_name(device, "--device")
          + pass
        eval: a missing baseline is only noticed at the end
          -         check_model_path(baseline, None)
          +         pass
        eval: results of a model of the same name are overwritten
          - if os.path.exists(other) and path
          + if False and path
        eval: a results folder that can't be written is only noticed after the first task
          -         check_can_write(out or path / EVALUATIONS)
          -
        eval: torch is imported before the arguments are checked
          - import os
          -
          + import os
          + import torch  # noqa: F401
          +
    """,
    "llmtrain/eval/command.py": r"""
    seen by unit/test_eval_arguments.py
        eval: a baseline's first task is lost if its cache can't be written
          - check_can_write(cache.folder)
          + pass
        eval: a baseline is always its newest checkpoint
          - step if is_there else None
          + None
    """,
    "llmtrain/eval/evaluated_checkpoint.py": r"""
    seen by unit/test_evaluated_checkpoint.py
        eval: new weights of the same size go unnoticed
          - \0{stat.st_size}\0{stat.st_mtime_ns}\0
          + \0{stat.st_size}\0
        eval: an export of earlier training counts as a run's newest checkpoint
          - steps = [max(complete_checkpoints(path / CHECKPOINTS) or _exports(path))]
          + steps = [max(_steps(path))]
    """,
    "llmtrain/eval/harness.py": r"""
    seen by unit/test_eval_harness.py
        eval: a generated answer may be as long as the model's context
          - if asked >= model.max_length:
          + if asked > model.max_length:
        eval: a dataset missing in the hub's cache counts as a damaged file
          - if is_local and not isinstance(error, OSError):
          + if not isinstance(error, OSError):
        eval: a standard error that is not finite enters the JSON
          - isinstance(value, int | float) and math.isfinite(value) else None
          + isinstance(value, int | float) else None
    seen by end_to_end/test_eval_damaged.py
        eval: damaged data of a task ends in a traceback
          - except (OSError, ValueError, LookupError, RuntimeError, DatasetsError, UndefinedError) as error:
          + except OSError as error:
        eval: a task with NaN losses has scores
          - return all(math.isfinite(value) for value in values if isinstance(value, float))
          + return not any(math.isinf(value) for value in values if isinstance(value, float))
        eval: lm-eval's progress bars are written to a log
          -     if not sys.stderr.isatty():  # lm-eval's
          +     if False:  # lm-eval's
    seen by unit/test_eval_texts.py
        eval: questions reach untrained learned positions
          - device=device, max_length=longest)
          + device=device)
        eval: tasks are evaluated with weights that were drawn at random
          - check_weights(folder, load(folder, device_map="meta", output_loading_info=True)[1])
          + load(folder, device_map="meta", output_loading_info=True)
    """,
    "llmtrain/eval/scores.py": r"""
    seen by unit/test_eval_scores.py
        eval: the smaller of two standard errors decides what is near chance
          - error = max(stderr,
          + error = min(stderr,
        eval: standard error of a ratio over the sum, not the mean
          - / len(x)) / y.mean())
          + / len(x)) / y.sum())
        eval: McNemar's tail is a term short
          - for k in range(fewer):
          + for k in range(fewer - 1):
        eval: the cache does not distinguish checkpoints
          - return {"checkpoint": self.fingerprint, **key}
          + return {**key}
    """,
    "llmtrain/eval/table.py": r"""
    seen by unit/test_eval_table.py
        eval: a test on a single document has no note
          - if documents == 1 and "bytes" in scores and
          + if False and
        eval: losses in different contexts are tested against each other
          -  or _context(a, row) != _context(b, row):
          + :
        eval: losses in windows of different lengths are tested against each other
          - return SEPARATE in about, about.get("window")
          + return SEPARATE in about, None
    """,
    "llmtrain/eval/texts.py": r"""
    seen by unit/test_eval_texts.py
        eval: windows are longer than training sequences
          - (positions, self.trained_length, LONGEST_WINDOW)
          + (positions, LONGEST_WINDOW)
        eval: separate documents lack the token after them
          - torch.cat((document, document[:1]))
          + torch.cat((document, document[-1:]))
        eval: the limit applies before every n-th document is taken
          - islice(islice(split_text(file, separator), 0, None, every), limit)
          + islice(islice(split_text(file, separator), limit), 0, None, every)
        generate: texts reach untrained learned positions
          - max_position_embeddings", None), self.trained_positions)
          + max_position_embeddings", None),)
        eval: a compressed text is read as it is
          - with open_text(path, BytesRead()) as file:
          + with path.open(encoding="utf-8-sig") as file:
        eval: each piece of a long document is a document
          -             if is_last:
          +             if True:
        eval: standard error of the loss as that of the perplexity
          - else perplexity * loss_error
          + else loss_error
        eval: losses become fp64 on a device that may have none
          - torch.cat(costs).cpu().double()
          + torch.cat(costs).double().cpu()
    seen by unit/test_eval_arguments.py
        eval: a GPU number one too high is accepted
          - int(index or 0) >= found
          + int(index or 0) > found
    seen by unit/test_export.py
        eval: missing weights are drawn at random
          - for kind in ("missing_keys", "mismatched_keys")
          + for kind in ("mismatched_keys",)
        generate: a folder's token may be anything
          - (type(token) is not int or not 0 <= token < model.config.vocab_size)
          + False
    seen by end_to_end/test_eval_damaged.py
        eval: a NaN loss is a score
          - if not costs.isfinite().all():
          + if costs.isinf().any():
    """,
    "llmtrain/eval/units.py": r"""
    seen by unit/test_eval_units.py
        eval: the larger of two limits applies
          - return min(given) if given
          + return max(given) if given
        eval: a group of the harness's tasks is loaded without its members
          - with_defaults=not (task and task.is_complete)
          + with_defaults=task is None
    """,
}
