"""Where the paths of an untrusted tree lead."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from agent.machine.beneath import ensure_folder, read_file, resolve_path


@pytest.mark.behaviour("F-84")
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
    """Links are resolved as if the tree were the root file system."""
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("its own")
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert resolve_path(str(tmp_path), "etc/passwd") == place
    assert read_file(str(tmp_path), place, 100) == b"its own"


def test_a_link_to_what_only_the_host_has_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "list").symlink_to("/etc/passwd")
    with pytest.raises(FileNotFoundError):
        resolve_path(str(tmp_path), "list")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        resolve_path(str(tmp_path), "file/below")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links") as raised:
        resolve_path(str(tmp_path), "a")
    assert raised.value.errno == errno.ELOOP


def test_a_folder_is_made_where_the_links_of_the_tree_lead(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "data").mkdir(parents=True)
    (tree / "srv").symlink_to("/data")
    for path in ("/srv/app/here", "/srv/app", "/", "", "/data"):
        ensure_folder(str(tree), path)
    assert (tree / "data/app/here").stat().st_mode & 0o7777 == 0o755
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]


@pytest.mark.behaviour("F-84")
@pytest.mark.parametrize("target", [None, "/nowhere", "../../outside"])
def test_no_folder_is_made_through_a_file_or_a_link_to_nothing(
    tmp_path: Path, target: str | None
) -> None:
    """Nothing is made outside of the tree."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "x").symlink_to(target) if target else (tree / "x").write_text("")
    for path in ("/x", "/x/below"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            ensure_folder(str(tree), path)
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]
    assert [p.name for p in tree.iterdir()] == ["x"]
