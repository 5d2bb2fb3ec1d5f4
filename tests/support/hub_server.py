"""A small server on loopback that speaks as much of the Hub's API as its client needs to find and fetch data sets.

Repositories live in memory. Large files are served as on the Hub: `resolve` redirects to another host, with headers that
describe the file. A test can order faults: an error status, or a body that breaks off.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_sesame"
LARGE_BYTES = 1000
"""Files of at least this size count as large."""
PAGE_ENTRIES = 3


@dataclass
class Repository:
    """A data set: its branches and tags, and the files of every commit."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False
    admits: bool = True
    """Whether the holder of the token has accepted the terms of a gated one."""

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Put files on a branch, in place of what is there."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, data in sorted(files.items()):
            digest.update(path.encode() + b"\0" + data)
        self.refs[ref] = digest.hexdigest()
        self.commits[digest.hexdigest()] = dict(files)
        return digest.hexdigest()


@dataclass
class Fault:
    """A fault in the next `times` requests whose path matches."""

    path: str
    status: int = 0
    """0: the body breaks off after `num_bytes`."""
    num_bytes: int = 0
    times: int = 1


class Hub(ThreadingHTTPServer):
    """The server; it records all requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.renamed: dict[str, str] = {}
        """The current names of repositories by their former ones, which are redirected."""
        self.sizes: dict[str, int] = {}
        """Sizes that listings give for files, instead of the real ones."""
        self.gate = threading.Event()
        """Bodies are not sent until it is set."""
        self.gate.set()
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def elsewhere(self) -> str:
        """The same server under another name, to which the client must not send its token."""
        return f"http://localhost:{self.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes], **options: Any) -> Repository:
        self.repositories[name] = Repository(**options)
        self.repositories[name].commit(files)
        return self.repositories[name]

    def fail(self, path: str, status: int = 0, *, num_bytes: int = 0, times: int = 1) -> None:
        self.faults.append(Fault(path, status, num_bytes, times))

    def take_fault(self, path: str, *, has_status: bool) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and bool(fault.status) == has_status and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def asked(self, pattern: str) -> list[str]:
        """The requests that match, as `GET /path`."""
        return [request for request in self.requests if re.search(pattern, request)]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        with self.server.lock:
            self.server.requests.append(f"{self.command} {url.path}")
        try:
            fault = self.server.take_fault(url.path, has_status=True)
            if fault is not None:
                raise _Refusal(fault.status, message="as ordered")
            self._route(url.path, parse_qs(url.query), parse_qs(body))
        except _Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self._send(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)

    def _route(self, path: str, query: dict[str, list[str]], form: dict[str, list[str]]) -> None:
        for old, new in self.server.renamed.items():
            if f"datasets/{old}" in path:
                self._send(307, b"", {"Location": self.path.replace(f"datasets/{old}", f"datasets/{new}")})
                return
        routes = {
            r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?": self._info,
            r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?": lambda *found: self._tree(*found, query),
            r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)": lambda *found: self._paths(*found, form),
            r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self._resolve,
            r"/cdn/([^/]+/[^/]+)/([0-9a-f]+)": self._large,
        }
        for pattern, answer in routes.items():
            found = re.fullmatch(pattern, path)
            if found is not None:
                answer(*(part if part is None else unquote(part) for part in found.groups()))
                return
        raise _Refusal(404)

    def _find(self, name: str, revision: str | None, *, opens_files: bool = False) -> tuple[str, dict[str, bytes]]:
        repository = self.server.repositories.get(name)
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            raise _Refusal(401, message="Invalid credentials in Authorization header")
        if repository is None or (repository.is_private and authorization is None):
            raise _Refusal(404 if authorization else 401, "RepoNotFound", "Repository not found")
        if repository.is_gated and opens_files and not (authorization and repository.admits):
            raise _Refusal(403 if authorization else 401, "GatedRepo", f"Access to dataset {name} is restricted.")
        commit = repository.refs.get(revision or "main", revision or "")
        if commit not in repository.commits:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _info(self, name: str, revision: str | None) -> None:
        commit, files = self._find(name, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        self._send_json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _tree(self, name: str, revision: str, folder: str | None, query: dict[str, list[str]]) -> None:
        """Send a page of a few entries, with the address of the next one in a header."""
        _, files = self._find(name, revision)
        prefix = f"{folder}/" if folder else ""
        below = {path: data for path, data in sorted(files.items()) if path.startswith(prefix)}
        if not below:
            raise _Refusal(404, "EntryNotFound", f"{folder} does not exist")
        parts = [path.removeprefix(prefix).split("/") for path in below]
        is_recursive = query.get("recursive", [""])[0].lower() in ("1", "true")
        depths = [len(names) if is_recursive else min(len(names), 2) for names in parts]
        folders = {
            prefix + "/".join(names[:n]) for names, depth in zip(parts, depths, strict=True) for n in range(1, depth)
        }
        entries = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
        entries += [
            self._describe(path, data)
            for (path, data), names in zip(below.items(), parts, strict=True)
            if is_recursive or len(names) == 1
        ]
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + PAGE_ENTRIES < len(entries):
            options = "&".join(f"{key}={quote(values[0])}" for key, values in query.items() if key != "cursor")
            target = f"{self.server.endpoint}{urlsplit(self.path).path}?{options}&cursor={start + PAGE_ENTRIES}"
            headers["Link"] = f'<{target}>; rel="next"'
        self._send_json(entries[start : start + PAGE_ENTRIES], headers)

    def _describe(self, path: str, data: bytes) -> dict[str, Any]:
        return _describe(path, data) | {"size": self.server.sizes.get(path, len(data))}

    def _paths(self, name: str, revision: str, form: dict[str, list[str]]) -> None:
        _, files = self._find(name, revision)
        found = []
        for path in form.get("paths", []):
            if path in files:
                found.append(self._describe(path, files[path]))
            elif any(other.startswith(f"{path}/") for other in files):
                found.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        self._send_json(found)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        commit, files = self._find(name, revision, opens_files=True)
        headers = {"X-Repo-Commit": commit}
        if path not in files:
            raise _Refusal(404, "EntryNotFound", f"{path} does not exist")
        entry = _describe(path, files[path])
        if "lfs" not in entry:
            self._send_data(files[path], {**headers, "ETag": f'"{entry["oid"]}"'})
            return
        headers["X-Linked-Size"] = str(entry["size"])
        headers["X-Linked-ETag"] = f'"{entry["lfs"]["oid"]}"'
        headers["Location"] = f"{self.server.elsewhere}/cdn/{name}/{entry['lfs']['oid']}"
        self._send(302, b"", headers)

    def _large(self, name: str, mark: str) -> None:
        files = [data for commit in self.server.repositories[name].commits.values() for data in commit.values()]
        data = next((data for data in files if hashlib.sha256(data).hexdigest() == mark), None)
        if data is None:
            raise _Refusal(404)
        if self.headers.get("Authorization"):
            raise _Refusal(400, message="a token was sent to another host")
        self._send_data(data, {"ETag": f'"{mark}"'})

    def _send_data(self, data: bytes, headers: dict[str, str]) -> None:
        """Send a file, or the rest of it after some byte."""
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None:
            self._send(200, data, headers)
            return
        start = int(asked[1])
        content = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206, data[start:], {**headers, "Content-Range": content})

    def _send_json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        broken = self.server.take_fault(self.path, has_status=False) if status in (200, 206) else None
        if broken is not None:
            self.wfile.write(data[: broken.num_bytes])
            self.wfile.flush()
            self.close_connection = True
            return
        if status in (200, 206) and not self.server.gate.is_set() and len(data) >= LARGE_BYTES:
            self.wfile.write(data[:10])
            self.wfile.flush()
            self.server.gate.wait(30)
            data = data[10:]
        self.wfile.write(data)


def _describe(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    entry = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if len(data) >= LARGE_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
