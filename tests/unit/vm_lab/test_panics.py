"""A VM whose kernel panics while it boots is started again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from vm_lab import domains as module
from vm_lab.domains import restarting_panicked
from vm_lab.errors import LabError

PANIC = b"[    7.5] ---[ end Kernel panic - not syncing: Fatal exception in interrupt ]---\r\n"
WAIT_S = 60


class Domains:
    """Counts resets; the kernel panics at each of its first boots."""

    def __init__(self, log: Path, panics: int) -> None:
        self.log, self.panics, self.resets = log, panics, 0
        self.done = threading.Event()

    def boot(self) -> None:
        if self.panics:
            self.panics -= 1
            with self.log.open("ab") as file:
                file.write(PANIC)
        else:
            self.done.set()

    def reset(self, name: str) -> None:
        assert name == "m1"
        self.resets += 1
        self.boot()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_S", 0.005)


@pytest.mark.behaviour("BUG-UX139")
@pytest.mark.parametrize("panics", [1, 3])
def test_a_vm_that_panics_is_reset_until_it_boots(tmp_path: Path, panics: int) -> None:
    domains, lines = Domains(tmp_path / "m1.log", panics), list[str]()
    with restarting_panicked(domains, tmp_path, ["m1", "m2"], lines.append):  # type: ignore[arg-type]
        domains.boot()
        assert domains.done.wait(WAIT_S)
    assert domains.resets == len(lines) == panics
    assert "m1: its kernel panicked" in lines[0]


def test_an_earlier_panic_resets_nothing(tmp_path: Path) -> None:
    log = tmp_path / "m1.log"
    log.write_bytes(PANIC)
    assert module.has_panicked(log, 0)
    assert not module.has_panicked(log, log.stat().st_size)
    with log.open("ab") as file:
        file.write(b"login: ")
    assert not module.has_panicked(log, len(PANIC))
    log.write_bytes(PANIC)  # libvirt truncated it when it started the VM
    assert module.has_panicked(log, len(PANIC) + 7)


def test_a_kernel_that_always_panics_is_left_to_the_time_limit(tmp_path: Path) -> None:
    domains, third = Domains(tmp_path / "m1.log", 100), threading.Event()

    def say(_: str) -> None:
        if domains.resets == 2:
            third.set()

    with restarting_panicked(domains, tmp_path, ["m1"], say):  # type: ignore[arg-type]
        domains.boot()
        assert third.wait(WAIT_S)
    assert domains.resets == 3


def test_a_vm_that_was_switched_off_is_not_an_error(tmp_path: Path) -> None:
    class Off(Domains):
        def reset(self, name: str) -> None:
            super().reset(name)
            raise LabError("domain is not running")

    domains = Off(tmp_path / "m1.log", 1)
    with restarting_panicked(domains, tmp_path, ["m1"], lambda _: None):  # type: ignore[arg-type]
        domains.boot()
        assert domains.done.wait(WAIT_S)
    assert domains.resets == 1
