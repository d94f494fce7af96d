"""The lab of a bench ends with the bench."""

from __future__ import annotations

import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import guest

pytestmark = pytest.mark.behaviour("BUG-LB6")
RUN = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tests/bench/run.py"))


@pytest.fixture(autouse=True)
def own_signal() -> Iterator[None]:
    def ends_the_process(*_: object) -> None:
        raise AssertionError("SIGTERM would have ended the process at once")

    before = signal.signal(signal.SIGTERM, ends_the_process)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_removes_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly the lab ran on; the first `down` removes the lab of a bench that was killed."""
    calls: list[str] = []
    monkeypatch.setattr(guest, "lab", lambda _, command, *__: calls.append(command))

    def measure(_: str) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    with pytest.raises(KeyboardInterrupt):
        guest.shown(measure, "", as_json=True)
    assert calls == ["down", "up", "down"]


def test_a_lab_that_does_not_boot_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def lab(_: str, command: str, *__: str) -> None:
        calls.append(command)
        if command == "up":
            raise SystemExit("bench: up failed")

    monkeypatch.setattr(guest, "lab", lab)
    with pytest.raises(SystemExit):
        guest.shown(lambda _: {}, "", as_json=True)
    assert calls == ["down", "up", "down"]


def test_a_lab_of_the_caller_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(guest, "lab", lambda _, command, *__: calls.append(command))
    guest.shown(lambda _: {}, "mine", as_json=True)
    assert calls == []


def test_the_guest_of_all_benches_is_removed_if_it_does_not_boot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def lab(_: object, command: str, *__: str) -> None:
        calls.append(command)
        if command == "up":
            raise RuntimeError("no guest")

    shared = RUN["_PendingConnection"]
    monkeypatch.setattr(shared, "_lab", lab)
    of_all = shared(0)
    for _ in range(2):  # the next bench boots it again
        with pytest.raises(RuntimeError):
            of_all.name()
    of_all.down()
    assert calls == ["down", "up", "down"] * 2
