"""The real shell runs the commands before the start of a task with volumes or an image's user."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from builders import a_spec

from agent.api import ImageUser, TaskSpec, Volume, VolumeKind
from agent.images.core.writable_root import owner_of_root
from agent.volumes.core.mounts import mount_properties

MIB = 1 << 20
DATA = Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=64 * MIB)
CACHE = Volume(kind=VolumeKind.TMPFS, path="/cache", max_bytes=8 * MIB)
APP = ImageUser(
    uid=1000,
    gid=7,
    name="app",
    home="/home/app",
    shell="/bin/sh",
    users="usr/etc/passwd",
    group="staff",
    groups="etc/group",
)
OF_APP = "nosuid,X-mount.idmap=u:0:0:1 g:0:0:1 u:1000:64957:1 g:7:64957:1"
SHELL = shutil.which("sh") or ""


def mounted(
    tmp_path: Path, spec: TaskSpec, user: ImageUser | None = None
) -> tuple[int, str, list[str]]:
    """Run the commands before the start with programs that only record their arguments."""
    (tmp_path / "bin").mkdir()
    for name in ("mount", "chown"):
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!{SHELL}\necho {name} "$@" >> {tmp_path}/calls\n')
        tool.chmod(0o755)
    (tmp_path / "bin/umount").write_text(f"#!{SHELL}\nexit 1\n")
    (tmp_path / "bin/umount").chmod(0o755)
    found = mount_properties("web", spec, str(tmp_path), str(tmp_path / "root"), user)
    ((_, _, _, _, _, script, name, login, *words),) = found["ExecStartPre"]  # type: ignore[misc]
    uid = tmp_path / f"direct:{login}"
    uid.symlink_to("64957")
    script = script.replace("/run/systemd/dynamic-uid", str(tmp_path))
    done = subprocess.run(
        [SHELL, "-c", script, name, login, *words],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    commands = tmp_path / "calls"
    return (
        done.returncode,
        done.stderr,
        commands.read_text().splitlines() if commands.exists() else [],
    )


@pytest.mark.behaviour("AG9")
def test_volumes_are_mounted_into_the_root_for_the_number_that_the_user_has(
    tmp_path: Path,
) -> None:
    """The mounts work whatever the image contains at their paths."""
    (tmp_path / "root/cache").mkdir(parents=True)
    code, err, commands = mounted(tmp_path, a_spec(volumes={"data": DATA, "cache": CACHE}))
    assert (code, err) == (0, "")
    place, root = f"{tmp_path}/volumes/local/web.data", tmp_path / "root"
    assert commands == [
        f"chown 1900000000:1900000000 {place}",
        f"mount --bind -o X-mount.idmap=b:1900000000:64957:1 {place} {root}/data",
        f"mount -t tmpfs -o size={8 * MIB},mode=1777,nosuid,nodev tmpfs {root}/cache",
    ]
    assert (root / "data").is_dir()


@pytest.mark.behaviour("AG9", "F-84")
@pytest.mark.parametrize("link", ["data", "var"])
def test_an_image_with_a_link_where_a_volume_is_to_be_is_refused(tmp_path: Path, link: str) -> None:
    """Otherwise the image would choose the path on the host where the volume is mounted."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / link).symlink_to("/etc")
    spec = a_spec(volumes={"data": msgspec.structs.replace(DATA, path=f"/{link}/lib/x")})
    if link == "data":
        spec = a_spec(volumes={"data": DATA})
    code, err, commands = mounted(tmp_path, spec)
    assert code == 1
    assert "the image has a link on the way to" in err
    assert commands == []


def an_image(tmp_path: Path, spec: TaskSpec) -> Path:
    """Make an image with user lists and a root of it; return the root."""
    image = tmp_path / "images" / spec.image.removeprefix("sha256:")
    for top in (image, tmp_path / "root"):
        for name, text in (("usr/etc/passwd", "root:x:0:0\n"), ("etc/group", "root:x:0:\n")):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(text)
    return tmp_path / "root"


