"""Program that makes the runs of the study (PROTOCOL.md), several at a time, for a given number of hours.

    python benchmarks/study/study_runs.py --hours 2 --tinystories train.txt valid.txt
    python benchmarks/study/study_runs.py --list

Each run has one core and the lowest priority. An interrupted run continues from its checkpoint the next time. When a run ends, its
result is added as a line to benchmarks/results/study/runs.jsonl; commit this file with the page that
`python benchmarks/study/study_page.py --write` makes from it. A run that diverges is a result. Any other failure, such as a full
disk, ends the study with exit code 1 and keeps the run's folder and log; the same command then continues the study. Folders of runs
on TinyStories alone are kept, because their models are evaluated on benchmarks (PROTOCOL.md).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_plan import TOKENIZER, Run, loss_of, text_keys
from study_stages import STAGES, pending, single_runs, total
from table import RESULTS, ROOT, commit

from llmtrain.errors import DONE, FAILED, STOPPED_EARLY, RecipeError, TrainingError
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run_dir import lock_folder

RECIPE = "benchmarks/study/study.yaml"
FAULTY_RUN = str(Path(__file__).with_name("faulty_run.py"))
RECORDS = RESULTS / "study" / "runs.jsonl"
RUNS = ROOT / "runs" / "study"
POLL_SECONDS = 2.0
LOWEST = 19
"""Nice value of the runs, which get the CPU time that other programs leave."""
DIVERGED = re.compile(
    r"error: .*(the (loss|norm of the gradient) is (nan|-?inf) on rank|no gradient was finite|\(sync\.reduction\.max_exclusions\))"
)
"""Error line of a run that diverged: from the trainer's check of its numbers, or from EDiT's of its norms."""
DIAGNOSTICS = (
    "sync/divergence",
    "sync/pseudo_grad_norm",
    "sync/weights_max",
    "sync/anomalies",
    "sync/rollbacks",
    "sync/late",
)
"""Tags whose last value a record has: they show whether replicas drift apart, and whether EDiT's penalty did anything."""
NO_LOSS = "error: the validation loss at the end is not finite"


def read_records(path: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Return the records of finished runs by id."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def append(record: Mapping[str, Any], path: Path = RECORDS) -> None:
    """Add a record to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def record_of(run: Run, folder: Path, made_by: str, error: str | None = None) -> dict[str, Any]:
    """Return the record of a run that has ended: its setting, and the results in its folder. `made_by` is the commit of its last
    start, and `error` the error line if it diverged."""
    record: dict[str, Any] = {
        "id": run.id,
        **asdict(run.cell),
        "kind": run.kind,
        "number": run.number,
        "keys": run.setting.overrides(),
        "commit": made_by,
        "torch": importlib.metadata.version("torch"),
        "cpu": cpu_name(),
    }
    if error is not None:
        return {**record, "loss": None, "error": error}
    summary = json.loads((folder / "summary.json").read_text())
    if summary["final_eval_loss"] is None:
        return record_of(run, folder, made_by, NO_LOSS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sent, curve = 0.0, []
    for line in lines:
        sent = line.get("comm/bytes_total", sent)
        if "eval/loss" in line:
            curve.append([line["step"], round(line["eval/loss"], 5), round(sent)])
    last = [line for line in lines if "eval/bpb" in line][-1]
    texts = summary.get("texts")
    return {
        **record,
        "loss": summary["final_eval_loss"],
        "bits_per_byte": round(last["eval/bpb"], 5),
        "train_loss": summary["final_train_loss"],
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "rounds": summary["sync_count"],
        "bytes": summary["bytes_sent"],
        "seconds": summary["train_seconds"],
        **({"virtual_seconds": summary["virtual_seconds"]} if "virtual_seconds" in summary else {}),
        **({"loss_by_text": {name: text["eval_loss"] for name, text in texts.items()}} if texts else {}),
        "warnings": len(summary["warnings"]),
        "diagnostics": {tag: line[tag] for line in lines for tag in DIAGNOSTICS if tag in line},
        "curve": curve,
    }


def copy_tokenizer() -> None:
    """Copy the tokenizer of Python's text to TOKENIZER, where runs on both texts read it. Prepare the text if necessary."""
    if (ROOT / TOKENIZER).exists():
        return
    (text,) = prepare_texts(
        load_recipe(ROOT / RECIPE, [f"data.cache_dir={ROOT / 'data'}"]), show_progress=False
    ).values()
    shutil.copytree(text.directory / "tokenizer", new := ROOT / f"{TOKENIZER}.new", dirs_exist_ok=True)
    new.rename(ROOT / TOKENIZER)


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


class Job:
    """One run in a process of its own, on one core."""

    def __init__(self, run: Run, core: int, stories: Sequence[str] = ()):
        self.run, self.core, self.began, self.commit = run, core, time.monotonic(), commit()
        RUNS.mkdir(parents=True, exist_ok=True)
        self.log = RUNS / f"{run.id}.log"
        self.log_file = self.log.open("w")
        if f"data.tokenizer={TOKENIZER}" in run.overrides():
            copy_tokenizer()
        text = text_keys(run.cell.text, *stories)
        program = (FAULTY_RUN, run.fault) if run.fault else ("-m", "llmtrain", "train")
        command = [sys.executable, *program, RECIPE, *run.overrides(), *text]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.log_file, stderr=subprocess.STDOUT, start_new_session=True
        )
        os.sched_setaffinity(self.process.pid, {core})
        os.setpriority(os.PRIO_PROCESS, self.process.pid, LOWEST)
        with suppress(OSError):  # the kernel may share cores between sessions first (sched(7), autogroup)
            Path(f"/proc/{self.process.pid}/autogroup").write_text(str(LOWEST))

    def end(self, is_stopping: bool) -> dict[str, Any] | None:
        """Return the record if the run has finished or diverged, or None if it was interrupted. Keep its folder and log. Raises
        TrainingError if the run failed otherwise."""
        self.log_file.close()
        folder, code = RUNS / self.run.id, self.process.returncode
        if code == STOPPED_EARLY or (is_stopping and code == -signal.SIGTERM):
            return None
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        diverged = next(filter(DIVERGED.match, lines), None) if code == FAILED else None
        if code != DONE and diverged is None:
            raise TrainingError(
                f"{self.run.id} failed with exit code {code} ({lines[-1] if lines else 'it printed nothing'}); see {self.log}, "
                "then start the same command again"
            )
        return record_of(self.run, folder, self.commit, diverged)

    def clean_up(self, record: Mapping[str, Any]) -> None:
        """Remove the folder of a run whose record is written, unless its model is to be evaluated, and its log, unless the run
        diverged."""
        if self.run.cell.text != "tinystories":
            shutil.rmtree(RUNS / self.run.id, ignore_errors=True)
        if record.get("loss") is not None:
            self.log.unlink()


