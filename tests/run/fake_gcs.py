"""Google Cloud Storage in the memory of one process: as much of its JSON API as gcsfs and
TensorStore use.

    python tests/run/fake_gcs.py [--fail_every=N]      prints its port, serves until killed

Programs find it through STORAGE_EMULATOR_HOST (gcsfs) and TENSORSTORE_GCS_HTTP_URL. As the real
one: objects appear whole or not at all, names are flat, conditions on the generation hold, every
bucket exists. With --fail_every, each N-th request is answered with 503, which clients must retry.
"""

import argparse
import base64
import contextlib
import dataclasses
import itertools
import json
import re
import threading
import time
import urllib.parse
import zlib
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)$")
COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)$")
OBJECTS = re.compile(r"/(?:upload/)?storage/v1/b/([^/]+)/o$")
BUCKET = re.compile(r"/storage/v1/b/([^/]+)(/storageLayout)?$")


class Refused(Exception):
    """An answer that is an error: its HTTP status."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One version of an object."""

    content: bytes
    generation: int
    time: str


class Storage:
    """All objects, by (bucket, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Stored] = {}
        self.uploads: dict[str, tuple[str, str, bytearray]] = {}  # id -> bucket, name, so far
        self.generations = itertools.count(1_700_000_000_000_000)
        self.lock = threading.RLock()

    def get(self, bucket: str, name: str, query: dict[str, str]) -> Stored:
        found = self.objects.get((bucket, name))
        if found is None:
            raise Refused(404)
        if query.get("ifGenerationNotMatch") == str(found.generation):
            raise Refused(304)
        if query.get("ifGenerationMatch", str(found.generation)) != str(found.generation):
            raise Refused(412)
        return found

    def put(self, bucket: str, name: str, content: bytes, query: dict[str, str]) -> dict:
        with self.lock:
            there = self.objects.get((bucket, name))
            generation = str(there.generation) if there else "0"
            if query.get("ifGenerationMatch", generation) != generation:
                raise Refused(412)
            self.objects[bucket, name] = Stored(
                bytes(content), next(self.generations), time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            )
            return self.describe(bucket, name)

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self.lock:
            self.get(bucket, name, query)
            del self.objects[bucket, name]

    def describe(self, bucket: str, name: str) -> dict:
        stored = self.objects[bucket, name]
        crc = base64.b64encode(zlib.crc32(stored.content).to_bytes(4, "big")).decode()
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{stored.generation}",
            "bucket": bucket,
            "name": name,
            "size": str(len(stored.content)),
            "generation": str(stored.generation),
            "metageneration": "1",
            "etag": crc,
            "contentType": "application/octet-stream",
            "timeCreated": stored.time,
            "updated": stored.time,
        }

    def list(self, bucket: str, query: dict[str, str]) -> dict:
        """Objects under a prefix; with a delimiter, what is deeper as common prefixes."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries: dict[str, bool] = {}  # name -> whether it stands for those that begin with it
        for place, name in sorted(self.objects):
            if (
                place != bucket
                or not name.startswith(prefix)
                or name < query.get("startOffset", "")
                or ("endOffset" in query and name >= query["endOffset"])
            ):
                continue
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            entries[prefix + head + cut if cut else name] = bool(cut)
        names = [name for name in sorted(entries) if name > query.get("pageToken", "")]
        page = names[: int(query.get("maxResults", 1000))]
        answer: dict = {"kind": "storage#objects"}
        if items := [self.describe(bucket, name) for name in page if not entries[name]]:
            answer["items"] = items
        if prefixes := [name for name in page if entries[name]]:
            answer["prefixes"] = prefixes
        return answer | ({"nextPageToken": page[-1]} if len(names) > len(page) else {})


