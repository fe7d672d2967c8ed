"""A server that speaks as much of the Hugging Face Hub's API as its client uses to fetch a model."""

import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse


class HubServer:
    """Serves directories as models.

    Args:
      models: {'user/name': {revision: directory}}; 'main' is what no revision means.

    Attributes:
      url: for HF_ENDPOINT.
      requests: (method, path, Range header) of each request.
      cut_after: bytes after which the next answer with a file is cut off; None = never.
      token: what private models need; None = all are public.
    """

    def __init__(self, models: dict[str, dict[str, pathlib.Path]]):
        self.models, self.requests, self.cut_after, self.token = models, [], None, None
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request):
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(request, 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        user, name, *rest = parts[2:] if api else parts
        revisions = self.models.get(f"{user}/{name}")
        if revisions is None:
            return self.send(request, 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        revision = rest[1] if len(rest) > 1 else "main"
        revisions = revisions | {self.commit(directory): directory for directory in revisions.values()}
        if revision not in revisions:
            return self.send(request, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev"})
        directory = revisions[revision]
        if api and rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": str(p.relative_to(directory)), "size": p.stat().st_size, "oid": "0" * 40}
                for p in sorted(directory.rglob("*"))
                if p.is_file()
            ]
            return self.send(request, 200, {"Content-Type": "application/json"}, json.dumps(tree).encode())
        if api:
            files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
            info = {
                "id": f"{user}/{name}",
                "sha": self.commit(directory),
                "siblings": [{"rfilename": f} for f in files],
            }
            return self.send(request, 200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        return self.send_file(request, directory, "/".join(rest[2:]))

    def send_file(self, request, directory, name):
        path = directory / name
        headers = {"X-Repo-Commit": self.commit(directory), "Accept-Ranges": "bytes"}
        if not path.is_file():
            return self.send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"})
        content = path.read_bytes()
        headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        begin = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self.send(request, 206 if begin else 200, headers, content[begin:])

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

    @staticmethod
    def commit(directory):
        return hashlib.sha1(str(directory).encode()).hexdigest()
