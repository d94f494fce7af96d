"""Both faces, once for all attacks: each has to leave them as they were."""

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
    """An attacker has as many as it likes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@pytest.fixture(scope="session", params=["control plane", "agent"])
def one_face(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """A program that is attacked again and again."""
    folder: Path = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    with running(request.param, folder) as face:
        yield face


@pytest.fixture
def face(one_face: Face) -> Iterator[Face]:
    """Yield it, and see that descriptors and tasks of its loop are what they were before, and
    memory within some megabytes (what an allocator keeps)."""
    asyncio.run(one_face.ask())
    descriptors, memory, tasks = one_face.descriptors(), one_face.memory(), one_face.tasks()
    yield one_face
    one_face.until(lambda: one_face.descriptors() <= descriptors + 2, "descriptors stay open")
    one_face.until(lambda: one_face.tasks() <= tasks + 2, "tasks stay behind")
    asyncio.run(one_face.ask())
    one_face.until(lambda: one_face.memory() < memory + 64 * MIB, "memory stays taken")
