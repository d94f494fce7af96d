"""The requests to systemd about one service, and the used parts of the answers."""

from __future__ import annotations

import errno

import pytest
from pystemd.dbusexc import DBusBaseError

from agent.machine.host_services import HostServices, folder_of
from wire.errors import SystemdError

ANSWERS: dict[str, object] = {
    "LoadUnit": b"/org/freedesktop/systemd1/unit/b",
    "LoadState": b"loaded",
    "Id": b"a@1.service",
    "ActiveState": b"active",
    "SubState": b"exited",
    "Type": b"oneshot",
    "Result": b"success",
    "Job": (0, b"/"),
    "InvocationID": [0xAB] * 16,
    "ControlGroup": b"",
    "Slice": b"system-a.slice",
    "TriggeredBy": [b"a.socket"],
}


class Reply:
    """A message with a body."""

    def __init__(self, body: object) -> None:
        """Store the body of the answer."""
        self.body = body


class Bus:
    """A connection with scripted answers that records the requests."""

    def __init__(self, **answers: object) -> None:
        """Store the answers by method or property."""
        self.answers = {**ANSWERS, **answers}
        self.calls: list[tuple[str, ...]] = []

    def call_method(
        self, destination: bytes, path: bytes, interface: bytes, method: bytes, args: object
    ) -> Reply:
        """Return the scripted answer."""
        words = tuple(value.decode() for _, value in args)  # type: ignore[attr-defined]
        self.calls.append((method.decode(), *words))
        answer = self.answers.get(words[-1] if method == b"Get" else method.decode())
        if isinstance(answer, Exception):
            raise answer
        return Reply(answer)

    def close(self) -> None:
        """End it."""


@pytest.mark.behaviour("BUG-SK31")
def test_a_service_is_reported_by_its_own_name() -> None:
    """LoadUnit finds generated units, aliases and instances, as systemctl does."""
    bus = Bus()
    found = HostServices(lambda: bus).load("b.service")  # type: ignore[arg-type,return-value]
    assert found is not None
    assert bus.calls[0] == ("LoadUnit", "b.service")
    assert (found.name, found.active, found.sub, found.kind) == (
        *("a@1.service", "active", "exited", "oneshot"),
    )
    assert (found.has_job, found.triggered, found.invocation_id) == (False, True, "ab" * 16)
    assert found.control_group == "/system.slice/system-a.slice/a@1.service"


def test_a_service_that_systemd_does_not_find_is_none() -> None:
    bus = Bus(LoadState=b"not-found")
    assert HostServices(lambda: bus).load("b.service") is None  # type: ignore[arg-type,return-value]


def test_a_job_that_waits_is_seen() -> None:
    bus = Bus(Job=(7, b"/org/freedesktop/systemd1/job/7"), ControlGroup=b"/x.slice/b")
    found = HostServices(lambda: bus).load("b.service")  # type: ignore[arg-type,return-value]
    assert found is not None
    assert (found.has_job, found.control_group) == (True, "/x.slice/b")


def test_the_error_of_a_refused_start_has_the_text_of_systemd() -> None:
    error = DBusBaseError(-errno.EACCES, None, "Unit b.service is masked.")
    services = HostServices(lambda: Bus(StartUnit=error))  # type: ignore[arg-type,return-value]
    with pytest.raises(SystemdError, match=r"cannot start b.service: Unit b.service is masked"):
        services.start("b.service")
    services = HostServices(lambda: Bus(LoadUnit=error))  # type: ignore[arg-type,return-value]
    with pytest.raises(SystemdError, match=r"cannot look at b\.service"):
        services.load("b.service")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (b"-.slice", ""),
        (b"", ""),
        (b"system.slice", "/system.slice"),
        (b"a-b-c.slice", "/a.slice/a-b.slice/a-b-c.slice"),
    ],
)
def test_a_slice_lies_in_those_that_its_name_begins_with(name: bytes, folder: str) -> None:
    assert folder_of(name) == folder
