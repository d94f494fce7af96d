"""Where paths of a tree lead that nobody trusts."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from agent.machine.beneath import find_place, read_file


@pytest.mark.parametrize(
    ("links", "place"),
    [
        ({}, "etc/passwd"),
        ({"etc/passwd": "users"}, "etc/users"),
        ({"etc/passwd": "/nix/list"}, "nix/list"),
        ({"etc/passwd": "../../../../nix/list"}, "nix/list"),
        ({"etc/passwd": "/b", "b": "c", "c": "./nix/../nix//list"}, "nix/list"),
        ({"etc": "/usr/etc"}, "usr/etc/passwd"),
    ],
)
def test_links_of_a_tree_lead_inside_of_it(
    tmp_path: Path, links: dict[str, str], place: str
) -> None:
    """F-84: as if the tree were the root of all."""
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("its own")
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert find_place(str(tmp_path), "etc/passwd") == place
    assert read_file(str(tmp_path), place, 100) == b"its own"


def test_a_link_to_what_only_the_host_has_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "list").symlink_to("/etc/passwd")
    with pytest.raises(FileNotFoundError):
        find_place(str(tmp_path), "list")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        find_place(str(tmp_path), "file/below")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links") as raised:
        find_place(str(tmp_path), "a")
    assert raised.value.errno == errno.ELOOP
