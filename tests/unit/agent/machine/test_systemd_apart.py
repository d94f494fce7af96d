"""The helper that speaks to systemd: what passes through it, and what its death costs."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.errors import Conflict, SystemdError
from agent.machine import UnitState
from agent.machine.fake import FakeMachine
from agent.machine.fake_systemd import FakeSystemd
from agent.machine.systemd_apart import ApartSystemd, serve

SLEEP = {"ExecStart": [["/bin/sleep", "9"]], "RemainAfterExit": True}


class Helpers:
    """Helpers in threads, before one service manager in memory."""

    def __init__(self, systemd: FakeSystemd) -> None:
        self.systemd = systemd
        self.started = 0
        self.kill: Callable[[], None] = lambda: None

    def __call__(self, calls: socket.socket, signals: socket.socket) -> Callable[[], None]:
        self.started += 1
        ends = calls.dup(), signals.dup()
        thread = threading.Thread(target=serve, args=(self.systemd, *ends), daemon=True)
        thread.start()

        def kill() -> None:
            for end in ends:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return

        def reaped() -> None:
            kill()
            thread.join()
            for end in ends:
                end.close()

        self.kill = kill
        return reaped


@pytest.fixture
def helpers(tmp_path: Path) -> Helpers:
    return Helpers(FakeMachine(tmp_path).systemd)


@pytest.fixture
def systemd(helpers: Helpers) -> Iterator[ApartSystemd]:
    systemd = ApartSystemd(helpers)
    yield systemd
    systemd.close()


def test_calls_answers_and_errors_pass_through(systemd: ApartSystemd) -> None:
    systemd.start_transient("a.service", SLEEP)
    found = systemd.find("a.service")

    assert isinstance(found, UnitState)
    assert found.sub == "running"
    assert systemd.units("a.*") == [found]
    assert systemd.version() > 200
    with pytest.raises(Conflict, match=r"cannot start a.service"):
        systemd.start_transient("a.service", SLEEP)
    with pytest.raises(SystemdError, match=r"cannot change b.service"):
        systemd.set_properties("b.service", {"CPUWeight": 7})
    systemd.kill("a.service", 9)
    systemd.reset_failed("a.service")
    systemd.stop("a.service")
    assert systemd.find("a.service") is None


def test_listeners_hear_of_changes_until_they_end(systemd: ApartSystemd) -> None:
    heard: queue.Queue[str] = queue.Queue()
    end = systemd.listen(heard.put)
    systemd.start_transient("a.service", SLEEP)
    assert heard.get(timeout=10) == "a.service"
    end()
    systemd.stop("a.service")
    systemd.version()
    assert "a.service" not in list(heard.queue)[1:]


def test_a_helper_that_died_costs_one_call_and_no_signal(
    systemd: ApartSystemd, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.machine.systemd_apart.RESTART_S", 0.0)
    heard: queue.Queue[str] = queue.Queue()
    systemd.listen(heard.put)
    systemd.version()
    helpers.kill()

    assert heard.get(timeout=10) == ""
    assert helpers.started == 2
    systemd.start_transient("a.service", SLEEP)
    assert heard.get(timeout=10) == "a.service"


def test_a_call_on_a_dead_helper_says_so_and_the_next_one_works(
    systemd: ApartSystemd, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        helpers.kill()

    monkeypatch.setattr(helpers.systemd, "stop", dies)
    with pytest.raises(SystemdError, match="the helper that speaks to systemd died"):
        systemd.stop("a.service")
    assert systemd.version() > 200
