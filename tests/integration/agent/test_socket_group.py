"""A socket whose access list names a group accepts only members of the group."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.machine.acl import allow_group

pytestmark = pytest.mark.root
GROUP, OTHER = 64_001, 64_002


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Yield a socket in a folder that all users may enter."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o600)
        listener.listen()
        yield tmp_path / "s"


def connects(path: Path, uid: int, gid: int, groups: list[int]) -> bool:
    """Return whether a process of a user can connect."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.behaviour("F-79")
def test_only_members_of_the_group_get_through(path: Path) -> None:
    """The primary group or a supplementary group counts; the owner is still root."""
    assert not connects(path, 64_000, GROUP, [])
    allow_group(path, GROUP)
    assert connects(path, 64_000, GROUP, [])
    assert connects(path, 64_000, OTHER, [GROUP])
    assert not connects(path, 64_000, OTHER, [OTHER])
    assert not connects(path, 64_000, 0, [])
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 0, 0o660)
