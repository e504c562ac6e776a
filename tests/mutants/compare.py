"""Mistakes in llmtrain/compare."""

TABLES = {
    "llmtrain/compare/benchmarks.py": r"""
    seen by unit/test_compare_benchmarks.py
        compare: tests against an earlier checkpoint of the baseline are accepted
          - if of_base is not None and Path(other).name
          + if False and Path(other).name
        compare: results of a suite from before its edit are accepted
          -  and result.get("suite_digest", digest) == digest
        compare: a trial is evaluated against the baseline of another seed
          - bases = {(one.condition, one.seed): one for one in done if one.run == baseline}
          + bases = {(one.condition, one.seed): base for one in done for base in done if base.run == baseline}
        compare: fewer bits per byte count as worse
          - sign = -1 if metric in LOWER_IS_BETTER else 1
          + sign = 1
        compare: a trial without tests against the baseline is not evaluated again
          - (of_base and _is_against(result, one.directory, base.directory, of_base))
          + of_base
        compare: tests against a baseline without a result are accepted
          - not (of_base and _is_against(
          + not (True and _is_against(
        compare: tests against a baseline from before it was trained again are accepted
          - if None not in digests and digests[0] != digests[1]:
          + if False:
    """,
    "llmtrain/compare/comparison.py": r"""
    seen by unit/test_comparison.py
        compare: all trials use the same mirror
          -             "checkpoint.mirror=null",
          +           ␣
        compare: a fault of a host that a run does not use is accepted
          - for host in faulty if host >= used]
          + for host in faulty if host >= count]
    seen by unit/test_compare_runner.py
        compare: an override of a key that the file sets raises no error
          - if value not in (None, used):
          + if False:
    """,
    "llmtrain/compare/faults.py": r"""
    seen by unit/test_compare_faults.py
        documents: garbage replaces the padding, too
          - b == IGNORE_INDEX,
          + b == -1,
    """,
    "llmtrain/compare/measures.py": r"""
    seen by unit/test_compare_results.py
        compare: costs are interpolated from the wrong end
          - share = (before["loss"] - target) /
          + share = (target - now["loss"]) /
        compare: a loss equal to the target does not reach it
          - points["loss"] <= target
          + points["loss"] < target
        compare: exposed communication includes waiting
          - exposed = last["comm/exposed_seconds"] - waiting
          + exposed = last["comm/exposed_seconds"]
        compare: a sum over some hosts counts as the bytes that all hosts received
          - None if None in received else sum(received)
          + sum(filter(None, received))
    seen by unit/test_compare_baseline.py
        compare: the target is a loss that one of the baseline's seeds misses
          - ["final_loss"].max()
          + ["final_loss"].quantile(0.5, interpolation="higher")
        compare: ratios pair a trial with the baseline's trial of another seed
          - bases.get(key)
          + next(iter(bases.values()), None)
        compare: a seed without a ratio is not counted among a run's seeds
          - ratios.where(has_ratio, math.inf)
          + ratios.where(has_ratio)
        compare: seeds without a ratio count as infinite in its median
          - .assign(**finite.median()[RATIOS])
          + .assign()
        compare: a trial that missed the target has a ratio of zero
          - np.isfinite(ours) & np.isfinite(theirs) & np.isfinite(ratios)
          + np.isfinite(ratios)
        compare: the mean decides on faster, whatever its confidence interval
          - if low > 0:
          + if low + high > 0:
        compare: the mean decides on slower, whatever its confidence interval
          - if high < 0:
          + if low + high < 0:
        compare: the confidence interval has one degree of freedom too many
          - T_QUANTILES[degrees - 1]
          + T_QUANTILES[min(degrees, 8)]
        compare: the confidence interval is that of ratios, not of logarithms
          - logs = np.log(ratios.replace(math.inf, math.nan).clip(lower=np.finfo(float).tiny))
          + logs = ratios.replace(math.inf, math.nan) - 1
        compare: more than ten seeds have no quantile
          - degrees = min(logs.count() - 1, len(T_QUANTILES))
          + degrees = logs.count() - 1
        compare: a single ratio has no outcome
          - if degrees > 0 else 0.0
          + if degrees > 0 else math.nan
        compare: a ratio of zero makes the interval infinite
          - .clip(lower=np.finfo(float).tiny)
          + .clip(lower=0)
    seen by unit/test_compare_runs.py
        compare: runs on different texts are compared at a given target
          - goal = target if unit.is_ranked else math.nan
          + goal = target
        compare: runs on different texts are compared at the baseline's loss
          - table["final_loss"] if unit.is_ranked else
          + table["final_loss"] if True else
    """,
    "llmtrain/compare/other_load.py": r"""
    seen by unit/test_compare_other_load.py
        compare: the CPU time of running children counts as other programs'
          - (this, *this.children(recursive=True))
          + (this,)
        compare: the CPU time of ended children counts as other programs'
          -  + times.children_user + times.children_system
        compare: soft interrupts count as other programs
          - "steal"), ("idle"
          + "steal", "softirq"), ("idle"
    """,
    "llmtrain/compare/plots.py": r"""
    seen by unit/test_compare_plots.py
        loss: the median of seeds is at their common steps, however few they are
          - if 2 * len(shared) < max(map(len, curves)):
          + if not len(shared):
        loss: the median continues after the first seed has ended
          - min(curves, key=lambda curve: curve.index[-1]).index
          + max(curves, key=lambda curve: curve.index[-1]).index
        loss: the median begins before all seeds have begun
          - steps[steps >= begin]
          + steps[steps >= 0]
        time: the bar shows the fastest seed
          - .index[len(rows) // 2]
          + .index[0]
        loss: a short logarithmic axis may have no numbers
          - if last < 100 * first:
          + if False:
        loss: a logarithmic axis with one power of ten has a single number
          - if last < 100 * first:
          + if last < 10 * first:
    seen by unit/test_compare_report.py
        timeline: one long round sets the window of all runs
          - return min(max(needed), LONGEST * statistics.median(needed))
          + return max(needed)
    """,
    "llmtrain/compare/report.py": r"""
    seen by unit/test_compare_report.py
        headline: a speed-up of one seed is not pointed out
          - if speed_up["finite"] == 1 else
          + if speed_up["seeds"] == 1 else
        headline: a rival that may be slower by chance is not mentioned
          - if not log_interval(times[run] / times[best])[0] > 0
          + if not log_interval(times[run] / times[best])[1] > 0
        headline: a rival that shares no seed with the fastest run is not mentioned
          - if not log_interval(times[run] / times[best])[0] > 0
          + if log_interval(times[run] / times[best])[0] <= 0
        report: seeds without a ratio are not mentioned
          - if finite < seeds else
          + if False else
        report: several commits are listed without their seeds
          - if len(seeds) < 2:
          + if True:
        headline: the first faster run counts as the fastest
          - ranked.sort_values(["has_interval", "median"], ascending=False, kind="stable")
          + ranked
        headline: a larger speed-up of one seed is preferred to one with an interval
          - faster["finite"] > 1)
          + faster["finite"] > 0)
        headline: seeds that miss the target are not mentioned
          - if side["finite"] < side["seeds"]:
          + if False:
        compare: a verdict from one seed is not marked
          - (runs["speed_up"]["finite"] == 1)
          + (runs["speed_up"]["finite"] == 0)
    """,
    "llmtrain/compare/results.py": r"""
    seen by unit/test_compare_in_process.py
        compare: times of replicas that take turns are reported
          - takes_turns and not has_clock
          + False
        compare: the times of a virtual clock are ignored
          - _by_virtual_clock(lines) if takes_turns and has_clock else lines
          + lines
        compare: waits of the process are parts of a virtual time
          - for key, value in line.items() if key not in WAITS
          + for key, value in line.items()
    seen by unit/test_compare_report.py
        compare: failed trials count as disturbed by other programs
          - return ended and
          + return
    seen by unit/test_compare_benchmarks.py
        compare: scores of earlier checkpoints count as those of the last checkpoint
          - (result["checkpoint_step"] == steps if "checkpoint_step" in result else "-step-" not in path.stem)
          + True
        compare: the advice for a damaged evaluation is to repeat the run
          - read_mapping(path, EVALUATE_AGAIN)
          + read_mapping(path, RUN_AGAIN)
    seen by unit/test_compare_runs.py
        compare: the advice for a user's damaged run is to repeat it like a trial
          - remedy = RUN_AGAIN if
          + remedy = RUN_AGAIN if True or
    seen by unit/test_compare_results.py
        compare: spans are in the order of their ends
          - sort_values(["rank", "start"],
          + sort_values(["rank", "end"],
        compare: failed trials are measured
          - return self.state in (TrialState.DONE, TrialState.STOPPED) and bool(self.lines)
          + return bool(self.lines)
    """,
    "llmtrain/compare/runner.py": r"""
    seen by unit/test_compare_restarts.py
        compare: text is prepared for the smallest batch of a trial
          - key=lambda recipe: recipe.train.global_batch
          + key=lambda recipe: -recipe.train.global_batch
        compare: a restart whose batch can't change is only noticed in the trial
          - if earlier is not None and (problem
          + if False and (problem
        compare: a folder from before restarts had batches counts as another comparison
          -  if line.strip() != "global_batch: null"
        compare: a trial with another batch at its start is kept if a restart changes the batch
          - if batches and (batch
          + if False and (batch
    seen by unit/test_compare_runner.py
        compare: failed trials enter the estimate of the time left
          - if record.get("state") in (TrialState.DONE, TrialState.STOPPED) and is_number
          + if is_number
        compare: errors of the file's overrides name the command line
          - str(error).removeprefix(f"{COMMAND_LINE}: ")
          + str(error)
        compare: garbage after a run's last step is accepted
          - if garbage is not None and garbage.first >
          + if False and garbage.first >
        compare: another seed counts as another comparison
          - ("seeds", "baseline", "target", "suite")
          + ("baseline", "target", "suite")
        compare: a suite's tasks are not fetched before the trials
          -                 fetch_tasks(comparison.suite, folder, progress.print)
          +                 pass
        compare: a host without a CPU limit counts as using no core
          - one.cpus or comparison.hosts.processes
          + one.cpus or 0
        compare: warnings of the recipes are not printed
          -                     progress.print(f"warning: runs.{run}: {line}")
          -
          +                     pass
          +
    """,
    "llmtrain/compare/runs.py": r"""
    seen by unit/test_compare_runs.py
        compare: runs are listed in the given order
          -     if unit.is_ranked:
          -         runs =
          +     if False:
          +         runs =
        compare: the picture's title always blames different texts
          - different {unit.differs}: not
          + different texts: not
    """,
    "llmtrain/compare/trial.py": r"""
    seen by unit/test_compare_trial.py
        comparison: each stage of a trial has the whole time limit
          - (self.comparison.stop_after_minutes or math.inf) - trained
          + (self.comparison.stop_after_minutes or math.inf)
        compare: a trial whose fault times out has no record
          - except (TimeoutError, CommandError) as error:
          -             failures.append(one_line(error))
          -         seconds
          + except CommandError as error:
          +             failures.append(one_line(error))
          +         seconds
        compare: a trial whose ip command fails has no record
          - with suppress(CommandError):
          + with suppress(OSError):
        compare: faults after the end of a run are not reported
          - .faults_after(trained)
          + .faults_after(math.inf)
        compare: the reason of a failure is read from the stage before
          - .read_bytes()[logged[number] :]
          + .read_bytes()
        compare: the reason of a failure is sought on the first host only
          - if any(line.startswith(ERROR) for line in own)
          + if True
        compare: hosts may hang after another host has failed
          - (first_line, self.stopped, self.failed, math.inf)
          + (first_line, self.stopped, math.inf)
    """,
    "llmtrain/compare/cluster/frame_switch.py": r"""
    seen by unit/test_frame_switch.py
        switch: frames leave without their latency
          - (now + self.latency_seconds, frame)
          + (now, frame)
        switch: frames for a known host go to all hosts
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
        hosts: clusters of other PID namespaces count as leftovers
          -  and not (groups and groups.is_foreign(cluster))
    """,
    "llmtrain/compare/cluster/limits.py": r"""
    seen by unit/test_virtual_cluster.py
        network: a host receives at the rate at which it sends
          - return self.downlink_mbit or self.bandwidth_mbit
          + return self.bandwidth_mbit
        network: packets are not limited to a frame where some are lost
          -     if any(own.loss for own in limits):
          -         return FRAME
          -
    """,
}
