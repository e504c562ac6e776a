"""Mistakes in llmtrain/train, n to z."""

TABLES = {
    "llmtrain/train/output.py": r"""
    seen by unit/test_loggers.py
        output: a pipe without a reader ends the run
          - if stream is not None and not isinstance
          + if stream is not None and stream.isatty() and not isinstance
        output: nothing is written after a full disk
          - if error.errno in READER_IS_GONE:
          + if True:
    """,
    "llmtrain/train/prepare_data.py": r"""
    seen by unit/test_wrong_tokens.py
        mixture: token files count as tokens of a trained tokenizer
          -     check_token_files(recipe.data, texts)
          -
    seen by unit/test_text_list.py
        mixture: texts may have other versions of a hub tokenizer
          -     if recipe.data.sources:
          +     if False:
        mixture: prepared tokens of the second text are not found
          -         own = with_tokenizer_of(prepared, section)
          -         kept
          +         own = section
          +         kept
    """,
    "llmtrain/train/rank_errors.py": r"""
    seen by unit/test_mirror_fetch.py
        errand: progress does not extend the wait
          - so_far, last_progress = now, time.monotonic()
          + so_far = now
    """,
    "llmtrain/train/run.py": r"""
    seen by unit/test_rendezvous.py
        run: every host needs the data of the suite
          - if world.rank == 0:
          + if True:
        run: recipes of ranks are not compared
          - common_values(recipe) if world.size > 1 else {}
          + {}
    seen by multi_node/test_bad_starts.py::test_hosts_that_do_not_share_the_run_directory
        run: hosts need not share the run directory
          -         check_is_shared(run.directory.path, run.mesh, recipe.run.timeout_seconds)
          -
    seen by end_to_end/test_training.py::test_a_run_starts_from_another_and_later_needs_it_no_more
        weights: a resumed run reads the initial weights again
          - open_initial_weights(run.recipe, run.mesh, run.prepared) if checkpoint is None else None
          + open_initial_weights(run.recipe, run.mesh, run.prepared)
    seen by unit/test_mirror_fetch.py
        resume: an older checkpoint in the mirror replaces one of a newer version
          -     except NewerFormatError:
          +     except ZeroDivisionError:
        length: a finished run begins anew because its mirror is empty
          -         run.mesh.broadcast_from_main(run.directory.check_may_begin)
          -
          +         pass
          +
    seen by distributed/test_mirror.py
        run: the mirror is not claimed
          - run.mirror.claim(run.mesh)
          + pass
    seen by distributed/test_resume_training.py::test_a_run_is_not_continued_on_another_text
        resume: a refused start overwrites the recipe
          -         alter(trainer)
          -
          +         _claim(run, checkpoint)
          +         alter(trainer)
          +
        resume: a peer lost before the checkpoint is read leaves a summary of no steps
          - if in_summary and run.mesh.is_main:
          + if run.mesh.is_main:
    seen by distributed/test_resume_training.py::test_a_start_that_fails_before_training_leaves_no_run
        run: a start that fails before training leaves a summary
          - with _handle_errors(run, trainer):
          + with _handle_errors(run, trainer, in_summary=True):
        run: after an error, the method's messages stay in flight
          -         trainer.method.close()
          -
    seen by distributed/test_bad_disks.py
        run: the run ends before its loggers
          -     run.at_end.callback(trainer.metrics.run_log.wait)
          -
    seen by end_to_end/test_training.py
        run directory: a start with damaged weights leaves a run
          -     directory.lock()
          -
          +     directory.claim()
          +
    """,
    "llmtrain/train/run_dir.py": r"""
    seen by unit/test_run_dir.py
        run directory: curves over steps that are trained again remain
          - content.get("checkpoints", [content])
          + [content]
    seen by unit/test_run_dir.py::test_a_disk_that_is_full_at_the_start_is_one_line_and_costs_no_file
        run directory: a full disk counts as a wrong recipe despite checkpoints
          - if number in PASSING and complete_checkpoints(self.checkpoints):
          + if False:
    seen by unit/test_waiting.py
        run directory: NFS without a lock server is a folder that can't be written
          - with where_locks_exist(folder):
          + with suppress(NotImplementedError):
    seen by unit/test_run_dir.py, unit/test_mirror.py, end_to_end/test_training.py
        rundir: another learning rate may continue a run
          -     "checkpoint",
          -
          +     "checkpoint",
          +     "optim",
          +
    seen by unit/test_run_dir.py, distributed/test_resume_training.py
        rundir: the old summary remains
          -             (self.path / SUMMARY).unlink(missing_ok=True)
          -
    seen by unit/test_run_dir.py
        run directory: a summary on a disk that does not answer is damaged
          -                 raise_if_no_answer(path, error)
          +                 pass
        run directory: a disk that does not answer can't be written
          -             raise_if_no_answer(self.path, OSError(number, reason))
          -
        run directory: a disk that does not answer while a file is copied can't be written
          - (one for one in PASSING if os.strerror(one) in reason)
          + iter(())
        run directory: summary.json may hold NaN
          - None if isinstance(value, float) and not math.isfinite(value) else value
          + value
        run dir: a complete run offers to continue from checkpoints that are gone
          - mirror is None and newest is None:
          + mirror is None and False:
        run dir: an older checkpoint counts as the last one
          - and newest != summary["steps"]:
          + and False:
        run dir: all keys of another method are named
          - if methods[0] != methods[1]:
          + if False:
        run dir: weights of another architecture are offered
          - has_weights = not is_of_model and complete
          + has_weights = complete
        run dir: the process that holds the lock is not named
          -     write_lock_holder(folder)
          -
    seen by distributed/test_run_length.py
        length: the rate may be changed without the length
          - with_length = () if sizes[0] == sizes[1] else KEYS_WITH_LENGTH
          + with_length = KEYS_WITH_LENGTH
        length: a finished run without checkpoints begins anew
          - lost_checkpoints = change is None and summary.get("stopped") == "done"
          + lost_checkpoints = False
        run: only the newest checkpoint's state counts
          - reversed(complete_checkpoints(self.checkpoints).values())
          + list(complete_checkpoints(self.checkpoints).values())[-1:]
    seen by unit/test_text_list.py
        sites: a site may become another text
          - for name in before.keys() & now.keys():
          + for name in ():
    seen by unit/test_wrong_files.py
        run directory: a damaged summary counts as none
          -             raise RecipeError(f"{path} is damaged; delete it, and the run continues from its newest checkpoint")
          -
          +             return None
          +
    """,
    "llmtrain/train/run_length.py": r"""
    seen by unit/test_run_length.py, distributed/test_run_length.py
        length: a run shorter than its finished steps ends immediately
          - if self.steps_differ and self.step >= total and not is_end:
          + if False:
        length: a change of the outer step is not reported
          - {batch if self.old_global_batch else ''}{self._outer_step_changes()}"
          + {batch if self.old_global_batch else ''}"
        batch: a new learning rate counts as a jump due to the length
          -         if not self.steps_differ:
          -             return None
          -
        batch: it may change the steps of a length in tokens
          - if here.steps is None and here.total_steps != there.total_steps:
          + if False:
        batch: a length in tokens is refused even if the steps stay the same
          - if here.steps is None and here.total_steps != there.total_steps:
          + if here.steps is None:
        batch: text that is read twice is not reported
          - if lacking > 0 and not all
          + if False and not all
        batch: it may change although documents are sorted by batch
          - if after.data.packing == "none":
          + if False:
        length: a decay that begins with the next step counts as a jump
          - _is_close(new.at(step), last) or␣
        length: a rate on the old schedule counts as a jump
          -  or _is_close(found, old.at(following))
        length: the rate of step 0 is read
          - max(1, self.step)
          + self.step
        length: with wsd, the advised checkpoint is within a decay
          - min(old.last_peak_step, new.last_peak_step)
          + max(old.last_peak_step, new.last_peak_step)
        length: with wsd, a new peak from an early checkpoint is no jump
          -  and old.peak == new.peak
        length: a stopped run may end within its round
          - is_end = self.step == total and self.before.train.total_steps <= self.step
          + is_end = self.step == total
    """,
    "llmtrain/train/run_log.py": r"""
    seen by unit/test_run_log.py
        metrics: files are continued at this replica's own step
          - self.directory, state.global_step, tokens
          + self.directory, state.step, tokens
        metrics: a full disk hides the reason of a failure
          - with suppress(Exception):  # the disk may have ended the run
          + with suppress():  # the disk may have ended the run
        metrics: a logger that can't be closed hides the reason of a failure
          - with suppress(Exception):  # the disk may have ended the run
          + with suppress(OSError):  # the disk may have ended the run
        metrics: a run that fails leaves the bar on the terminal
          -         finally:
          -             self.console.stop()
          -
          +         self.console.stop()
          +
    """,
    "llmtrain/train/safetensors_reader.py": r"""
    seen by unit/test_pretrained.py
        weights: a value that is not finite is trained on
          - if not tensor.isfinite().all():
          + if False:
        weights: quantized weights are read as numbers
          - if part.get_dtype() not in FLOATS:
          + if False:
    """,
    "llmtrain/train/sample.py": r"""
    seen by end_to_end/test_training.py::test_a_run_leaves_everything_it_promises
        train: a special token spelled in the sample's prompt is that token
          - split_special_tokens=True
          + split_special_tokens=False
    seen by unit/test_sample.py
        sample: draws from the generator of training
          - , torch.random.fork_rng(devices=[]):
          + :
        sample: a text that fails ends the run
          - except Exception as error:
          + except ValueError as error:
        sample: large models generate text at each validation
          - self.is_wanted and size * recipe.eval.sample_tokens <= CHEAP_READS
          + self.is_wanted
    """,
    "llmtrain/train/shared_folder.py": r"""
    seen by unit/test_shared_folder.py
        shared folder: a host that does not see the folder is accepted
          - for host, path, is_there in hosts if not is_there]
          + for host, path, is_there in hosts if False]
        shared folder: a missing mount counts as a wrong recipe
          - (TrainingError if any(has_recipe for *_, has_recipe in hosts) else RecipeError)(
          + RecipeError(
        shared folder: NFS's stale cache is trusted
          -             revalidate(path.parent)
          -
    """,
    "llmtrain/train/signals.py": r"""
    seen by unit/test_signals.py
        signals: a stopping rank handles a second request, which ends it
          - if not any(stop.is_signaled for stop in _installed):
          + if True:
        signals: a repeated signal ends the run immediately
          - if time.monotonic() - asked_at > SAME_REQUEST_SECONDS:
          + if asked_at < math.inf:
        signals: a failed rank can be ended before it reports the reason
          - if not is_ignored(number):
          -                 signal.signal(number, request.handle)
          + pass
    """,
    "llmtrain/train/state.py": r"""
    seen by distributed/test_bad_numbers.py
        trainer: a good step does not end a series of skipped steps
          - (self.skipped_in_a_row + 1) * skipped
          + self.skipped_in_a_row + skipped
    seen by unit/test_device_numbers.py
        trainer: a checkpoint ends a series of skipped steps
          - skipped_in_a_row: Number = resharded(0, by=by_replica(max))
          + skipped_in_a_row: Number = 0
    seen by distributed/test_resume_training.py
        trainer: actions are due at exact multiples only
          - return every is not None and self.global_step // every > self.previous_global_step // every
          + return every is not None and self.global_step % every == 0
    """,
    "llmtrain/train/summary.py": r"""
    seen by unit/test_run_log.py
        summary: the last number of replicas counts for all gradients
          - (line["comm/replicas"] - 1)
          + (list(lines)[-1]["comm/replicas"] - 1)
    seen by end_to_end/test_training.py::test_a_large_model_writes_only_at_the_end
        sample: the summary prints an older sample
          - if sampled_at != step:
          + if False:
    """,
    "llmtrain/train/text_kinds.py": r"""
    seen by distributed/test_sites.py::test_a_mixture_is_validated_by_weight
        mixture: texts are validated with equal weights
          - return joined([replace(self.validated_by_all(name), share=weights[name]) for name in self.texts])
          + return joined([self.validated_by_all(name) for name in self.texts])
    seen by distributed/test_sites.py::test_every_site_is_validated_by_its_own_ranks
        sites: replicas run different numbers of forward passes
          - for _ in range(count - given):
          + for _ in range(0):
        sites: losses are not weighted by tokens
          - batches=partial(_padded, own.batches, batches), share=site.validated)
          + batches=partial(_padded, own.batches, batches), share=1.0)
        sites: a shard is checked by the ranks of another site
          - return ChecksumScan(self.all_texts.values(), ranks.index(self.mesh.world.rank), len(ranks))
          + return super().scan()
    """,
    "llmtrain/train/trainer.py": r"""
    seen by distributed/test_resume_training.py
        trainer: a stopped run leaves its threads
          - self.method.end_threads()
          + self.method.close()
    seen by distributed/test_bad_disks.py
        trainer: a checkpoint is written after lost metrics
          -         self.checkpointer.wait()
          -         self.metrics.run_log.io_errors.check()
          +         self.checkpointer.wait()
    seen by unit/test_trainer.py
        trainer: a validation hides how late the slowest rank is
          - self.metrics.wait_for_ranks(self.state)
          + pass
        trainer: waits for messages are hidden in a validation
          - self.method.wait_for_messages()
          + pass
    seen by distributed/test_resume_training.py, distributed/test_bad_numbers.py
        trainer: a checkpoint has no line of its step
          -             if self.metrics.has_unlogged_steps:
          +             if False:
    seen by distributed/test_resume_training.py, distributed/test_reshard.py, distributed/test_pairs.py, end_to_end/test_interruptions.py
        trainer: the loader's position is not restored
          - self.loader.load_state_dict(loader_state)
          + pass
    seen by distributed/test_resume_training.py, distributed/test_reshard.py, distributed/test_export.py, end_to_end/test_training.py
        trainer: replicas are not synchronized at the end
          -                 self.method.finish()
          -
          +                 pass
          +
    seen by distributed/test_run_length.py
        length: the method is not told of a new length
          - if length.steps_differ:
          + if False:
        length: a jump of the learning rate is not reported
          - for warning in length.warnings() if length is not None else ():
          + for warning in ():
        batch: synchronous steps end before the step at which a run continues
          -             self.method.keep_warmup(loaded.step)
          -
    seen by end_to_end/test_documents.py
        documents: the trainer does not pass the tokens of the batch
          - forward_backward(micro_batches, self._tokens_per_gradient())
          + forward_backward(micro_batches)
    seen by distributed/test_batch_shares.py
        shares: a local step divides by the mean of all replicas
          - return tokens if self.engine.average_gradients else tokens * self.loader.relative_part
          + return tokens
        shares: a synchronous step divides by the replica's own part
          - return tokens if self.engine.average_gradients else tokens * self.loader.relative_part
          + return tokens * self.loader.relative_part
    """,
    "llmtrain/train/validation.py": r"""
    seen by unit/test_run_texts.py
        mixture: bits per byte are weighted by the tokenizer's bytes
          - return sum(bits) / sum(part.share for part in self.parts)
          + shares = sum(part.share for part in self.parts)
          +         return found.loss / math.log(2) / sum(part.share / shares * part.bytes_per_token for part in self.parts)
    seen by distributed/test_resume_training.py, distributed/test_reshard.py, distributed/test_export.py, end_to_end/test_training.py
        trainer: each replica validates its own weights
          - keeps_parameters = given is None and (is_synchronized or self.mesh.replicas == 1)
          + keeps_parameters = given is None
        validation: the weights are the sum of replicas, not their mean
          - replica.all_reduce(flat_view(block) / replica.size,␣
          + replica.all_reduce(flat_view(block),␣
        validation: the mean replaces the replica's weights
          -             unflatten_into(parameters.to(mesh.device, non_blocking=True), block)
          -             engine.parameters_changed(block)
          +             engine.parameters_changed(block)
        validation: ignored labels are counted
          - counted[number] += int((labels != IGNORE_INDEX).sum())
          + counted[number] += labels.numel()
    """,
    "llmtrain/train/wandb_logger.py": r"""
    seen by unit/test_wandb_logger.py
        wandb: exceptions other than OSError end in a traceback
          - except BaseException as error:
          + except OSError as error:
        wandb: a copied folder continues the original run
          - or owner not in ("", name):
          + or False:
        wandb: at the end, every child is killed
          - if child.name().startswith("wandb"):
          + if True:
    """,
}
