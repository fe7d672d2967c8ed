"""A server that speaks as much of the Hugging Face Hub's API as its clients use to fetch and to push."""

import base64
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse

JSON = {"Content-Type": "application/json"}
MISSING = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}


def person(name, role="write", **organizations):
    """What whoami says of a token's owner; organizations: NAME=role of the person in it."""
    orgs = [{"name": org, "roleInOrg": own} for org, own in organizations.items()]
    return {"name": name, "orgs": orgs, "auth": {"type": "access_token", "accessToken": {"role": role}}}


class HubServer:
    """Serves directories as models and data sets, and takes models.

    Args:
      models: {'user/name': {revision: directory}}; 'main' is what no revision means.
      datasets: the same of data sets.
      storage: directory for models that are pushed.

    Attributes:
      url: for HF_ENDPOINT.
      requests: (method, path, Range header) of each request.
      cut_after: bytes after which the next answer with a file, or the next upload, is cut off; None = never.
      uploads_fail: whether uploads of large files are answered by 403.
      token: what private models need; None = all are public.
      people: {token: `person`} of those who may write.
      read_only: names of models that no token may write to.
      private: names of models that were made as private ones.
    """

    def __init__(self, models=(), datasets=(), storage=None):
        self.repositories = {"models": dict(models), "datasets": dict(datasets)}
        self.storage, self.requests, self.cut_after, self.token = storage, [], None, None
        self.people, self.private, self.uploads_fail, self._objects = {}, set(), False, {}
        self.read_only = set()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.requests.append((self.command, self.route(), self.headers.get("Range")))
                hub.answer(self, self.route())

            do_HEAD = do_GET

            def do_POST(self):
                hub.requests.append((self.command, self.route(), None))
                size = int(self.headers.get("Content-Length") or 0)
                if self.command == "PUT" and hub.cut_after is not None:
                    self.rfile.read(hub.cut_after)
                    hub.cut_after, self.close_connection = None, True
                    return self.connection.close()
                body = self.rfile.read(size)
                hub.take(self, self.route(), body)

            do_PUT = do_POST

            def route(self):
                return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request, path):
        authorization = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if path == "/api/whoami-v2":
            if authorization not in self.people:
                return self.send(request, 401, JSON, b'{"error": "Invalid credentials in Authorization header"}')
            return self.send_json(request, self.people[authorization])
        if self.token and authorization != self.token:
            return self.send(request, 401, MISSING)
        found = self.find(path)
        if found is None:
            return self.send(request, 404, MISSING)
        api, kind, name, rest = found
        if rest == ["auth-check", "write"]:
            may = authorization in self.people and name not in self.read_only
            return self.send(request, 200 if may else 403, JSON, b"{}")
        revisions = self.repositories[kind][name]
        revision = rest[1] if len(rest) > 1 else "main"
        revisions = revisions | {self.commit(directory): directory for directory in revisions.values()}
        if revision not in revisions:
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev"})
        directory = revisions[revision]
        if api and rest[:1] == ["tree"]:
            return self.send_json(request, self.entries(directory, "/".join(rest[2:])))
        if api:
            files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
            info = {"id": name, "sha": self.commit(directory), "private": name in self.private}
            return self.send_json(request, info | {"siblings": [{"rfilename": f} for f in files]})
        return self.send_file(request, directory, "/".join(rest[2:]))

    def find(self, path):
        """(whether it is of the API, 'models' or 'datasets', 'user/name', the rest) of a path; None = no such one."""
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts.pop(0) if parts[0] in self.repositories else "models"
        name = "/".join(parts[:2])
        return (api, kind, name, parts[2:]) if name in self.repositories[kind] else None

    def entries(self, directory, below="", of=None):
        """What the API says of the files and folders of a directory, or of those that are named."""
        paths = [directory / name for name in of] if of is not None else sorted((directory / below).rglob("*"))
        return [
            {
                "type": "file" if path.is_file() else "directory",
                "path": str(path.relative_to(directory)),
                "size": path.stat().st_size,
                "oid": "0" * 40,
            }
            for path in paths
            if path.exists()
        ]

    def take(self, request, path, body):
        """Answers POST and PUT: what a push asks, and details of the files of a data set."""
        if path.startswith("/lfs/"):
            if self.uploads_fail:
                return self.send(request, 403, {"X-Error-Message": "storage quota is used up"})
            self._objects[path.removeprefix("/lfs/")] = body
            return self.send(request, 200, {})
        if path == "/api/validate-yaml":
            return self.send_json(request, {"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                if one["oid"] not in self._objects:
                    one["actions"] = {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}
            return self.send_json(request, {"transfer": "basic", "objects": objects})
        found = self.find(path)
        if found and found[3][:1] == ["paths-info"]:
            names = urllib.parse.parse_qs(body.decode())["paths"]
            return self.send_json(request, self.entries(self.repositories[found[1]][found[2]]["main"], of=names))
        if (request.headers.get("Authorization") or "").removeprefix("Bearer ") not in self.people:
            return self.send(request, 401, MISSING)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repositories["models"]:
                return self.send_json(request, {"url": f"{self.url}/{name}"}, 409)
            (self.storage / name).mkdir(parents=True)
            self.repositories["models"][name] = {"main": self.storage / name}
            if asked.get("visibility") == "private" or asked.get("private"):
                self.private.add(name)
            return self.send_json(request, {"url": f"{self.url}/{name}"})
        if found and found[3][:1] == ["preupload"]:
            files = json.loads(body)["files"]
            modes = [(one["path"], "lfs" if one["path"].endswith(".safetensors") else "regular") for one in files]
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]
            return self.send_json(request, {"files": files})
        if found and found[3][:1] == ["commit"]:
            return self.send_json(request, self.commit_files(found[2], map(json.loads, body.splitlines())))
        return self.send(request, 404, MISSING)

    def commit_files(self, name, lines):
        directory = self.repositories["models"][name]["main"]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                continue
            path = directory / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                self._objects[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])
            )
        commit = self.commit(directory)
        return {"success": True, "commitOid": commit, "commitUrl": f"{self.url}/{name}/commit/{commit}"}

    def send_json(self, request, content, status=200):
        self.send(request, status, JSON, json.dumps(content).encode())

    def send_file(self, request, directory, name):
        path = directory / name
        headers = {"X-Repo-Commit": self.commit(directory), "Accept-Ranges": "bytes"}
        if not path.is_file():
            return self.send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"})
        content = path.read_bytes()
        headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        begin, _, last = (request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        begin, end = int(begin), int(last) + 1 if last else len(content)
        ranged = "Range" in request.headers and (begin > 0 or end < len(content))
        if ranged:
            headers["Content-Range"] = f"bytes {begin}-{min(end, len(content)) - 1}/{len(content)}"
        self.send(request, 206 if ranged else 200, headers, content[begin:end])

    def send(self, request, status, headers, body=b""):
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        cut, large = self.cut_after, len(body) > 50_000
        if cut is not None and large:
            self.cut_after = None
            request.wfile.write(body[:cut])
            request.close_connection = True
            request.connection.close()
            return
        request.wfile.write(body)

    def serve_this_process(self, monkeypatch, home):
        """Lets the clients of this process ask the server, with their cache in `home`."""
        import datasets
        from huggingface_hub import HfFileSystem, constants

        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, self.url)
        values = {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(home / "hub")}
        # Of uploads the server knows LFS alone.
        values |= {"HF_TOKEN_PATH": str(home / "token"), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        for name, value in {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": False,
            "HF_DATASETS_CACHE": str(home / "datasets"),
        }.items():
            monkeypatch.setattr(datasets.config, name, value)
        HfFileSystem.clear_instance_cache()

    @staticmethod
    def commit(directory: pathlib.Path):
        return hashlib.sha1(str(directory).encode()).hexdigest()
