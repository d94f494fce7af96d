"""Both faces, once for all attacks: each has to leave them as they were."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from .face import Face, running


@pytest.fixture(scope="session", autouse=True)
def many_descriptors() -> None:
    """An attacker has as many as it likes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@pytest.fixture(scope="session", params=["control plane", "agent"])
def face(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Face]:
    """A program that is attacked again and again."""
    folder: Path = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    with running(request.param, folder) as face:
        yield face
