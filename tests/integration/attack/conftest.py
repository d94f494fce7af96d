"""Both programs, started once for all attacks: each attack has to leave them unchanged."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from .face import Face, running

MIB = 1 << 20


@pytest.fixture(scope="session", autouse=True)
def many_descriptors() -> None:
    """Allow an attacker any number of descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@pytest.fixture(scope="session", params=["control plane", "agent"])
def one_face(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """Yield a program that all tests attack."""
    folder: Path = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    with running(request.param, folder) as face:
        yield face


@pytest.fixture
def face(one_face: Face) -> Iterator[Face]:
    """Yield the program. Afterwards its descriptors and the tasks of its loop must be as before,
    and its memory equal within some megabytes (which an allocator keeps).
    """
    asyncio.run(one_face.ask())
    descriptors, memory, tasks = one_face.descriptors(), one_face.memory(), one_face.tasks()
    yield one_face
    one_face.until(lambda: one_face.descriptors() <= descriptors + 2, "descriptors stay open")
    one_face.until(lambda: one_face.tasks() <= tasks + 2, "tasks stay behind")
    asyncio.run(one_face.ask())
    one_face.until(lambda: one_face.memory() < memory + 64 * MIB, "memory stays taken")
