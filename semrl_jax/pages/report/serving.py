"""Serves the page of runs while they write, to a browser on the same machine."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.server
import json
import pathlib
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from semrl_jax.pages.report import page, reading
from semrl_jax.pages.report.evaluations import RESULTS
from semrl_jax.pages.report.panels import PANELS
from semrl_jax.pages.report.recorded_responses import samples
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import recorded

HOST = "127.0.0.1"
# Files of a run that plots link to.
LINKED = frozenset(panel.page for panel in PANELS) - {""}


def serve(paths: Sequence[pathlib.Path], port: int, announce: Callable[[str], None]) -> None:
    """Serves runs, maybe without a row yet, until Ctrl-C, on the loopback interface only.

    Every address needs the token of the announced one, because other users of the machine can
    connect to the port. UserError if a path holds no run, or the port is taken.
    """
    reading.read_runs(paths, may_be_empty=True)
    try:
        server = _Server((HOST, port), _Handler)
    except OSError as error:
        raise UserError(f"--port={port} cannot be used: {error.strerror}.") from None
    server.content = Content(paths)
    with server:
        try:
            announce(f"http://{HOST}:{server.server_port}/{server.token}/")
            announce("open this address in a browser on this machine; Ctrl-C ends the server")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            announce("stopped")


class Content:
    """The page and its parts, made again when the files of the runs have changed."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = paths
        self._lock = threading.Lock()  # several windows may ask at once
        self._made: dict[str, Any] = {}

    def page(self) -> bytes:
        """The page with what there is now."""
        with self._lock:
            runs = reading.read_runs(self._paths, may_be_empty=True)
            return page.page(self._figures(runs), self._samples(runs), live=True)

    def linked(self, name: str) -> bytes:
        """A page that a plot of the only run links to."""
        return (self._paths[0] / name).read_bytes()

    def changes(self, *, figures: str, samples: str) -> dict[str, Any]:
        """The parts whose version is not the given one: `figures`, `samples`, both or none."""
        with self._lock:
            runs = None
            found = {}
            for name, known, make in (
                ("figures", figures, self._figures),
                ("samples", samples, self._samples),
            ):
                if self._version(name) != known:
                    runs = runs or reading.read_runs(self._paths, may_be_empty=True)
                    found[name] = make(runs)
            return found

    def _figures(self, runs: Sequence[reading.RunLog]) -> dict[str, Any]:
        return self._kept("figures", lambda: page.figures(runs))

    def _samples(self, runs: Sequence[reading.RunLog]) -> dict[str, Any]:
        return self._kept("samples", lambda: samples(runs))

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        version = self._version(name)  # before reading: a later change is seen next time
        if self._made.get(name, {}).get("version") != version:
            now = datetime.datetime.now().strftime("%H:%M:%S")
            self._made[name] = make() | {"version": version, "changed": now}
        return self._made[name]

    def _version(self, name: str) -> str:
        """Changes when a file of this part does."""
        files = [
            file
            for path in self._paths
            for file in (
                _files_of_figures(path)
                if name == "figures"
                else [*recorded(path, "step").values(), *recorded(path, "eval").values()]
            )
        ]
        state = []
        for file in files:
            try:
                status = file.stat()
            except FileNotFoundError:  # not yet there, or removed by a resume
                continue
            state.append((str(file), status.st_mtime_ns, status.st_size))
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def _files_of_figures(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a run, or of results of `launch.evaluate`, that figures are made of."""
    if not (path / "config.json").is_file():
        return sorted(path.rglob(RESULTS))
    files = [path / name for name in ("metrics.jsonl", reading.STARTS, *LINKED)]
    return [*files, *recorded(path, "eval").values()]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True  # the end does not wait for open connections
    content: Content

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.token = secrets.token_urlsafe(16)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a window was closed
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = 30  # seconds for a request

    def do_GET(self) -> None:
        try:
            address = urllib.parse.urlsplit(self.path)
            _, token, *rest = address.path.split("/", 2)
        except ValueError:  # no address: any process of the machine may send anything
            token, rest = "", []
        if not rest or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._send(404, "text/plain", b"not found: the address has no or another token\n")
            return
        content = self.server.content
        try:
            if rest == [""]:
                self._send(200, "text/html; charset=utf-8", content.page())
            elif rest == ["data"]:
                asked = urllib.parse.parse_qs(address.query)
                known = {name: asked.get(name, [""])[0] for name in ("figures", "samples")}
                self._send_json(200, content.changes(**known))
            elif rest[0] in LINKED:
                self._send(200, "text/html; charset=utf-8", content.linked(rest[0]))
            else:
                self._send(404, "text/plain", b"not found\n")
        except (UserError, OSError) as error:
            if isinstance(error, ConnectionError):
                raise
            self._send_json(503, {"error": str(error)})  # for example, the run was removed

    def _send_json(self, status: int, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._send(status, "application/json; charset=utf-8", text.encode(errors="replace"))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),  # the address has the token
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Prints nothing for a request."""
