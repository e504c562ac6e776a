"""Tests of hub datasets with a small hub on this machine, and of the errors if the hub can't be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FILES = {
    "data/train.jsonl": "\n".join(json.dumps({"text": f"story {i}"}) for i in range(300)).encode(),
    "data/test.jsonl": b'{"text": "held out"}\n',
}
COMMIT = "a" * 40

READ = """
from pathlib import Path
from llmtrain.config import DataSection
from llmtrain.data import hub
from llmtrain.data.sources import documents
from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.errors import DataError
for keys, split in {attempts}:
    if "silent" in str(keys):
        hub.TIMEOUT = 1.0
    try:
        data = DataSection(**keys)
        texts = load_tokenizer(data, Path("nowhere")) if split == "tokenizer" else list(documents(data, split))
        print(len(texts), texts[0])
    except DataError as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """Part of the hub's API that streaming a dataset of jsonl files needs. Requests with "silent" in their path are never
    answered, which is the worst that a network can do."""

    protocol_version = "HTTP/1.1"
    closed = threading.Event()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "silent" in path:
            self.closed.wait()
        elif path.startswith("/datasets/o/d/resolve/"):
            self.send_data(FILES.get(path.split("/", 6)[6]))
        elif path in ("/api/datasets/o/d", f"/api/datasets/o/d/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in FILES]
            self.send_json({"id": "o/d", "sha": COMMIT, "siblings": siblings, "private": False, "gated": False})
        elif path == f"/api/datasets/o/d/tree/{COMMIT}":
            self.send_json([{"type": "directory", "path": "data", "oid": COMMIT, "size": 0}])
        elif path == f"/api/datasets/o/d/tree/{COMMIT}/data":
            self.send_json([{"type": "file", "path": n, "size": len(b), "oid": COMMIT} for n, b in FILES.items()])
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def send_json(self, content: object) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send_data(self, content: bytes | None) -> None:
        if content is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        position = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        code = 206 if "Range" in self.headers else 200
        self.answer(code, part, {"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT, "Content-Range": position})

    def answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.closed.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Hub.closed.set()
    server.shutdown()


def attempt(endpoint: str, home: Path, *attempts: tuple[dict[str, object], str]) -> list[str]:
    """Return what each attempt printed. A new process makes the attempts, because the endpoint is read on import."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", READ.format(attempts=list(attempts))]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hub_data_set_is_streamed_by_split_and_mistakes_are_named(hub: str, tmp_path: Path) -> None:
    """The error that the hub can't be used comes before the timeout of `attempt`."""
    source = {"source": "hf:o/d"}
    *read, no_source, no_tokenizer = attempt(
        hub,
        tmp_path,
        ({**source, "validation": "test"}, "train"),
        ({**source, "validation": "test"}, "validation"),
        ({**source, "text_key": "body"}, "train"),
        ({**source, "split": "nothing"}, "train"),
        ({**source, "validation": "nothing"}, "validation"),
        ({**source, "subset": "small"}, "train"),
        ({"source": "hf:o/none"}, "train"),
        ({"source": "hf:silent/TinyStories"}, "train"),
        ({"tokenizer": "silent"}, "tokenizer"),
    )
    assert read == [
        "300 story 0",
        "1 held out",
        "hf:o/d: no column data.text_key=body; it has text",
        "hf:o/d: data.subset=null, data.split=nothing: Bad split: nothing. Available splits: ['train', 'test']",
        "hf:o/d: data.subset=null, data.validation=nothing: Bad split: nothing. Available splits: ['train', 'test']",
        "hf:o/d: data.subset=small, data.split=train: BuilderConfig 'small' not found. Available: ['default']",
        "data.source: the Hugging Face hub has no public dataset 'o/none'; check the name (log in if it is private)",
    ]
    assert no_source.startswith("data.source: 'silent/TinyStories' needs the Hugging Face hub, which can't be used")
    assert no_source.endswith("connect to the internet, or use data.source=/path/to/files or data.source=stdlib")
    assert no_tokenizer.startswith("data.tokenizer: 'silent' needs the Hugging Face hub, which can't be used from here")
    assert no_tokenizer.endswith("connect to the internet, or use a folder that has its tokenizer.json, or train:SIZE")
