"""Files of a checkpoint: their layout, their digests, how they are written in the background, and which are valid.

    checkpoints/step-00001000/   torch.distributed.checkpoint files, and state.json with their sizes and digests
    checkpoints/latest           name of the newest checkpoint, written last

A checkpoint is written under a temporary name and renamed when it is complete. The digest is XXH3, which is fast enough
for disks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import CheckpointException

from llmtrain.errors import NO_ANSWER, CheckpointError, NewerFormatError, TrainingError, one_line, reason
from llmtrain.files import atomic_write, holder_text, is_bare_file_name, lock_holder, revalidate
from llmtrain.parallel.comms import MESSAGE_LENGTH, Comms
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.roll_call import format_ranks
from llmtrain.parallel.world import World
from llmtrain.run_files import LATEST, STATE_FILE, checkpoint_folders, step_name, step_of
from llmtrain.threads import with_current_device
from llmtrain.train.rank_errors import raise_on_all
from llmtrain.turns import join

FORMAT = 11
"""Version of the layout. A checkpoint of another version is not read."""
VALIDATED_ANCHOR = "anchor"
"""Value of `validated` in the state.json of a checkpoint whose run validates the anchor and not the replicas' mean."""
CHECKSUM_KEY = "sha256"
DAMAGED = ".damaged"
"""Suffix of a damaged checkpoint's folder once a run has continued from an older checkpoint."""
TRANSIENT = {*NO_ANSWER, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM} - {errno.EIO}
"""Numbers of transient errors, which do not mean that a file is damaged: errors of network file systems and missing
mounts, and a lack of memory or file handles."""
RETRY_PAUSES = (1.0, 3.0, 6.0)
"""Pauses in seconds before a read that failed with an I/O error is repeated. A network file system reports such errors
for some seconds while its server is replaced; a broken disk reports them permanently."""
Digest = tuple[int, str]
"""Size in bytes and 128-bit XXH3 in hex."""
TENSOR_FILE = re.compile(r"__(\d{1,9})_\d+\.distcp")
"""Names that torch gives to files of tensors. The group matches the rank that wrote the file."""

# Torch warns of calls without a process group (`no_dist`), which are intended here.
warnings.filterwarnings("ignore", ".*the intent is to (save|load) in a single process", UserWarning)


def dump_state(state: dict[str, Any]) -> str:
    """Return the text of state.json: the state, followed by its own digest."""
    return json.dumps({**state, CHECKSUM_KEY: _digest_of(state)})


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state.json. Raises CheckpointError if it is damaged or has another format."""
    where = path / STATE_FILE
    try:
        state = json.loads(_read_with_retries(lambda: where.read_text(encoding="utf-8")))
        seal = state.pop(CHECKSUM_KEY, None)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, OSError):
            raise_if_transient(where, error)
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} can't be read ({reason(error)})") from error
    if state.get("format") != FORMAT:
        is_newer = isinstance(state.get("format"), int) and state["format"] > FORMAT
        raise (NewerFormatError if is_newer else CheckpointError)(
            f"{path} has format {state.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    if seal != _digest_of(state):
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} is not what was written")
    if strange := [name for name in state.get("files", ()) if not is_bare_file_name(name)]:
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} lists {strange[0]!r}, not a file in its folder")
    return state


def _digest_of(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def digests(directory: Path, names: Sequence[str]) -> dict[str, Digest]:
    """Return the size and digest of each of the named files, by name."""
    return {name: ((directory / name).stat().st_size, _xxh3(directory / name)) for name in names}


def find_corruption(directory: Path, files: Mapping[str, Digest]) -> str | None:
    """Describe the first file that is missing, unreadable or changed. Returns None if all files are intact. Raises TrainingError
    for a file that can't be read because of a transient error."""
    for name, (size, digest) in sorted(files.items()):
        path = directory / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
            if _read_with_retries(lambda path=path: _xxh3(path)) != digest:
                return f"{name} is not what was written: its digest differs"
        except FileNotFoundError:
            return f"{name} is gone"
        except OSError as error:
            raise_if_transient(path, error)
            return f"{name} can't be read ({error.strerror})"
    return None


