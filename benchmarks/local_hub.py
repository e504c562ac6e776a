"""Stand-in for the Hugging Face hub on this machine, with one data set, `hf:o/d`. It may drop connections at random.

It implements the part of the hub's API that the `datasets` library needs to stream a data set. A process uses it if it starts
with the variables of `LocalHub.environment(home)`, because the libraries read them at import.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

COMMIT = "a" * 40
CHUNK = 1 << 16


class LocalHub:
    """Server of the files of one data set, `hf:o/d`. Use it as a context manager."""

    def __init__(
        self,
        files: Mapping[str, bytes | Path],
        drop: float = 0.0,
        seed: int = 0,
        before_read: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Serve `files` by name. A share `drop` of the answers with data breaks off in the middle. `before_read` is called with
        a file's name before its data is sent, and may wait."""
        self.files, self.drop, self.before_read = files, drop, before_read
        self.dropped = 0
        """Number of answers that were broken off."""
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment variables of a process that uses this hub, with `home` for its downloads."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def size(self, name: str) -> int:
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def read(self, name: str, start: int, count: int) -> bytes:
        content = self.files[name]
        if isinstance(content, bytes):
            return content[start : start + count]
        with content.open("rb") as file:
            file.seek(start)
            return file.read(count)

    def break_after(self, count: int) -> int | None:
        """Return the number of bytes, of `count`, after which an answer breaks off, or None if it does not."""
        with self._lock:
            if self._random.random() >= self.drop:
                return None
            self.dropped += 1
            return self._random.randrange(count)


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            tree = f"/api/datasets/o/d/tree/{COMMIT}"
            if path.startswith("/datasets/o/d/resolve/"):
                self.send_file(path.split("/", 6)[6])
            elif path in ("/api/datasets/o/d", f"/api/datasets/o/d/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in hub.files]
                self.send_json({"id": "o/d", "sha": COMMIT, "siblings": siblings, "private": False, "gated": False})
            elif path == tree:
                folders = sorted({name.rpartition("/")[0] for name in hub.files})
                self.send_json([{"type": "directory", "path": name, "oid": COMMIT, "size": 0} for name in folders])
            elif path.startswith(f"{tree}/"):
                folder = path.removeprefix(f"{tree}/")
                names = [name for name in hub.files if name.rpartition("/")[0] == folder]
                self.send_json([{"type": "file", "path": n, "size": hub.size(n), "oid": COMMIT} for n in names])
            else:
                self.answer(404, {"X-Error-Code": "RepoNotFound"}, b"{}")

        do_HEAD = do_GET

        def send_json(self, content: object) -> None:
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

        def send_file(self, name: str) -> None:
            if name not in hub.files:
                self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"")
                return
            size = hub.size(name)
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or size), size - 1) + 1
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("ETag", f'"{size}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.before_read(name)
            breaks = hub.break_after(end - start)
            stop = end if breaks is None else start + breaks
            while start < stop:
                self.wfile.write(hub.read(name, start, min(CHUNK, stop - start)))
                start += CHUNK
            self.close_connection = breaks is not None

        def answer(self, code: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler
