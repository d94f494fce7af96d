"""What is run before the start of a task with volumes, with the real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from builders import a_spec

from agent.api import TaskSpec, Volume, VolumeKind
from agent.core.volumes import volume_properties

MIB = 1 << 20
DATA = Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=64 * MIB)
CACHE = Volume(kind=VolumeKind.TMPFS, path="/cache", max_bytes=8 * MIB)
SHELL = shutil.which("sh") or ""


def mounted(tmp_path: Path, spec: TaskSpec) -> tuple[int, str, list[str]]:
    """Run what is run before the start with commands that only note what they are asked for."""
    (tmp_path / "bin").mkdir()
    for name in ("mount", "chown"):
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!{SHELL}\necho {name} "$@" >> {tmp_path}/said\n')
        tool.chmod(0o755)
    (tmp_path / "bin/umount").write_text(f"#!{SHELL}\nexit 1\n")
    (tmp_path / "bin/umount").chmod(0o755)
    found = volume_properties("web", spec, str(tmp_path), str(tmp_path / "root"))
    ((_, _, _, _, _, script, name, user, *words),) = found["ExecStartPre"]  # type: ignore[misc]
    uid = tmp_path / f"direct:{user}"
    uid.symlink_to("64957")
    script = script.replace("/run/systemd/dynamic-uid", str(tmp_path))
    done = subprocess.run(
        [SHELL, "-c", script, name, user, *words],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = tmp_path / "said"
    return done.returncode, done.stderr, said.read_text().splitlines() if said.exists() else []


def test_volumes_are_mounted_into_the_root_for_the_number_that_the_user_has(
    tmp_path: Path,
) -> None:
    """AG9: whatever the image has at their places."""
    (tmp_path / "root/cache").mkdir(parents=True)
    code, err, said = mounted(tmp_path, a_spec(volumes={"data": DATA, "cache": CACHE}))
    assert (code, err) == (0, "")
    place, root = f"{tmp_path}/volumes/local/web.data", tmp_path / "root"
    assert said == [
        f"chown 1900000000:1900000000 {place}",
        f"mount --bind -o X-mount.idmap=b:1900000000:64957:1 {place} {root}/data",
        f"mount -t tmpfs -o size={8 * MIB},mode=1777,nosuid,nodev tmpfs {root}/cache",
    ]
    assert (root / "data").is_dir()


@pytest.mark.parametrize("link", ["data", "var"])
def test_an_image_with_a_link_where_a_volume_is_to_be_is_refused(tmp_path: Path, link: str) -> None:
    """AG9, F-84: it would be mounted wherever on the host the image says."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / link).symlink_to("/etc")
    spec = a_spec(volumes={"data": msgspec.structs.replace(DATA, path=f"/{link}/lib/x")})
    if link == "data":
        spec = a_spec(volumes={"data": DATA})
    code, err, said = mounted(tmp_path, spec)
    assert code == 1
    assert "the image has a link on the way to" in err
    assert said == []
