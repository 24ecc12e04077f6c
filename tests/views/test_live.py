"""The server of `pipe report --serve`: what it answers, whom it refuses, and that it ends with the run."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from layerline.pipeline.errors import ConfigError, PipeError
from layerline.pipeline.records.run_lock import at_work
from layerline.views import journal, live
from layerline.views.journal import Journal
from layerline.views.live import LiveServer
from tests.pipeline.fakes import Folder


@pytest.fixture
def server(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """The server of a run that goes on."""
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(live, "HAND_OVER_S", 10.0)
    monkeypatch.setattr(journal, "EVERY_S", -1.0)
    project = folder.load()
    with at_work(project.state), live.served(project, 0) as opened:
        yield opened


def connect(server: LiveServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)


def get(server: LiveServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    with closing(connect(server)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_only_the_page_is_served_and_only_to_this_machine(server: LiveServer) -> None:
    status, page = get(server)
    assert status == 200 and "default-src &#39;none&#39;" in page and "connect-src &#39;self&#39;" in page
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, Host=f"localhost:{port}")[0] == 200
    assert get(server, Host=f"evil.example:{port}")[0] == 403
    assert get(server, Host="")[0] == 403
    assert [get(server, path)[0] for path in ("/pipe.yaml", "/../task.py", "/?a")] == [404] * 3
    assert [get(server, method=method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [501] * 4


def test_the_events_follow_the_run_and_end_with_the_report(folder: Folder, server: LiveServer) -> None:
    project = folder.load()
    writer = Journal(project, "r1")
    writer.started(project.stages[0], "<script>alert(1)</script>")
    writer.progress(1, 4)
    with closing(connect(server)) as connection:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        watcher = threading.Thread(target=server.watch, args=(project,), daemon=True)
        watcher.start()
        board = json.loads(answer.readline().decode().removeprefix("data: "))
        assert "1 of 4" in board and "&lt;script&gt;" in board and "<script" not in board
        for step in (5.0, 10.0):
            writer.row({"step": step, "loss": 1 / step})
        writer.progress(2, 4)
        writer.say("now")
        while "<svg" not in board:
            line = answer.readline().decode()
            if line.startswith("data: "):
                board = json.loads(line.removeprefix("data: "))
        # The run has ended: the page loads the report, and the server waits for that.
        end = threading.Thread(target=server.hand_over, args=("the report",))
        end.start()
        while not answer.readline().startswith(b"event: end"):
            pass
        assert end.is_alive()
    assert get(server) == (200, "the report")
    end.join(timeout=10)
    assert not end.is_alive()


def test_the_watch_ends_with_the_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.02)
    project = folder.load()
    with pytest.raises(PipeError, match="no run is going on") as refused, live.served(project, 0):
        pass
    assert refused.value.exit_code == 2
    with at_work(project.state) as _:
        opened = live.served(project, 0)
        server = opened.__enter__()
        Journal(project, "r1").say("")
        shown: list[str] = []
        watcher = threading.Thread(target=lambda: shown.append(server.watch(project)))
        watcher.start()
        while not server.events().__next__().startswith("data"):
            pass
        assert watcher.is_alive()
    watcher.join(timeout=10)
    assert not watcher.is_alive() and shown == ["r1"]
    opened.__exit__(None, None, None)
    with pytest.raises(OSError):
        get(server)


def test_a_port_in_use_is_refused(folder: Folder) -> None:
    project = folder.load()
    with at_work(project.state), closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} can't be opened"), live.served(project, port):
            pass


def test_at_port_80_browsers_leave_the_port_out(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    project = folder.load()
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(live, "HTTP_PORT", port)  # port 80 itself takes privileges
    with at_work(project.state), live.served(project, port) as server:
        answers = [
            get(server, Host=host)[0] for host in ("127.0.0.1", "localhost", f"localhost:{port}", "evil.example")
        ]
    assert answers == [200, 200, 200, 403]


def test_an_interrupt_closes_the_view_and_says_that_the_run_goes_on(folder: Folder) -> None:
    project = folder.load()
    with at_work(project.state), pytest.raises(PipeError, match="the run goes on") as closed, live.served(project, 0):
        raise KeyboardInterrupt
    assert closed.value.exit_code == 130


def test_more_connections_than_there_are_places_are_closed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "CLIENTS", 2)
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.05)
    project = folder.load()
    with at_work(project.state), live.served(project, 0) as server:
        streams = []
        for _ in range(2):
            connection = connect(server)
            connection.request("GET", "/events")
            connection.getresponse()
            streams.append(connection)
        with pytest.raises((http.client.HTTPException, OSError)):
            get(server)
        for connection in streams:
            connection.close()  # a heartbeat notices
        answers = []
        while not answers:
            try:
                answers.append(get(server)[0])
            except (http.client.HTTPException, OSError):
                continue
        assert answers == [200]
    assert capfd.readouterr().err == ""