def _read_with_retries(read: Callable[[], str]) -> str:
    """Return what `read` returns. After an I/O error, call it again up to len(RETRY_PAUSES) times."""
    for pause in RETRY_PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            time.sleep(pause)
    return read()


def raise_if_transient(path: Path, error: OSError) -> None:
    """Raise TrainingError if a file could not be read because of a transient error, so that the checkpoint may be intact."""
    if error.errno in TRANSIENT:
        raise TrainingError(
            f"{path} can't be read now ({error.strerror}); start the same command again to continue from its checkpoint"
        ) from error


def latest_valid(directory: Path, mesh: Mesh, note: Callable[[str], None]) -> Path | None:
    """Return the newest valid checkpoint in a `checkpoints` folder, or None if it has no checkpoint. A collective of
    all ranks, each of which reads its share of the files. `note` receives a line for each checkpoint that is rejected.

    Raises CheckpointError, on every rank, if all checkpoints are damaged or one is of a newer version: only a user who
    deletes them restarts the run from scratch. Raises TrainingError, on every rank, if one can't be read because of a
    transient error.
    """
    names = mesh.broadcast_from_main(lambda: [path.name for path in checkpoint_folders(directory)])
    problem = ""
    for name in reversed(names):
        path = directory / name  # hosts may have the folder under different paths
        try:
            state = mesh.broadcast_from_main(lambda path=path: read_state(path))
        except NewerFormatError:
            raise  # it is not damaged
        except CheckpointError as error:
            problem = str(error)
        else:
            if (found := find_corruption_on_any_rank(path, state["files"], mesh)) is None:
                return path
            problem = f"{path} is damaged: {found}"
        note(f"{problem}; falling back to the previous one")
    if problem:
        raise CheckpointError(
            f"{problem}; none of the {len(names)} checkpoints is valid; restore one, or delete them to train from the start"
        )
    return None


def set_aside_newer(directory: Path, step: int, note: Callable[[str], None]) -> None:
    """Rename the checkpoints after `step`, which are damaged, so that they count neither as the newest nor as the best. The run
    continues from `step`. `note` receives a line for each. Called on the main rank."""
    for path in checkpoint_folders(directory):
        if step_of(path) <= step:
            continue
        aside = path.with_name(path.name + DAMAGED)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            note(f"{path.name}, which is damaged, is now {aside.name}")
            atomic_write(directory / LATEST, step_name(step) + "\n")
        except OSError as error:
            note(f"{path}, which is damaged, can't be renamed ({error.strerror})")


