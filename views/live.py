"""`pipe report --serve`: a page on the loopback interface that shows a run while it goes on.

It reads the file that the run keeps about itself (`journal`); there is no connection to the process of the run.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

from layerline.pipeline.config.project import Project
from layerline.pipeline.errors import ConfigError, PipeError
from layerline.views import document, journal
from layerline.views.curves import curves
from layerline.views.screen import cleaned

HOST = "127.0.0.1"
LOOK_EVERY_S = 0.5  # at the file of the run
CLIENTS = 16  # connections at once; further ones are closed
TIMEOUT_S = 10  # of a client that sends or reads nothing
HEARTBEAT_S = 5.0  # an event stream without news sends a comment, which shows whether the client is still there
HAND_OVER_S = 5.0  # for pages that are open to fetch the report
_CONNECT, _NO_FRAME = "connect-src 'self'", "frame-ancestors 'none'"


class ViewClosed(PipeError):
    """Ctrl-C in the view."""

    exit_code = 130


class LiveServer(ThreadingHTTPServer):
    """Sends the newest state of the run to each page. A slow client misses states: nothing waits in a queue."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, title: str) -> None:
        super().__init__((HOST, port), _Handler)
        number = self.server_address[1]
        self.url = f"http://{HOST}:{number}/"
        # A page of a foreign site whose name resolves to this address sends its own name here (DNS rebinding).
        self.hosts = [f"{HOST}:{number}", f"localhost:{number}"]
        if number == HTTP_PORT:  # browsers leave this one out
            self.hosts += [HOST, "localhost"]
        self._title = cleaned(title)
        self._board = document.template("live_board.html", {})
        self._page = document.template("live.html", document.head("live.js", _CONNECT)).render(title=self._title)
        self._slots = threading.BoundedSemaphore(CLIENTS)
        self._news = threading.Condition()
        self._event = ""
        self._count = 0  # of events so far
        self._watching = 0  # pages that follow the events
        self._report = ""

    def watch(self, project: Project) -> str:
        """Shows the run until it has ended, and returns its id; empty where it keeps no file about itself."""
        run_id = ""
        while (progress := journal.read(project.state)) is not None:
            run_id = progress.run or run_id
            logs = {stage: curves(rows) for stage, rows in progress.logs.items()}
            board = self._board.render(title=self._title, progress=cleaned(progress), logs=logs)
            self._post(f"data: {json.dumps(board)}\n\n")
            time.sleep(LOOK_EVERY_S)
        return run_id

    def hand_over(self, report: str) -> None:
        """Has the open pages load the report, and waits until they have."""
        self._post("event: end\ndata:\n\n", report)
        with self._news:
            self._news.wait_for(lambda: self._watching <= 0, timeout=HAND_OVER_S)

    def _post(self, event: str, report: str = "") -> None:
        with self._news:
            if event != self._event:
                self._event, self._report = event, report
                self._count += 1
                self._news.notify_all()

    def page(self) -> str:
        """What is behind the address: the live view, or the report of a run that has ended."""
        return self._report or self._page

    def fetched(self) -> None:
        """A page was sent."""
        with self._news:
            if self._report:
                self._watching -= 1
                self._news.notify_all()

    def events(self) -> Iterator[str]:
        """The newest event each time there is one, or a comment; ends with the run."""
        sent = 0
        is_over = False
        with self._news:
            self._watching += 1
        try:
            while not is_over:
                with self._news:
                    has_news = self._news.wait_for(lambda: self._count > sent, timeout=HEARTBEAT_S)  # noqa: B023
                    sent, event, is_over = self._count, self._event, bool(self._report)
                if has_news:
                    yield event
                else:
                    yield ":\n\n"
        finally:
            if not is_over:  # the page was closed; one that saw the end fetches the report
                with self._news:
                    self._watching -= 1

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that has gone is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET alone; the base class refuses every other method."""

    timeout = TIMEOUT_S
    server_version, sys_version = "layerline", ""
    server: LiveServer

    def do_GET(self) -> None:
        if self.headers.get_all("Host") not in [[host] for host in self.server.hosts]:
            self._send(403, "text/plain", f"open {self.server.url}")
        elif self.path == "/":
            self._send(200, "text/html", self.server.page())
            self.server.fetched()
        elif self.path == "/events":
            self._begin(200, "text/event-stream")
            for event in self.server.events():
                self.wfile.write(event.encode())
        else:
            self._send(404, "text/plain", "there is only one page, /")

    def _begin(self, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", _NO_FRAME)
        self.end_headers()

    def _send(self, code: int, kind: str, text: str) -> None:
        self._begin(code, kind)
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """The terminal belongs to the command."""


@contextmanager
def served(project: Project, port: int) -> Iterator[LiveServer]:
    """A server for the run that is going on.

    Raises:
        PipeError: none is, or Ctrl-C closes the view.
        ConfigError: the port is not free.
    """
    if journal.read(project.state) is None:
        hint = "start one with `pipe run all` in another terminal; `pipe report` writes the page of the newest run"
        raise PipeError("no run is going on in this project", hint=hint)
    try:
        server = LiveServer(port, project.name)
    except OSError as error:
        what = f"port {port} can't be opened: {error.strerror}"
        raise ConfigError(what, where="--port", hint="leave it out, and a free one is taken") from None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield server
    except KeyboardInterrupt:
        raise ViewClosed("the view is closed; the run goes on", hint="pipe report writes its page later") from None
    finally:
        server.shutdown()
        server.server_close()
