"""Mistakes in llmtrain/train, a to m."""

TABLES = {
    "llmtrain/train/background_eval.py": r"""
    seen by unit/test_background_eval.py
        suite runs: they are due at exact multiples only
          - step // period > before // period
          + step % period == 0
    """,
    "llmtrain/train/build_trainer.py": r"""
    seen by distributed/test_engine.py
        run: the engine does not receive the decision about resharding
          - with_reshard_after_forward_decided(recipe, prepared.vocab_size, mesh.replicas, mesh.shard_comms.size),
          + recipe.parallel,
    seen by multi_node/test_two_sites.py
        run: warns of a public network although the recipe allows it
          - if mesh.unencrypted and not recipe.parallel.allow_unencrypted:
          + if mesh.unencrypted:
    seen by end_to_end/test_training.py
        warnings: training prints none
          - yield f"warning: {line}"
          + yield from ()
    """,
    "llmtrain/train/checkpoint.py": r"""
    seen by unit/test_checkpoint_state.py
        checkpoint: the host waits for each copy from a GPU
          - to("cpu", copy=True, non_blocking=True)
          + to("cpu", copy=True)
        checkpoint: it is written before copies from a GPU are complete
          - torch.cuda.current_stream().synchronize()  # for all copies at once
          + pass  # for all copies at once
        train: a checkpoint of another version ends in a traceback
          - stored_recipe(state["recipe"], str(path))
          + Recipe.model_validate(state["recipe"])
    seen by unit/test_checkpoint_state.py, distributed/test_resume_training.py
        checkpoint: random generators are not restored
          -         torch.set_rng_state(generators["rng"])
          -
    seen by unit/test_mirror.py, unit/test_background_eval.py
        checkpoint: a checkpoint in use is deleted
          - if not any(step in follower.pending_steps() for follower in self.followers):
          + if True:
    seen by unit/test_checkpoint_state.py, distributed/test_bad_disks.py
        checkpoint: it is written from tensors that training changes
          - keep = _stage_to_cpu if is_staged else as_is
          + keep = as_is
    seen by distributed/test_bad_disks.py
        writing: ranks at another site write shared tensors
          - prune, spans_hosts, self._holder)
          + prune, holder=self._holder)
    seen by distributed/test_initial_weights.py
        weights: a resumed run forgets its initial weights
          -         self.from_weights = state.get("from_weights")
          -
    """,
    "llmtrain/train/checkpoint_files.py": r"""
    seen by unit/test_checkpoint_files.py
        resume: all hosts use the first host's path of the folder
          - broadcast_from_main(lambda: [path.name for path in checkpoint_folders(directory)])
          + broadcast_from_main(lambda: [str(path) for path in checkpoint_folders(directory)])
        writing: latest is not written
          -             atomic_write(self.final.parent / LATEST, self.final.name + "\n")
          -
        writing: ranks wait until old checkpoints are deleted
          -             atomic_write(self.temporary / STATE_FILE, dump_state(self._state))
          +             self._on_complete()
          +             atomic_write(self.temporary / STATE_FILE, dump_state(self._state))
        writing: a run that another process has taken over deletes that process's files
          - rank == 0 and self._taken_over() is None:
          + rank == 0:
        writing: a run that another process has taken over goes on
          - self._taken_over() or problem or
          + problem or
        writing: a run ends if the record of its lock is gone
          - in ("", self._holder):
          + == self._holder:
        integrity: a missing mount counts as damage
          - {*NO_ANSWER, errno.EACCES,
          + {errno.EACCES,
        writing: a rank reads back files of another rank
          - if writer % ranks == rank)
          + if (writer + 1) % ranks == rank)
        integrity: digests are not compared
          - if _read_with_retries(lambda path=path: _xxh3(path)) != digest:
          + if False:
        integrity: a file is read again after every error
          -             if error.errno != errno.EIO:
          -                 raise
          -
        integrity: a passing disk error counts as damage
          - for pause in RETRY_PAUSES:
          + for pause in ():
        integrity: the digest of state.json is not compared
          - if seal != _digest_of(state):
          + if False:
    seen by unit/test_shared_folder.py
        integrity: a checkpoint that one host does not see is damaged
          - if not os.path.isdir(directory):
          + if False:
        integrity: the host that finds damage is not named
          - if found is not None and world.local_size < world.size else found
          + if False else found
    seen by distributed/test_bad_disks.py
        writing: a checkpoint may lack the files of a host that does not share the folder
          - if not any(map(TENSOR_FILE.fullmatch, names))]
          + if False]
        writing: other ranks wait after an error that is not the disk's
          -         return work()
          -     except (CheckpointException, Exception) as error:
          +         return work()
          +     except OSError as error:
        writing: a failed write leaves its files
          - shutil.rmtree(self.temporary, ignore_errors=True)  # frees
          + pass  # frees
    seen by end_to_end/test_in_process.py
        in process: a checkpoint has the first replica's tensors only
          - ChainMap(*of_ranks)
          + ChainMap(*of_ranks[:1])
    seen by unit/test_checkpoint_retention.py
        checkpoints: the checkpoint from which the run continues is set aside, too
          -         if step_of(path) <= step:
          +         if step_of(path) < step:
    """,
    "llmtrain/train/checkpoint_reader.py": r"""
    seen by unit/test_foreign_checkpoints.py
        checkpoint: a checkpoint that can't be read now counts as damaged
          -             raise_if_transient(self.path, error)
          -
          +             pass
          +
    seen by distributed/test_export.py
        export: the divisor of the mean is one replica too small
          - total.div_(count)
          + total.div_(count - 1)
    seen by unit/test_reshard.py
        reshape: the mean of negative zeros is positive
          - next(tensors).double().contiguous(), 1
          + next(tensors).double().contiguous() + 0.0, 1
    """,
    "llmtrain/train/devices.py": r"""
    seen by unit/test_devices.py
        devices: the user's settings of torch's allocator are replaced
          - if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
          + if torch.cuda.is_available():
        devices: freed memory returns to the kernel
          - libc.mallopt(M_MMAP_MAX, 0)
          + libc.mallopt(M_MMAP_MAX, 65536)
    """,
    "llmtrain/train/initial_weights.py": r"""
    seen by distributed/test_initial_weights.py
        weights: they are those of the first replica, not the mean
          - self._written, prefixes = state["files"], validated_weights(state)
          + self._written, prefixes = state["files"], ["replica0.weights."]
    seen by unit/test_pretrained.py
        weights: tensors that the model lacks are ignored
          - if one not in known and not one.endswith(DERIVED)]
          + if False]
        weights: a tied head that differs is ignored
          - if not torch.equal(self._reader.read(copy), value):
          + if False:
        weights: nodes start from different files
          - if files.get(name) != first.get(name)]
          + if False]
        weights: another tokenizer is accepted
          - if ids.get(token) != number:
          + if False:
        weights: a run with checkpoints still looks for them
          - if name is None or checkpoint_folders(directory.checkpoints):
          + if name is None:
    seen by unit/test_pretrained.py, distributed/test_initial_weights.py
        weights: damage goes unnoticed
          - if self._written is not None and tuple(self._written.get(name, ())) != found[name]:
          + if False:
    """,
    "llmtrain/train/loggers.py": r"""
    seen by unit/test_loggers.py
        metrics: the line of the checkpoint's own step is dropped
          - if line["step"] <= resumed_step]
          + if line["step"] < resumed_step]
        resume: exports of steps that are trained again count as the run's
          - if moved := directory.set_aside_after(resumed_step):
          + if moved := None:
        console: the time left is computed from all steps, not those of this start
          - max(1, step - self._first)
          + max(1, step)
        loggers: lines lost before the checkpoint are not named
          - if jsonl.last_step < resumed_step:
          + if False:
        loggers: losses over tokens are plotted over steps
          - tags[tag], tokens)
          + tags[tag], step)
        loggers: a resumed run loses its earlier losses over tokens
          - purge = resumed_tokens + 1
          + purge = resumed_step + 1
        loggers: samples after the checkpoint stay
          - 0 < int(found[1]) <= resumed_step
          + 0 < int(found[1])
        console: every line repeats the last divergence
          - if tags["sync/count"] > self._shown_count else 0.0
          + if True else 0.0
        console: a synchronous run counts as a warm-up
          - if self._rounds == 0 else
          + if self._rounds is None else
    """,
    "llmtrain/train/metric_gather.py": r"""
    seen by unit/test_metric_gather.py
        metrics: a rank without a gradient lowers the norm
          - (columns["grad_norm_sum"] / columns["gradients"])[columns["gradients"] > 0]
          + columns["grad_norm_sum"] / columns["gradients"].clamp(min=1)
    seen by distributed/test_bad_numbers.py
        metrics: the loss of a skipped step counts
          - torch.where(skipped.bool(), 0.0, number)
          + number
    seen by distributed/test_bad_disks.py, distributed/test_resume_training.py, end_to_end/test_training.py
        trainer: a line counts its tokens twice
          - self.predicted_tokens = self.predicted_tokens + used * tokens
          + self.predicted_tokens = self.predicted_tokens + 2 * used * tokens
    seen by unit/test_metric_gather.py
        metrics: reserved memory is the sum over ranks
          - line.largest("reserved_memory")
          + line.total("reserved_memory")
        metrics: the speed is that of the mean rank, not of the slowest
          - in_turns else step_seconds.max())
          + in_turns else step_seconds.mean())
        metrics: an infinite loss is accepted
          - if not values.isfinite().all():
          + if values.isnan().any():
        metrics: the bytes are those of the mean rank, not of all
          - line.total("bytes_total")
          + line.mean("bytes_total")
        in process: the speed is that of one device per replica
          - step_seconds.sum() if self._in_turns else
          + step_seconds.max() if self._in_turns else
    seen by unit/test_device_numbers.py
        metrics: time after a line was opened is lost
          - row["step_seconds"] + self.more_step_seconds
          + row["step_seconds"]
        metrics: each rank gathers numbers in its own order
          - names = sorted(row)
          + names = list(row)
    """,
    "llmtrain/train/metrics.py": r"""
    seen by end_to_end/test_training.py
        metrics: no warning about a block that is always excluded
          - for warning in self.method.take_warnings():
          + for warning in ():
        metrics: no warning about a run that diverges
          - self.run_log.warn(state.global_step, line)
          + pass
    seen by unit/test_run_log.py
        metrics: every rise of the loss counts as divergence
          - if last <= first * (1 +
          + if last < 0 * (1 +
        metrics: a rise during warm-up from trained weights counts as divergence
          - (CLEAR_RISE_OF_WEIGHTS if is_continued else CLEAR_RISE)
          + CLEAR_RISE
        metrics: the number of the last timed round is one too high
          - .count + (not state.is_done) if
          + .count + 1 if
    seen by distributed/test_resume_training.py
        trainer: a rank stops on its own request alone
          - self._stop_agreed |= line.any("stop")
          + self._stop_agreed |= self.stop.requested
    seen by end_to_end/test_documents.py
        documents: padding counts as tokens
          - tokens = count_tokens(micro_batches)
          + tokens = count_positions(micro_batches)
    """,
    "llmtrain/train/mirror.py": r"""
    seen by unit/test_mirror.py
        mirror: the run's own folder may be its mirror
          - os.path.realpath(self._root) == os.path.realpath(folder):
          + self._root == str(folder):
        remote: state.json is not copied last
          - for path in checkpoint.iterdir() if path.name != STATE_FILE)
          + for path in checkpoint.iterdir())
        mirror: a mirror that can't be reached now is refused
          - except UNUSABLE as error:
          + except Exception as error:
        mirror: any finished copy counts as the last one
          - or self._last_complete == self._last_submitted:
          + or self._last_complete is not None:
    seen by unit/test_mirror_fetch.py
        mirror: a checkpoint that exists locally is fetched
          - if step > newer_than)
          + if step >= newer_than)
    seen by unit/test_best_in_mirror.py
        best: the mirror lacks a best checkpoint that was passed over
          -                 self._copy_best(step)
          -
          +                 pass
          +
        best: the mirror may lack it at the end
          - or self._last_complete == self._last_submitted:
          + or self.newest == self._last_submitted:
        best: a start copies the newest checkpoint again with it
          - if step != self._there_at_start:
          + if True:
        best: a checkpoint after the step to which the run went back counts
          - self._remote.losses().items() if step <= newest}
          -             best
          + self._remote.losses().items()}
          +             best
        best: it may be deleted while it is copied
          - return self.worker.pending_steps() | self._candidates
          + return self.worker.pending_steps()
        best: the mirror knows the old loss of a checkpoint copied again
          -         self._losses.pop(step, None)
          -
    """,
}
