"""A Hub on 127.0.0.1 that speaks enough of the protocol for the real client: repositories, LFS, commits, downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopbackLoopbackLoopbackLoopback12"


def is_large(path: str) -> bool:
    """What .gitattributes puts into LFS."""
    return path.endswith((".safetensors", ".bin"))


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    """Its commits are kept whole: sha -> file name -> bytes."""

    def __init__(self, private: bool = False, gated: bool = False) -> None:
        self.private, self.gated = private, gated
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.messages: list[str] = []
        self.commit({".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Make `files` all of the repository."""
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha], self.refs[ref] = files, sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.refs.get(revision, revision)]


class Hub:
    """The server's state, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.lfs = True  # else every file is committed whole
        self.accept_uploads = -1  # how many large files to take before refusing; -1 for all
        self.mute = ""  # what has this in its path is never answered
        self.over = threading.Event()
        self.endpoint = ""
        self.lock = threading.Lock()

    def paths(self, method: str) -> list[str]:
        """What was asked with that method, in order."""
        return [path for kind, path in self.requests if kind == method]


class Refusal(Exception):
    """A status with the Hub's own error code."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.url, self.query = unquote(url.path), parse_qs(url.query)
        self.hub.requests.append((self.command, self.url))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.mute and self.hub.mute in self.url:
            self.close_connection = self.hub.over.wait()
            return None
        try:
            for method, pattern, handle in ROUTES:
                found = re.fullmatch(pattern, self.url)
                if found and self.command in method.split():
                    return handle(self, **found.groupdict())
            raise Refusal(404, "RepoNotFound")
        except Refusal as refusal:
            self.send(refusal.status, b"", {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def send(
        self, status: int, data: bytes | dict[str, Any] | list[Any], headers: dict[str, str] | None = None
    ) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # ------------------------------------------------------------ who asks

    def authorised(self) -> bool:
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        return given is not None

    def repo(self, name: str, *, write: bool = False, files: bool = False) -> Repo:
        known = self.authorised()
        found = self.hub.repos.get(name)
        if found is None or (found.private and not known):
            raise Refusal(404 if known else 401, "RepoNotFound")
        if found.gated and files:
            raise Refusal(403 if known else 401, "GatedRepo")
        if write and not (known and name.startswith("user/")) and "create_pr" not in self.query:
            raise Refusal(403, "", "no write access")
        return found

    def revision(self, repo: Repo, name: str) -> str:
        if name not in repo.commits and name not in repo.refs:
            raise Refusal(404, "RevisionNotFound")
        return repo.refs.get(name, name)

    # ------------------------------------------------------------ reading

    def whoami(self) -> None:
        if not self.authorised():
            raise Refusal(401)
        self.send(200, {"type": "user", "name": "user", "auth": {"accessToken": {"role": "write"}}})

    def info(self, name: str, revision: str | None = None) -> None:
        repo = self.repo(name)
        sha = self.revision(repo, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(repo.commits[sha])]
        facts = {"id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": [], "downloads": 0}
        self.send(200, facts)

    def tree(self, name: str, revision: str) -> None:
        repo = self.repo(name)
        files = repo.commits[self.revision(repo, revision)]
        entries = []
        for path, data in sorted(files.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
            if is_large(path):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        self.send(200, entries)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name, files=True)
        sha = self.revision(repo, revision)
        data = repo.commits[sha].get(path)
        if data is None:
            raise Refusal(404, "EntryNotFound")
        etag = hashlib.sha256(data).hexdigest() if is_large(path) else git_oid(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if start:
            first = int(start[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self.send(206, data[first:], headers)
        else:
            self.send(200, data, headers)

    # ------------------------------------------------------------ writing

    def create(self) -> None:
        if not self.authorised():
            raise Refusal(401)
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "user":
            raise Refusal(403, "", "no rights in this namespace")
        present = name in self.hub.repos
        if not present:
            self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        self.send(409 if present else 200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def validate(self) -> None:
        text = json.loads(self.body)["content"]
        wrong = [{"message": '"license" must be one of the known'}] if "license: nonsense" in text else []
        self.send(400 if wrong else 200, {"errors": wrong, "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        present = self.repo(name, write=True).files(unquote(revision))
        answers = []
        for file in json.loads(self.body)["files"]:
            path, old = file["path"], present.get(file["path"])
            mode = "lfs" if self.hub.lfs and is_large(path) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if old is not None:
                answer["oid"] = hashlib.sha256(old).hexdigest() if mode == "lfs" else git_oid(old)
            answers.append(answer)
        self.send(200, {"files": answers})

    def batch(self, name: str) -> None:
        self.repo(name, write=True)
        objects = []
        for item in json.loads(self.body)["objects"]:
            href = f"{self.hub.endpoint}/upload/{item['oid']}"
            wanted = {} if item["oid"] in self.hub.blobs else {"actions": {"upload": {"href": href, "header": {}}}}
            objects.append({"oid": item["oid"], "size": item["size"], **wanted})
        self.send(200, {"transfer": "basic", "objects": objects}, {"Content-Type": "application/vnd.git-lfs+json"})

    def upload(self, oid: str) -> None:
        with self.hub.lock:
            if self.hub.accept_uploads == 0:
                raise Refusal(403, "", "no more")
            self.hub.accept_uploads -= 1
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.blobs[oid] = self.body
        self.send(200, b"")

    def commit(self, name: str, revision: str) -> None:
        repo = self.repo(name, write=True)
        files = dict(repo.files(revision))
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                if value.get("parentCommit") not in (None, repo.refs[revision]) and "create_pr" not in self.query:
                    raise Refusal(412, "", "the branch has moved")
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        pr = "create_pr" in self.query
        sha = repo.commit(files, "refs/pr/1" if pr else revision)
        url = f"{self.hub.endpoint}/{name}"
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}"}
        self.send(200, {**answer, **({"pullRequestUrl": f"{url}/discussions/1"} if pr else {})})


NAME, REVISION = r"(?P<name>[\w.-]+/[\w.-]+)", r"(?P<revision>[^?]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", rf"/api/models/{NAME}", Handler.info),
    ("GET", rf"/api/models/{NAME}/revision/{REVISION}", Handler.info),
    ("GET", rf"/api/models/{NAME}/tree/{REVISION}", Handler.tree),
    ("POST", rf"/api/models/{NAME}/preupload/{REVISION}", Handler.preupload),
    ("POST", rf"/api/models/{NAME}/commit/{REVISION}", Handler.commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/upload/(?P<oid>\w+)", Handler.upload),
    ("GET HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]


@contextmanager
def serve() -> Iterator[Hub]:
    """A Hub that answers for as long as the block lasts."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
