"""A bus that is absent or does not answer does not block a component that only listens."""

from __future__ import annotations

import errno
import queue
import threading
from typing import Any

import pytest
from pystemd.dbusexc import DBusBaseError

from agent.machine import patient_systemd
from agent.machine.patient_systemd import PatientSystemd

REFUSED = DBusBaseError(-errno.ECONNREFUSED, None, "Connection refused")


@pytest.mark.behaviour("F-20")
def test_a_listener_is_called_once_the_bus_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that starts meanwhile answers, and checks everything afterwards."""
    monkeypatch.setattr(patient_systemd, "RETRY_S", 0.01)
    tries, signals, released = list[int](), queue.Queue[str](), threading.Event()

    def opener() -> Any:
        tries.append(1)
        assert released.wait(60)
        raise REFUSED

    systemd = PatientSystemd(opener)
    end = systemd.listen(signals.put)  # returns, although the bus does not answer
    released.set()
    while len(tries) < 3:
        threading.Event().wait(0.01)
    assert signals.empty()

    class Watch:
        def add(self, listener: Any) -> Any:
            return lambda: signals.put("ended")

        def close(self) -> None:
            pass

    systemd._watch = Watch()  # type: ignore[assignment]
    assert signals.get(timeout=60) == ""
    end()
    assert signals.get(timeout=60) == "ended"
    systemd.close()


def test_a_listener_that_ended_before_the_bus_was_available_is_not_called() -> None:
    opened, released, signals = threading.Event(), threading.Event(), list[str]()

    def opener() -> Any:
        opened.set()
        assert released.wait(60)
        raise REFUSED

    systemd = PatientSystemd(opener)
    end = systemd.listen(signals.append)
    assert opened.wait(60)
    end()
    released.set()
    for thread in threading.enumerate():
        if thread.name == "systemd-listen":
            thread.join(60)
    assert signals == []