def share_of(rank: int, ranks: int, names: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint that a rank reads back: those that it wrote, which its host may still have in
    memory even if the disk is at another site. Files of ranks that no longer exist are divided among the ranks. The
    main rank also reads the files without tensors, such as the metadata."""
    written_by = {name: int(found[1]) if (found := TENSOR_FILE.fullmatch(name)) else 0 for name in names}
    return sorted(name for name, writer in written_by.items() if writer % ranks == rank)


def find_corruption_on_any_rank(directory: Path, files: Mapping[str, Digest], mesh: Mesh) -> str | None:
    """Return the first problem that `find_corruption` finds on any rank. Each rank reads its share of the
    files. A collective of all ranks. Raises TrainingError, on every rank, if a host does not see the directory, which exists on
    the main rank's host."""
    share = share_of(mesh.world.rank, mesh.world.size, files)
    found = raise_on_all(
        mesh, lambda: _find_corruption_here(directory, {name: files[name] for name in share}, mesh.world)
    )
    of_ranks = mesh.all_ranks.all_gather_object(found, "asking all ranks for damaged files")
    return next((problem for problem in of_ranks if problem is not None), None)


def _find_corruption_here(directory: Path, files: Mapping[str, Digest], world: World) -> str | None:
    """Return what `find_corruption` finds, with this host's name if there are several hosts."""
    host = socket.gethostname()
    revalidate(directory)
    if not os.path.isdir(directory):
        raise TrainingError(
            f"{host} does not see {directory}, which rank 0 does; mount the file system of run.out_dir there and start the same command "
            "again"
        )
    found = find_corruption(directory, files)
    return f"{found} on {host}" if found is not None and world.local_size < world.size else found


def _xxh3(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class CheckpointWriter:
    """Writer of one checkpoint. Every rank creates one, over `comms`, which nothing else may use until the
    writer is done.

    `tensors` must not change until then. `state` is the content of state.json except for `files` and `ranks`; each rank
    contributes its `progress` to `ranks`. The main rank calls `on_complete` after all ranks have learned that the
    checkpoint is complete, so that they do not wait for this call. A tensor that several ranks have is written by one
    of them, with `shared_by_first` by the first. With a `holder` (`holder_text`), the checkpoint fails if another
    process has locked the run directory by now, and nothing is deleted.
    """

    def __init__(
        self,
        final: Path,
        tensors: dict[str, torch.Tensor],
        state: dict[str, Any],
        progress: dict[str, Any],
        comms: Comms,
        on_complete: Callable[[], None],
        shared_by_first: bool = False,
        holder: str = "",
    ):
        self._planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=shared_by_first)
        self.final, self.temporary, self._tensors, self._comms = final, final.with_suffix(".tmp"), tensors, comms
        self._state, self._progress, self._on_complete = state, json.dumps(progress), on_complete
        self._largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
        self._holder = holder
        self.seconds = 0.0
        """Seconds that writing took, set when the writer is done."""
        self.error: str | None = None
        """Reason why writing failed, in one line; None if it has not failed."""
        # A daemon, because a hanging disk must not keep the process alive after the run has given up on it.
        self._thread = threading.Thread(target=with_current_device(self._run), name=f"writes {final.name}", daemon=True)

    def start(self, in_thread: bool) -> None:
        """Start writing in the background. If not `in_thread`, write at once, and raise TrainingError if that fails."""
        if in_thread:
            self._thread.start()
        else:
            self._run()
            self.check()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the checkpoint is written. Raises TrainingError if that fails or takes more than `timeout_seconds`."""
        if self._thread.ident is not None:
            join(self._thread, timeout_seconds)
        if not self.is_done:
            raise TrainingError(
                f"{self.final} was not written within {timeout_seconds:g} s (run.timeout_seconds); check that the disk "
                f"{'responds' if self._comms.size == 1 else 'and all other ranks respond'}, then start the same command again to continue "
                "from the last checkpoint; if the disk is only slow, with a longer run.timeout_seconds"
            )
        self.check()

    def check(self) -> None:
        """Raise TrainingError if writing failed."""
        if self.error is not None:
            raise TrainingError(
                f"{self.final} could not be written: {self.error}; older checkpoints are as they were, start the same command "
                "again to continue from the last one"
            )

    def _run(self) -> None:
        began = time.monotonic()
        try:
            if self._comms.shares_memory:
                self._save_as_one()
            else:
                self._save(self._tensors, process_group=self._comms.group, no_dist=self._comms.size == 1)
            self._tensors = {}  # frees memory for the next checkpoint
            self._commit()
        except (CheckpointException, Exception) as error:  # the first is a BaseException
            self.error = _in_one_line(error)
        if self.error is not None and self._tensors:  # the tensors are not written
            with suppress(OSError):  # the folder may be missing, because it could not be created
                free = shutil.disk_usage(self.final.parent).free
                if free < self._largest:  # torch's writer may report only a position in its archive
                    self.error = f"no space left: {free / 1e6:.0f} MB are free ({self.error})"
        if self.error is not None and self._comms.rank == 0 and self._taken_over() is None:
            shutil.rmtree(self.temporary, ignore_errors=True)  # frees space if the disk is full
        self.seconds = time.monotonic() - began

    def _save(self, tensors: dict[str, torch.Tensor], **where: Any) -> None:
        # By default, torch copies tensors to the CPU ahead of writing. These are on the CPU already, and for each of them torch
        # would wait for the GPU's stream, and thus for all work that training has queued on it.
        writer = dcp.FileSystemWriter(self.temporary, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer, planner=self._planner, **where)

    def _save_as_one(self) -> None:
        """Save the tensors of all replicas of this process on the main rank. Raises OSError on every rank if it fails."""
        of_ranks = self._comms.all_gather_object(self._tensors, f"gathering tensors of {self.final.name}")
        save = partial(self._save, dict(ChainMap(*of_ranks)), no_dist=True)
        problem = self._from_main(_catch_error(save) if self._comms.rank == 0 else None)
        if problem is not None:
            raise OSError(problem)

    def _commit(self) -> None:
        """Gather the files' digests, of which each rank computes its share, and publish the checkpoint on the main rank. Raises
        OSError on every rank if any rank fails."""
        names = self._from_main(_catch_error(lambda: sorted(path.name for path in self.temporary.iterdir())))
        if isinstance(names, str):
            raise OSError(names)
        share = share_of(self._comms.rank, self._comms.size, names)
        folder = f"{self.temporary} on {socket.gethostname()}"
        mine = self._progress, folder, _catch_error(lambda: digests(self.temporary, share))
        of_ranks = self._comms.all_gather_object(mine, f"gathering digests of {self.final.name}")
        problem = self._from_main(self._publish(of_ranks) if self._comms.rank == 0 else None)
        if problem is not None:
            raise OSError(problem)
        if self._comms.rank == 0:
            with suppress(OSError):  # older checkpoints that can't be deleted now are deleted after the next one
                self._on_complete()

    def _publish(self, of_ranks: list[tuple[str, str, dict | str]]) -> str | None:
        """Write state.json, rename the folder and name it in `latest`. Return None, or the error in one line, for all ranks to
        raise. Main rank only."""
        progress, folders, found = zip(*of_ranks, strict=True)
        problem = next((one for one in found if isinstance(one, str)), None)
        if problem := self._taken_over() or problem or self._written_elsewhere(folders, found):
            return problem
        self._state["ranks"] = [json.loads(one) for one in progress]
        self._state["files"] = {name: digest for one in found for name, digest in one.items()}
        try:
            atomic_write(self.temporary / STATE_FILE, dump_state(self._state))
            if self.final.exists():
                shutil.rmtree(self.final)
            self.temporary.rename(self.final)
            atomic_write(self.final.parent / LATEST, self.final.name + "\n")
        except OSError as error:
            return one_line(error)
        return None

    def _taken_over(self) -> str | None:
        """Return a line about a process that has locked the run directory although this one still trains in it, or None. A file
        server may drop the lock of a host that it does not hear from."""
        run = self.final.parent.parent
        if not self._holder or holder_text(run) in ("", self._holder):
            return None
        return f"{lock_holder(run)} works in {run} now"

    def _written_elsewhere(self, folders: Sequence[str], found: Sequence[Collection[str]]) -> str | None:
        """Return a line about the ranks whose files the main rank does not have, or None. Each rank writes at least the state of
        its random number generators, unless the main rank writes for all."""
        if self._comms.shares_memory:
            return None
        lost = [rank for rank, names in enumerate(found) if not any(map(TENSOR_FILE.fullmatch, names))]
        if not lost:
            return None
        return (
            f"{folders[0]} has no file of {format_ranks(lost)}, which wrote to {folders[lost[0]]}; all nodes need one run.out_dir on a "
            "file system that they share"
        )

    def _from_main(self, value: Any) -> Any:
        return self._comms.broadcast_object(value, f"writing {self.final.name}")


def _catch_error(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or its error in one line to send to other ranks. A writer lacks the Mesh for
    `raise_on_all`."""
    try:
        return work()
    except (CheckpointException, Exception) as error:
        return _in_one_line(error)


def _in_one_line(error: BaseException) -> str:
    """Return the message of `error` or, if torch reports the errors of several ranks, of the first one."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return one_line(cause, MESSAGE_LENGTH)
