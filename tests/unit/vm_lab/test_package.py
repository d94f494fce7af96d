"""The contents of the agent's Debian package, and their places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.host.install import PACKAGED, install, targets
from vm_lab.errors import LabError
from vm_lab.package import MARKS, SCRIPTS, move_files, version_of, write_metadata
from wire.errors import Conflict


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the files of both layers: a virtual environment, and an installation by hand."""
    found = tmp_path / "root"
    install(found)
    wants = found / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "sidekick-resume.service").symlink_to("/etc/systemd/system/sidekick-resume.service")
    (found / "usr/local/bin").mkdir(parents=True)
    (found / "usr/local/bin/twine-agent").symlink_to("/opt/twine/bin/twine-agent")
    about = found / "opt/twine/lib/python3.13/site-packages/twine_cluster-1.2.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: twine-cluster\nVersion: 1.2.3\n")
    for mark in MARKS:
        (found / mark).write_text("a layer\n")
    return found


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


@pytest.mark.behaviour("F-05")
def test_units_move_to_the_folder_of_packages_and_configuration_stays_in_etc(root: Path) -> None:
    """Each version of the package has its own units, and dpkg knows all of them."""
    before = [target for _, _, target in targets()]
    replaced = move_files(root)

    assert {f for f in files(root) if f.startswith("etc/")} == {"etc/twine/agent.toml"}
    there = files(root)
    assert {t.replace("etc/", "usr/lib/", 1) for t in before} <= there
    assert PACKAGED in there
    assert "usr/bin/twine-agent" in there
    assert sorted(replaced) == sorted([*before, "usr/local/bin/twine-agent"])
    assert not any(mark in there for mark in MARKS)
    assert [p for p in (root / "usr").rglob("*") if p.is_dir() and not any(p.iterdir())] == []


@pytest.mark.behaviour("F-05")
def test_scripts_remove_files_that_would_hide_the_packages_units(root: Path) -> None:
    """A host that was set up by pip gets the package's units instead of its old ones."""
    replaced = move_files(root)
    write_metadata(root, version_of(root), replaced)

    debian = root / "DEBIAN"
    assert "Version: 1.2.3\n" in (debian / "control").read_text()
    assert (debian / "conffiles").read_text() == "/etc/twine/agent.toml\n"
    assert "etc/systemd/system/twine-agent.service" in (debian / "postinst").read_text()
    for name in (*SCRIPTS, "control"):
        assert re.findall(r"@[A-Z_]+@", (debian / name).read_text()) == []
    assert all((debian / name).stat().st_mode & 0o111 for name in SCRIPTS)


def test_layers_with_no_or_two_distributions_are_refused(root: Path) -> None:
    other = root / "opt/twine/lib/python3.13/site-packages/twine_cluster-2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Version: 2\n")
    with pytest.raises(LabError, match="2 distributions"):
        version_of(root)


@pytest.mark.behaviour("F-05")
def test_an_installation_by_hand_is_refused_if_the_package_is_installed(root: Path) -> None:
    """Otherwise units in /etc would hide those of every later version."""
    move_files(root)
    before = files(root)
    with pytest.raises(Conflict, match="was installed from a package"):
        install(root)
    assert files(root) == before
