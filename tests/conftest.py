"""Shared by all suites. Tests of `unit` and `property` may not reach beyond this process."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import os
import socket
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow]  # the speed of a machine is no property of the code
settings.register_profile(
    "fixed", deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
settings.register_profile("random", deadline=None, suppress_health_check=_SLOW)
settings.load_profile("random" if "TWINE_RANDOM" in os.environ else "fixed")
"""Generated examples are the same in each run, so a failure is due to a change. To search for new
examples: `TWINE_RANDOM=1 make test-unit`."""

_HERE = Path(__file__).parent
_ISOLATED = (_HERE / "unit", _HERE / "property")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--behaviour", metavar="ID", help="run only the tests that show it (AL5)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that do not show the behaviour of `--behaviour`."""
    wanted = config.getoption("--behaviour")
    others = [item for item in items if wanted and wanted not in _behaviours(item)]
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=others)


def _behaviours(item: pytest.Item) -> set[str]:
    return {i for mark in item.iter_markers("behaviour") for i in mark.args}


class LeftTheProcess(AssertionError):
    """A test of decisions or of fakes started a program or called another host."""


@pytest.fixture(autouse=True)
def stays_in_the_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail any program and any connection to another host in the suites that use fakes."""
    if not any(request.path.is_relative_to(folder) for folder in _ISOLATED):
        return

    def no_program(*args: object, **_: object) -> NoReturn:
        raise LeftTheProcess(f"this suite starts no program: {args[:2]!r}")

    for name in ("posix_spawn", "posix_spawnp", "system", "execv", "execve", "fork"):
        monkeypatch.setattr(os, name, no_program)
    monkeypatch.setattr(subprocess.Popen, "_execute_child", no_program)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, _local_only(getattr(socket.socket, name)))


def _local_only(call: Any) -> Any:
    def guarded(self: socket.socket, *args: Any) -> Any:
        address = args[-1]
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise LeftTheProcess(f"this suite calls no other host: {address!r}")
        return call(self, *args)

    return guarded


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{n: pyfuncitem.funcargs[n] for n in names}))
    return True