@pytest.mark.behaviour("AG3")
def test_a_root_is_shown_to_its_images_user_before_volumes_are_put_into_it(tmp_path: Path) -> None:
    """Every start writes the lists again from those of the image."""
    spec = a_spec(volumes={"data": DATA})
    root = an_image(tmp_path, spec)
    outside = tmp_path / "outside"
    outside.write_text("outside text")
    (root / "etc/group").unlink()
    # an existing file is replaced, never written in place
    (root / "etc/group").hardlink_to(outside)
    (root / "usr/etc/passwd").write_text("of an earlier start")
    code, err, commands = mounted(tmp_path, spec, APP)
    assert (code, err) == (0, "")
    place = f"{tmp_path}/volumes/local/web.data"
    assert commands == [
        f"mount --bind --make-private -o {OF_APP} {root} {root}",
        f"chown 1900000000:1900000000 {place}",
        f"mount --bind -o X-mount.idmap=b:1900000000:64957:1 {place} {root}/data",
    ]
    assert (root / "data").is_dir()
    users, groups = root / "usr/etc/passwd", root / "etc/group"
    assert users.read_text() == "app:x:64957:64957::/home/app:/bin/sh\nroot:x:0:0\n"
    assert groups.read_text() == "staff:x:64957:\nroot:x:0:\n"
    assert (users.stat().st_mode & 0o777, groups.stat().st_mode & 0o777) == (0o644, 0o644)
    assert outside.read_text() == "outside text"


@pytest.mark.behaviour("AG3")
def test_a_user_without_a_name_has_the_lists_as_they_are(tmp_path: Path) -> None:
    """This includes a user of root's group, which is then mapped to the task's own."""
    root = an_image(tmp_path, a_spec())
    code, err, commands = mounted(tmp_path, a_spec(), ImageUser(uid=1000, gid=0))
    assert (code, err) == (0, "")
    assert commands == [
        "mount --bind --make-private -o nosuid,X-mount.idmap=u:0:0:1 u:1000:64957:1 g:0:64957:1"
        f" {root} {root}"
    ]
    assert (root / "etc/group").read_text() == "root:x:0:\n"


@pytest.mark.behaviour("AG8", "F-84")
@pytest.mark.parametrize("link", ["usr/etc/passwd", "etc"])
def test_a_list_is_not_written_through_a_link(tmp_path: Path, link: str) -> None:
    """The link's target would be a file of the host."""
    root = an_image(tmp_path, a_spec())
    host = tmp_path / "host"
    host.mkdir()
    (host / "group").write_text("the host's")
    at = root / link
    shutil.rmtree(at) if at.is_dir() else at.unlink()
    at.symlink_to(host if link == "etc" else host / "group")
    code, err, commands = mounted(tmp_path, a_spec(), APP)
    assert code == 1
    assert "there is a link on the way to" in err
    assert commands == []
    assert (host / "group").read_text() == "the host's"


@pytest.mark.behaviour("BUG-AG31")
def test_every_user_of_a_root_that_belongs_to_the_task_is_mapped_to_it(tmp_path: Path) -> None:
    """`chown www-data` in an entrypoint of root failed (apache2ctl: "Invalid argument"),
    and so did a change to the image's own user (unbound)."""
    root = an_image(tmp_path, a_spec())
    image = tmp_path / "images" / a_spec().image.removeprefix("sha256:")
    listed = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/sh\n+::::::\n"
    (image / "usr/etc/passwd").write_text(listed)
    (image / "etc/group").write_text("root:x:0:\nwww-data:x:33:root,www\n")
    commands = mounted(tmp_path, a_spec(), owner_of_root("usr/etc/passwd", "etc/group"))
    one = f"mount --bind --make-private -o nosuid,X-mount.idmap=u:0:64957:1 g:0:64957:1 {root}"
    assert commands == (0, "", [f"{one} {root}"])
    assert (root / "usr/etc/passwd").read_text() == (
        "root:x:64957:64957::/root:/bin/sh\nroot:x:64957:64957:root:/root:/bin/sh\n"
        "www-data:x:64957:64957::/var/www:/bin/sh\n+::::::\n"
    )
    groups = "root:x:64957:\nroot:x:64957:\nwww-data:x:64957:root,www\n"
    assert (root / "etc/group").read_text() == groups


@pytest.mark.behaviour("BUG-AG31")
def test_an_image_of_one_program_gets_the_folders_that_its_unit_needs(tmp_path: Path) -> None:
    """An image without /dev and /proc never started; other runtimes make these folders."""
    root = tmp_path / "root"
    (root / "usr/sbin").mkdir(parents=True)
    (root / "var").symlink_to(tmp_path / "host")
    (tmp_path / "host").mkdir()
    assert mounted(tmp_path, a_spec(), owner_of_root("", ""))[:2] == (0, "")
    names = ["dev", "etc", "proc", "run", "sbin", "sys", "tmp", "usr", "var"]
    assert sorted(path.name for path in root.iterdir()) == names
    assert os.readlink(root / "sbin") == "usr/sbin"
    assert list((tmp_path / "host").iterdir()) == [], "no link of the image's is followed"
