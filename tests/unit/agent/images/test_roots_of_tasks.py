"""Roots of tasks, and the files that are written next to a snapshot."""

from __future__ import annotations

import os
import time

import msgspec
import pytest
from builders import IMAGE, FakeHost, a_spec
from msgspec.structs import replace

from agent.api import ImageFormat, ImageInfo, OciConfig, RootMode
from agent.images.roots import TaskRoots
from agent.machine import QuotaMode
from wire.errors import HostError


def test_the_use_of_an_image_is_written_down_once_a_minute(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = host.state / "images" / f"{IMAGE.removeprefix('sha256:')}.json"
    roots = TaskRoots(host.fake.btrfs, host.state / "tasks", host.state / "images")
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def used_after(passed_s: float, task_id: str) -> bool:
        nonlocal now_s
        now_s += passed_s
        os.utime(described, (1, 1))
        roots.prepare(task_id, IMAGE)
        return described.stat().st_mtime > 1

    assert used_after(0, "a")
    assert not used_after(1, "b")
    assert not used_after(58, "c")
    assert used_after(1, "d")
    assert not used_after(1, "e")


def roots_of(host: FakeHost) -> TaskRoots:
    return TaskRoots(host.fake.btrfs, host.state / "tasks", host.state / "images")


@pytest.mark.behaviour("BUG-AG31")
def test_a_writable_root_is_new_with_each_start_and_bounded(host: FakeHost) -> None:
    """The next start discards the data of a run, and a run may not fill the host's disk."""
    roots, spec = roots_of(host), a_spec(root=RootMode.WRITABLE, root_max_bytes=1 << 20)
    roots.prepare("web", IMAGE)
    roots.renew("web", spec)
    path = roots.path("web")
    usage = host.fake.btrfs.usage(path)
    assert usage is not None
    assert usage.max_bytes == 1 << 20
    (path / "written").write_text("by a task")
    roots.renew("web", replace(spec, root=RootMode.READ_ONLY))
    assert (path / "written").exists()
    roots.renew("web", spec)
    assert not (path / "written").exists()


def test_without_quotas_a_writable_root_is_refused(host: FakeHost) -> None:
    host.fake.btrfs.can_count = QuotaMode.OFF
    roots = roots_of(host)
    roots.prepare("web", IMAGE)
    with pytest.raises(HostError, match="no quotas, so the written data would have no limit"):
        roots.renew("web", a_spec(root=RootMode.WRITABLE))
    roots.renew("web", a_spec())


@pytest.mark.parametrize("link", ["etc/passwd", "etc"])
def test_the_lists_of_an_image_are_found_behind_its_links(host: FakeHost, link: str) -> None:
    image = host.state / "images" / IMAGE.removeprefix("sha256:")
    (image / "usr" / "etc").mkdir(parents=True)
    (image / "usr" / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    if link == "etc":
        (image / "etc").symlink_to("/usr/etc")
    else:
        (image / "etc").mkdir()
        (image / "etc" / "passwd").symlink_to("/usr/etc/passwd")
    owner = roots_of(host).owner(IMAGE)
    assert (owner.users, owner.name, owner.groups) == ("usr/etc/passwd", "root", "")


@pytest.mark.behaviour("BUG-AG56")
def test_an_image_that_is_imported_again_has_its_new_configuration(host: FakeHost) -> None:
    """The same stream may be a plain archive or an OCI layout; an operator may correct this."""
    roots, images = roots_of(host), host.state / "images"
    described = images / f"{IMAGE.removeprefix('sha256:')}.json"
    (images / described.stem / "blobs").mkdir()
    assert (roots.config(IMAGE), roots.writable_folders(IMAGE)) == (None, ["blobs"])

    described.unlink()
    assert roots.config(IMAGE) is None
    (images / described.stem / "blobs").rmdir()
    (images / described.stem / "srv").mkdir()
    config = OciConfig(command=["/bin/server"])
    info = ImageInfo(
        digest=IMAGE, format=ImageFormat.OCI, stream_bytes=1, created_at=2.0, config=config
    )
    described.write_bytes(msgspec.json.encode(info))
    assert (roots.config(IMAGE), roots.writable_folders(IMAGE)) == (config, ["srv"])