def next_run(stages: Sequence[str], done: Mapping[str, Any], running: Sequence[Job]) -> Run | None:
    """Return the first run that can be made now, or None."""
    taken = {job.run.id for job in running}
    return next((run for run in pending(stages, done) if run.id not in taken), None)


def make_runs(stages: Sequence[str], jobs: int, hours: float, stories: Sequence[str] = ()) -> int:
    """Make runs until `hours` are over, no run is left or one has failed, then stop those in progress with a checkpoint. Return the
    exit code, which is 1 if a run has failed. `stories` are the files of TinyStories, training and validation, unless the text comes
    from the hub. Raises RecipeError if another process makes the study's runs in this checkout."""
    lock = lock_folder(RUNS, "stop it")
    try:
        return _make_runs(stages, jobs, hours, stories)
    finally:
        lock.release()


def _make_runs(stages: Sequence[str], jobs: int, hours: float, stories: Sequence[str]) -> int:
    done, deadline = read_records(), time.monotonic() + 3600 * hours
    cores, running = sorted(os.sched_getaffinity(0)), []
    stopping, code = False, DONE

    def stop(*_: object) -> None:
        nonlocal deadline
        deadline = time.monotonic()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while True:
        if time.monotonic() >= deadline and not stopping:
            stopping = True
            for job in running:
                job.process.terminate()
        while not stopping and len(running) < jobs and (run := next_run(stages, done, running)) is not None:
            free = [core for core in cores if core not in {job.core for job in running}]
            running.append(Job(run, free[0] if free else cores[len(running) % len(cores)], stories))
        if not running:
            break
        time.sleep(POLL_SECONDS)
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            try:
                record = job.end(stopping)
            except TrainingError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                code = FAILED
                stop()
                continue
            if record is None:
                continue
            append(record)
            job.clean_up(record)
            done[record["id"]] = record
            of_cells = tuple(f"{cell.name}-" for stage in stages for cell in STAGES[stage])
            own, single = ({run.id for run in single_runs(names)} for names in (stages, [*STAGES]))
            made = sum(1 for key in done if key in own or (key not in single and key.startswith(of_cells)))
            minutes = (time.monotonic() - job.began) / 60
            print(f"[{made}/{total(stages)}] {record['id']} {loss_of(record):.4f} ({minutes:.1f} min)", flush=True)
    return code


def list_runs(stages: Sequence[str]) -> None:
    """Print the runs that could be made now, the number of records, and the number of runs in the stages."""
    done = read_records()
    for run in pending(stages, done):
        print(run.id, " ".join(run.setting.overrides()))
    print(f"{len(done)} runs are done; {total(stages)} in stages {', '.join(stages)}")


def main() -> None:
    """Make or list the runs that the command line chooses."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hours", type=float, default=1.0, help="time after which no run begins and those in progress stop"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time; default: cores")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="parts of the study")
    parser.add_argument(
        "--tinystories", nargs=2, metavar=("TRAIN", "VALIDATION"), help="files of TinyStories; default: from the hub"
    )
    parser.add_argument("--list", action="store_true", help="print what would be run now")
    options = parser.parse_args()
    if options.jobs < 1 or not options.hours > 0:
        parser.error(f"--jobs is {options.jobs} and --hours {options.hours:g}; expected at least one job and some time")
    if options.list:
        list_runs(options.stages)
    else:
        stories = [str(Path(name).resolve()) for name in options.tinystories or ()]
        try:
            sys.exit(make_runs(options.stages, options.jobs, options.hours, stories))
        except RecipeError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
