"""Mistakes in llmtrain/launch."""

TABLES = {
    "llmtrain/launch/attempts.py": r"""
    seen by unit/test_attempts.py
        attempts: a complete run whose node is lost at the end has failed
          - (not lost or set(codes) == {DONE})
          + not lost
        attempts: there is one restart too few
          - if final or number == restarts:
          + if final or number >= restarts - 1:
        attempts: ranks are restarted with a wrong recipe
          - any(ended.by_signal for ended in endings.values()) or BAD_USAGE in codes
          + any(ended.by_signal for ended in endings.values())
        attempts: nodes keep their numbers when one is gone
          - Nodes(len(members), members.index(nodes.rank),
          + Nodes(len(members), nodes.rank,
    """,
    "llmtrain/launch/forked_rank.py": r"""
    seen by end_to_end/test_interruptions.py::test_a_run_that_is_over_before_ranks_agree_to_stop_ends_at_once
        launch: a complete rank waits for a launcher that waits for it
          -     if code == DONE:
          -         leave_soon()
          +     if code < DONE:
          +         leave_soon()
    """,
    "llmtrain/launch/node_rendezvous.py": r"""
    seen by unit/test_lost_nodes.py
        roll call: a live launcher counts as gone
          - if node not in heard or beats != heard[node][0]:
          + if node not in heard:
        launch: a node that was given up ends the others' run
          - isinstance(error, RecipeError | ReturnedError) and
          + isinstance(error, RecipeError) and
        launch: a node that was given up while it was paused ends the others' run
          - if self._has(f"given up {self.nodes.rank}"):
          -                 return
          + pass
        roll call: a node that was given up is waited for again
          -         self._members = list(exits)  # a lost node acknowledges nothing
          -
    seen by unit/test_node_rendezvous.py
        roll call: a node number that is in use counts as gone
          - if self._store.add(f"beat {rank}", 0) == beats:
          + if self._store.add(f"beat {rank}", 0) >= beats:
        roll call: a node that does not reach node 0 reports nothing
          - if not is_reported and time.monotonic() - started >= REPORT_SECONDS:
          + if False:
        launcher: nodes of all steps of a Slurm job join one run
          - f"llmtrain launch {nodes.step}"
          + "llmtrain launch"
        roll call: an error at the meeting point that may pass is a wrong recipe
          - is_taken = nodes.rank == 0 and "EADDRINUSE" in reason
          + is_taken = True
        roll call: a port in use is an error that may pass
          - is_taken = nodes.rank == 0 and "EADDRINUSE" in reason
          + is_taken = False
        launch: ranks wait for ranks that have refused the recipe on another node
          - if mine.code in (FAILED, BAD_USAGE):
          + if mine.code == FAILED:
        launch: ranks wait for ranks of a node that was stopped before they met
          -             self._store.set(f"failed {self._attempt}", "yes")
          -
        launch: a launcher stopped at the end ends the ranks of other nodes
          -         self._attempt = attempt + 1
          -
        launch: node 0 may be lost while another node prepares data
          - with self.needs_node_0("prepare the data"):
          + if True:
        launch: node 0 may be lost while nodes arrive
          - with link.needs_node_0("arrive"):
          + if True:
    """,
    "llmtrain/launch/node_info.py": r"""
    seen by unit/test_node_rendezvous.py
        launch: nodes may start unequal numbers of processes
          - differ = len(set(processes)) > 1
          + differ = False
        launch: nodes may have different recipes
          - if differs := inconsistency(
          + if False and inconsistency(
        launch: a node without GPUs is a wrong recipe
          - if fewest < most and (differ or not fewest):
          + if False:
        launch: ranks without GPUs meet those that have some
          - if fewest < most and (differ or not fewest):
          + if fewest < most and differ:
        launch: other nodes are not told that one refuses the recipe
          - if node["refusal"]:
          + if False:
    """,
    "llmtrain/launch/nodes.py": r"""
    seen by unit/test_wrong_variables.py
        nodes: each node that mpirun starts trains alone
          -         check_is_alone("set
          +         str("set
    seen by unit/test_nodes.py
        nodes: a leftover NNODES makes each task of a Slurm step train alone
          - if tasks not in (1, count):
          + if False:
        nodes: accepts a rank one too high
          - if rank >= count:
          + if rank > count:
        processes: each node starts all ranks
          - return max(1, math.prod(parallel.given_on_cpu) // nodes)
          + return max(1, math.prod(parallel.given_on_cpu))
        nodes: MASTER_PORT is ignored
          - environment_number("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT))
          + DEFAULT_PORT)
        in process: a launch starts a process per replica
          - if parallel.in_process:
          -         return 1
          + if parallel.in_process:
          +         return parallel.replicas
    """,
    "llmtrain/launch/preflight.py": r"""
    seen by unit/test_pretrained.py
        weights: initial weights are not checked before the data is prepared
          - weights=check_initial_weights(recipe))
          + weights=None)
    seen by distributed/test_run_length.py
        length: recipe check does not warn that the learning rate jumps
          - warnings=[*warnings, *(change.warnings() if change is not None else ())],
          + warnings=warnings,
    seen by distributed/test_resume_training.py::test_a_run_is_not_continued_on_another_text
        preflight: a run may continue on another text
          -     check_texts(directory, texts)
          -
    seen by unit/test_preflight.py
        preflight: a model that can't be initialized is accepted
          - check_initial_values(model)
          + pass
        preflight: a tokenizer that would be trained is not compared with the model
          -             check_vocabulary(recipe, size)
          -
          +             pass
          +
        preflight: a run directory of another recipe is accepted
          -     directory.check_recipe()
          -
        preflight: a start does not check this machine's packages and GPUs
          -     check_machine(recipe)
          -
        preflight: a prepared text of eval.sets may be too short
          -                 check_set(recipe, name, text)
          -
        warnings: recipe check does not pass on its mesh
          - recipe_warnings(recipe, {**texts, **sets}, mesh)
          + recipe_warnings(recipe, {**texts, **sets})
        warnings: recipe check ignores the number of processes on another machine
          - recipe_warnings(recipe, mesh=MeshSize(ranks, replicas))
          + recipe_warnings(recipe)
        warnings: a process on another machine is one rank, even with all replicas in one process
          - ranks = processes * recipe.parallel.ranks_per_process
          + ranks = processes
        warnings: an automatic mesh on another machine is one replica
          - replicas = 1 if ranks == 1 else None
          + replicas = 1
    seen by unit/test_data_one_document.py
        launch: a text of one document is tokenized before it is refused
          -     if find_ready_made(data) is None:
          -         check_documents(data)
          +     if False:
          +         check_documents(data)
    """,
    "llmtrain/launch/rank_server.py": r"""
    seen by unit/test_rank_server.py
        rank server: a launcher with threads is forked
          - len(list(threads.iterdir())) > 1:
          + False:
        rank server: keeps the launcher's files open
          - os.close(number)
          + pass
        rank server: a temporary folder with a long path ends the launch
          - connection.Listener(family="AF_UNIX").close()
          + pass
        rank server: a machine without shared memory can't launch
          - multiprocessing.get_context("fork").Lock()  # as
          + pass  # as
        rank server: a scheduler's signal ends it
          - signal.signal(number, signal.SIG_IGN)
          + signal.signal(number, signal.SIG_DFL)
        rank server: each rank repeats the launcher's buffered output
          -         stream.flush()  # else
          +         pass  # else
    """,
    "llmtrain/launch/torchrun.py": r"""
    seen by unit/test_torchrun.py
        launch: after the loss of a node, a smaller batch has fewer steps
          - f"train.steps={train.total_steps}"]
          + f"train.steps={train.total_steps - 1}"]
        launch: after the loss of a node, the batch changes though the data does not allow it
          - if problem := batch_problem(recipe, smaller):
          + if False:
        launch: ranks on GPUs have torch's default allocator settings
          -     use_expandable_segments()
          -
        torchrun: ranks that end with a library's code are not started again
          - max(codes & {BAD_USAGE, STOPPED_EARLY}, default=FAILED)
          + max(codes)
        torchrun: after a second Ctrl-C, a node waits for the summary of killed ranks
          - if nodes.rank == 0 or are_killed() else
          + if nodes.rank == 0 else
        torchrun: Kubeflow's variables change its rendezvous
          - environment_without_rank(), clear=True
          + environment_without_rank()
        launch: a node that refuses the recipe exits before it meets the others
          - if nodes.count == 1 or error.exit_code != BAD_USAGE:
          + if True:
        torchrun: NFS's stale cache decides whether training has begun
          -     revalidate(directory.path)  # rank 0 may be on another host
          -
        torchrun: after a loss, a batch that can't be divided is a wrong recipe
          -     except UserError as error:
          -         reason
          +     except LookupError as error:
          +         reason
        torchrun: torch's agent handles signals itself
          - UNUSED_SIGNAL = "SIGVTALRM"
          + UNUSED_SIGNAL = "SIGTERM,SIGHUP"
        torchrun: torch's message that other nodes are still busy is shown
          - "Received %s death signal", "Error waiting on exit barrier"
          + "Received %s death signal", "Received"
        launch: the first line is printed after torch is imported
          -     print(f"{recipe.run.name}: {recipe.sync.method}, {length}; loading torch", flush=True)
          +     import torch  # noqa: F401
          +     print(f"{recipe.run.name}: {recipe.sync.method}, {length}; loading torch", flush=True)
    seen by unit/test_text_list.py
        sites: remaining nodes read the first texts
          - rank=member)) for member in attempt.members)
          + rank=member)) for member in range(attempt.nodes.count))
    seen by unit/test_batch_shares.py
        shares: the first shares are kept, not those of the remaining replicas
          - [train.batch_shares[replica] for replica in left] if
          + [*train.batch_shares[:len(left)]] if
    seen by unit/test_torchrun.py, end_to_end/test_interruptions.py
        torchrun: a stopped run counts as failed
          - {"signal": STOPPED_EARLY, "done": DONE}
          + {"done": DONE}
    seen by end_to_end/test_start.py
        start: ranks import TensorBoard themselves
          deep: the test starts a separate interpreter, which imports everything
          -         import torch.utils.tensorboard
          -
    """,
    "llmtrain/launch/watchdog.py": r"""
    seen by unit/test_watchdog.py
        watch: working ranks are ended, too
          - if elsewhere or _state(rank) == psutil.STATUS_STOPPED:
          + if True:
        watchdog: SIGUSR1 is not passed on
          - signal.SIGQUIT, signal.SIGUSR1)
          + signal.SIGQUIT)
        watchdog: a second signal of another kind interrupts the checkpoint
          - if first and number != first[0]:
          + if False:
        watchdog: Ctrl-C ends the launcher if the reader of its output is gone
          -     with suppress(OSError):  # Ctrl-C also
          +     with suppress():  # Ctrl-C also
    seen by end_to_end/test_interruptions.py
        watchdog: the second Ctrl-C is a request, not an end
          -         if count == 1:
          -
          +         if count <= 2:
          +
        watchdog: the first Ctrl-C ends everything immediately
          - interrupts = set(psutil.Process().children()), itertools.count(1)
          + interrupts = set(psutil.Process().children()), itertools.count(2)
    """,
}