class Handler(BaseHTTPRequestHandler):
    """Requests -> calls of the Storage that `serve` put on the class."""

    storage: Storage
    fail_every = 0
    requests = itertools.count(1)
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # gcsfs cancels what it no longer needs
            super().handle()

    def answer(self, content: bytes | dict = b"", status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode() if isinstance(content, dict) else content
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(body)

    def handle_request(self) -> None:
        split = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.fail_every and next(self.requests) % self.fail_every == 0:
            self.answer({"error": {"code": 503, "message": "asked to fail"}}, 503)
            return
        try:
            self.dispatch(split.path, query, body)
        except Refused as refusal:
            code = refusal.args[0]
            self.answer({"error": {"code": code, "message": "refused"}}, code)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_request

    def dispatch(self, path: str, query: dict[str, str], body: bytes) -> None:
        unquote = urllib.parse.unquote
        if path.startswith("/batch"):
            self.batch(body)
        elif found := COPY.match(path):
            source, target = map(unquote, found.groups()[:2]), map(unquote, found.groups()[2:])
            content = self.storage.get(*source, {}).content
            resource = self.storage.put(*target, content, query)
            self.answer({"kind": "storage#rewriteResponse", "done": True, "resource": resource})
        elif found := OBJECT.match(path):
            bucket, name = map(unquote, found.groups())
            if self.command == "DELETE":
                self.storage.delete(bucket, name, query)
                self.answer(status=204)
            elif query.get("alt") == "media":
                self.download(self.storage.get(bucket, name, query))
            else:
                self.storage.get(bucket, name, query)
                self.answer(self.storage.describe(bucket, name))
        elif found := OBJECTS.match(path):
            if path.startswith("/upload"):
                self.upload(found[1], query, body)
            else:
                self.answer(self.storage.list(found[1], query))
        elif found := BUCKET.match(path):
            self.answer(
                {
                    "kind": "storage#bucket",
                    "name": found[1],
                    "location": "US",
                    "locationType": "region",
                    "hierarchicalNamespace": {"enabled": False},
                }
            )
        else:
            raise Refused(501)

    def download(self, stored: Stored) -> None:
        content, headers = stored.content, {"X_Goog_Generation": str(stored.generation)}
        wanted = re.match(r"bytes=(\d*)-(\d*)$", self.headers.get("Range", ""))
        if not wanted:
            self.answer(content, **headers)
            return
        size = len(content)
        if wanted[1]:
            begin, end = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
        else:
            begin, end = max(0, size - int(wanted[2])), size - 1
        if begin >= size:
            raise Refused(416)
        self.answer(content[begin : end + 1], 206, **headers, Content_Range=f"bytes {begin}-{end}/{size}")

    def upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        kind, storage = query.get("uploadType"), self.storage
        if "upload_id" in query:
            self.continue_upload(query, body)
        elif kind == "media":
            self.answer(storage.put(bucket, query["name"], body, query))
        elif kind == "multipart":
            described, content = parts(self.headers["Content-Type"], body)
            name = json.loads(described).get("name") or query["name"]
            self.answer(storage.put(bucket, name, content, query))
        elif kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            upload_id = str(next(storage.generations))
            storage.uploads[upload_id] = bucket, name, bytearray()
            again = urllib.parse.urlencode({**query, "name": name, "upload_id": upload_id})
            self.answer(Location=f"http://{self.headers['Host']}{self.path.split('?')[0]}?{again}")
        else:
            raise Refused(400)

    def continue_upload(self, query: dict[str, str], body: bytes) -> None:
        bucket, name, so_far = self.storage.uploads[query["upload_id"]]
        so_far += body
        total = re.search(r"/(\d+)$", self.headers.get("Content-Range", f"/{len(so_far)}"))
        if total and int(total[1]) == len(so_far):
            self.answer(self.storage.put(bucket, name, so_far, query))
        else:
            self.answer(status=308, Range=f"bytes=0-{len(so_far) - 1}")

    def batch(self, body: bytes) -> None:
        """Several deletions in one request, as `multipart/mixed` of HTTP requests."""
        answers = []
        for part in parts(self.headers["Content-Type"], body):
            path = re.match(rb"DELETE (\S+)", part.lstrip())[1].decode()
            bucket, name = map(urllib.parse.unquote, OBJECT.search(path.split("?")[0]).groups())
            try:
                self.storage.delete(bucket, name, {})
                status = "204 No Content"
            except Refused:
                status = "404 Not Found"
            answers.append(
                f"--end\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        self.answer("".join([*answers, "--end--"]).encode(), Content_Type="multipart/mixed; boundary=end")


def parts(content_type: str, body: bytes) -> list[bytes]:
    """The contents of a multipart body, without their headers."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = b"--" + header.get_param("boundary").encode()
    inside = body.split(boundary)[1:-1]
    # A part is CRLF, headers, an empty line, content, CRLF.
    found = [re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in inside]
    return [re.sub(rb"\r?\n$", b"", content) for content in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail_every", type=int, default=0)
    Handler.storage, Handler.fail_every = Storage(), parser.parse_args().fail_every
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
