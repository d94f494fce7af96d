"""Both programs, started once for all attacks: each attack has to leave them unchanged."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from .target_process import Target, running

MIB = 1 << 20


@pytest.fixture(scope="session", autouse=True)
def many_descriptors() -> None:
    """Allow an attacker any number of descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@pytest.fixture(scope="session", params=["control plane", "agent"])
def one_target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """Yield a program that all tests attack."""
    folder: Path = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    with running(request.param, folder) as target:
        yield target


@pytest.fixture
def target(one_target: Target) -> Iterator[Target]:
    """Yield the program. Afterwards its descriptors and the tasks of its loop must be as before,
    and its memory equal within some megabytes (which an allocator keeps).
    """
    asyncio.run(one_target.ask())
    descriptors, memory, tasks = one_target.descriptors(), one_target.memory(), one_target.tasks()
    yield one_target
    one_target.until(lambda: one_target.descriptors() <= descriptors + 2, "descriptors stay open")
    one_target.until(lambda: one_target.tasks() <= tasks + 2, "tasks stay behind")
    asyncio.run(one_target.ask())
    one_target.until(lambda: one_target.memory() < memory + 64 * MIB, "memory stays taken")
