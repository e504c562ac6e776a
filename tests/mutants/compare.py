"""Mistakes in llmtrain/compare."""

TABLES = {
    "llmtrain/compare/benchmarks.py": r"""
    seen by unit/test_compare_benchmarks.py
        compare: tests against an earlier checkpoint of the baseline count
          - if of_base is not None and Path(other).name
          + if False and Path(other).name
        compare: an edited suite is not evaluated again
          -  and result.get("suite_digest", digest) == digest
        compare: a trial is evaluated against the baseline of another seed
          - bases = {(one.condition, one.seed): one for one in done if one.run == baseline}
          + bases = {(one.condition, one.seed): base for one in done for base in done if base.run == baseline}
        compare: fewer bits per byte are worse
          - sign = -1 if metric in LOWER_IS_BETTER else 1
          + sign = 1
        compare: a trial without its test against the baseline is not evaluated again
          - (of_base and _is_against(result, one.directory, base.directory, of_base))
          + of_base
        compare: tests against a baseline that has no result any more are kept
          - not (of_base and _is_against(
          + not (True and _is_against(
        compare: tests against a baseline that was trained again count
          - if None not in digests and digests[0] != digests[1]:
          + if False:
    """,
    "llmtrain/compare/comparison.py": r"""
    seen by unit/test_comparison.py
        compare: trials share a mirror
          -             "checkpoint.mirror=null",
          +           ␣
        compare: a fault may be of a host that a run does not use
          - for host in faulty if host >= used]
          + for host in faulty if host >= count]
    seen by unit/test_compare_runner.py
        compare: an override of what the file sets is ignored
          - if value not in (None, used):
          + if False:
    """,
    "llmtrain/compare/faults.py": r"""
    seen by unit/test_compare_faults.py
        documents: garbage fills the padding
          - b == IGNORE_INDEX,
          + b == -1,
    """,
    "llmtrain/compare/measures.py": r"""
    seen by unit/test_compare_results.py
        compare: interpolates from the wrong end
          - share = (before["loss"] - target) /
          + share = (target - now["loss"]) /
        compare: the target must be undercut
          - points["loss"] <= target
          + points["loss"] < target
        compare: waiting also counts as exposed communication
          - exposed = last["comm/exposed_seconds"] - waiting
          + exposed = last["comm/exposed_seconds"]
        compare: of two seeds the better final loss is the target
          - interpolation="higher"
          + interpolation="lower"
        compare: a speed-up is of all seeds, whether they got there or not
          - ours[counts].where(fewer, theirs[counts])
          + ours[counts]
        compare: a range of speed-ups pairs best with best
          - "low": theirs["low"] / ours["high"]
          + "low": theirs["low"] / ours["low"]
        compare: faster by the median, though ranges overlap
          - if ours["high"] < theirs["low"]:
          + if ours["median"] < theirs["median"]:
        compare: bytes received by some hosts are those of all
          - None if None in received else sum(received)
          + sum(filter(None, received))
    seen by unit/test_compare_runs.py
        compare: runs on different texts race to a target
          - goal = target if unit.is_ranked else math.nan
          + goal = target
        compare: runs on different texts race to their own losses
          - ends = ends if unit.is_ranked else ends * math.nan
          + ends = ends * 1.0
    """,
    "llmtrain/compare/other_load.py": r"""
    seen by unit/test_compare_other_load.py
        compare: time of children that run is other programs'
          - (this, *this.children(recursive=True))
          + (this,)
        compare: time of children that have ended is other programs'
          -  + times.children_user + times.children_system
        compare: interrupts are other programs
          - "steal"), ("idle"
          + "steal", "softirq"), ("idle"
    """,
    "llmtrain/compare/plots.py": r"""
    seen by unit/test_compare_plots.py
        loss: the median of seeds with few steps in common is at those steps
          - if 2 * len(shared) < max(map(len, curves)):
          + if not len(shared):
        loss: the median goes on after the first seed has ended
          - min(curves, key=lambda curve: curve.index[-1]).index
          + max(curves, key=lambda curve: curve.index[-1]).index
        loss: the median begins before all seeds have
          - steps[steps >= begin]
          + steps[steps >= 0]
        time: the bar is that of the fastest seed
          - .index[len(rows) // 2]
          + .index[0]
        loss: a short logarithmic axis has no numbers
          - if last < 100 * first:
          + if False:
        loss: a logarithmic axis has the number of its one power of ten
          - if last < 100 * first:
          + if last < 10 * first:
    seen by unit/test_compare_report.py
        timeline: one long round sets the window of all runs
          - return min(max(needed), LONGEST * statistics.median(needed))
          + return max(needed)
    """,
    "llmtrain/compare/report.py": r"""
    seen by unit/test_compare_report.py
        headline: one seed among several is not pointed out
          - min(best["seeds"], base["seeds"])
          + max(best["seeds"], base["seeds"])
        report: commits are listed without their seeds
          - if len(seeds) < 2:
          + if True:
        headline: the first run is the fastest
          - .sort_values("median", kind="stable").index
          + .index
        headline: seeds that miss the target are not named
          - if side["finite"] < side["seeds"]:
          + if False:
        compare: one seed is faster without a word
          - == 1
          -     by_one_seed
          + == 0
          +     by_one_seed
    """,
    "llmtrain/compare/results.py": r"""
    seen by unit/test_compare_in_process.py
        compare: replicas that take turns are timed
          - takes_turns and not has_clock
          + False
        compare: a virtual clock counts for nothing
          - _by_virtual_clock(lines) if takes_turns and has_clock else lines
          + lines
    seen by unit/test_compare_report.py
        compare: failed trials are beside other work
          - return ended and
          + return
    seen by unit/test_compare_benchmarks.py
        compare: scores of earlier checkpoints are the last one's
          - (result["checkpoint_step"] == steps if "checkpoint_step" in result else "-step-" not in path.stem)
          + True
        compare: a result of an evaluation costs its run
          - read_mapping(path, EVALUATE_AGAIN)
          + read_mapping(path, RUN_AGAIN)
    seen by unit/test_compare_runs.py
        compare: a user's run is to be deleted as a trial is
          - remedy = RUN_AGAIN if
          + remedy = RUN_AGAIN if True or
    seen by unit/test_compare_results.py
        compare: spans in order of their ends
          - sort_values(["rank", "start"],
          + sort_values(["rank", "end"],
        compare: failed trials are measured
          - return self.state in (TrialState.DONE, TrialState.STOPPED) and bool(self.lines)
          + return bool(self.lines)
    """,
    "llmtrain/compare/runner.py": r"""
    seen by unit/test_compare_runner.py
        compare: text is prepared for the batch before the restarts
          - key=lambda recipe: recipe.train.global_batch
          + key=lambda recipe: -recipe.train.global_batch
        compare: a restart whose batch can't change is found in the middle of a trial
          - if earlier is not None and (problem
          + if False and (problem
        compare: a folder from before restarts had batches is of another version
          -  if line.strip() != "global_batch: null"
    seen by unit/test_compare_runner.py
        compare: a failed trial shortens the time that is left
          - if record.get("state") in (TrialState.DONE, TrialState.STOPPED) and is_number
          + if is_number
        compare: what the file overrides is said to be of the command line
          - str(error).removeprefix(f"{COMMAND_LINE}: ")
          + str(error)
        compare: garbage may begin after a run's last step
          - if garbage is not None and garbage.first >
          + if False and garbage.first >
        compare: another seed is another comparison
          - ("seeds", "baseline", "target", "suite")
          + ("baseline", "target", "suite")
        compare: the tasks of a suite are not loaded before the trials
          -                 fetch_tasks(comparison.suite, folder, progress.print)
          +                 pass
        compare: a host without a limit uses no CPU
          - one.cpus or comparison.hosts.processes
          + one.cpus or 0
        compare: the recipes' warnings are not shown
          -                     progress.print(f"warning: runs.{run}: {line}")
          -
          +                     pass
          +
    """,
    "llmtrain/compare/runs.py": r"""
    seen by unit/test_compare_runs.py
        compare: runs are listed as given
          -     if unit.is_ranked:
          -         runs =
          +     if False:
          +         runs =
        compare: what the picture's title says differs is always the text
          - different {unit.differs}: not
          + different texts: not
    """,
    "llmtrain/compare/trial.py": r"""
    seen by unit/test_compare_trial.py
        comparison: each part of a trial has the whole limit
          - (self.comparison.stop_after_minutes or math.inf) - trained
          + (self.comparison.stop_after_minutes or math.inf)
        compare: a fault that fails costs a trial's record
          - except (TimeoutError, CommandError) as error:
          -             failures.append(one_line(error))
          -         seconds
          + except CommandError as error:
          +             failures.append(one_line(error))
          +         seconds
        compare: a failing ip costs a trial's record
          - with suppress(CommandError):
          + with suppress(OSError):
        compare: faults after the end of a run are not told
          - .faults_after(trained)
          + .faults_after(math.inf)
        compare: hosts that train after another one has failed may hang
          - (first_line, self.stopped, self.failed, math.inf)
          + (first_line, self.stopped, math.inf)
    """,
    "llmtrain/compare/cluster/frame_switch.py": r"""
    seen by unit/test_frame_switch.py
        switch: frames leave when they arrive
          - (now + self.latency_seconds, frame)
          + (now, frame)
        switch: frames for one host go to all
          - return [found] if found is not None else
          + return
        switch: no frame is lost
          - if self.loss and self._drawn.random() < self.loss:
          + if False:
        switch: every trial loses the same frames
          - one["loss"], one["seed"])
          + one["loss"])
    """,
    "llmtrain/compare/cluster/hosts.py": r"""
    seen by unit/test_cluster_tools.py
        hosts: clusters of other PID namespaces are leftovers
          -  and not (groups and groups.is_foreign(cluster))
    """,
    "llmtrain/compare/cluster/limits.py": r"""
    seen by unit/test_virtual_cluster.py
        network: a cable receives what it sends
          - return self.downlink_mbit or self.bandwidth_mbit
          + return self.bandwidth_mbit
        network: lost packets are as large as others
          -     if any(own.loss for own in limits):
          -         return FRAME
          -
    """,
}
