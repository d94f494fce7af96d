"""The name resolution files in a task's root, which are written before each start."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import IMAGE, FakeHost, a_spec, running, until
from msgspec.structs import replace

from agent.api import Dns, Network, TaskState
from agent.machine.beneath import put_file

NAMES = ("hosts", "resolv.conf", "hostname")


def image_of(host: FakeHost) -> Path:
    """Return the folder of the machine's only image."""
    return host.state / "images" / IMAGE.removeprefix("sha256:")


@pytest.mark.behaviour("BUG-AG31")
async def test_each_start_overwrites_files_of_the_image(host: FakeHost) -> None:
    """An image kept the resolver of its build machine; other images had none."""
    host.fake.texts["/etc/resolv.conf"] = "nameserver 10.0.0.2\n"
    etc = image_of(host) / "etc"
    etc.mkdir()
    (etc / "hosts").write_text("1.2.3.4 build\n")
    (etc / "resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        root = host.state / "tasks" / "web" / "etc"
        assert all((root / name).is_file() and not (root / name).is_symlink() for name in NAMES)
        assert "10.0.0.2" in (root / "resolv.conf").read_text()
        assert "build" not in (root / "hosts").read_text()
        assert (root / "hostname").read_text() == "fake\n"
        assert {(root / name).stat().st_mode & 0o777 for name in NAMES} == {0o644}
        host.fake.texts["/etc/resolv.conf"] = "nameserver 10.0.0.3\n"
        spec = a_spec(generation=2, network=Network(dns=Dns(hosts={"db": "10.1.1.1"})))
        await client.put_task("web", spec)
        await until(client, "web", lambda s: s.generation == 2 and s.state is TaskState.RUNNING)
        assert "10.0.0.3" in (root / "resolv.conf").read_text()
        assert "10.1.1.1\tdb" in (root / "hosts").read_text()
    assert (etc / "hosts").read_text() == "1.2.3.4 build\n"


@pytest.mark.behaviour("BUG-AG31")
async def test_a_root_without_etc_gets_one_and_a_file_in_its_place_is_an_error(
    host: FakeHost,
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        assert (host.state / "tasks/web/etc/hosts").is_file()
        other = host.give_image("sha256:" + "7" * 64)
        (host.state / "images" / ("7" * 64) / "etc").write_text("")
        never = replace(a_spec().restart, backoff_s=600.0, backoff_max_s=600.0)
        await client.put_task("odd", a_spec(image=other, restart=never))
        status = await until(client, "odd", lambda s: s.state is TaskState.BACKOFF)
        assert "cannot write /etc/hosts into the root of task odd" in status.reason


@pytest.mark.behaviour("BUG-AG31")
@pytest.mark.parametrize("link", ["/etc", "../..", "/"])
def test_a_file_is_put_within_the_tree_whatever_its_links_say(tmp_path: Path, link: str) -> None:
    """The host's own /etc is never written."""
    tree = tmp_path / "a" / "tree"
    (tree / "real").mkdir(parents=True)
    (tree / "etc").symlink_to("real" if link == "/etc" else link)
    assert put_file(str(tree), "etc/made-by-test", b"x")
    assert not put_file(str(tree), "etc/made-by-test", b"x")
    assert put_file(str(tree), "etc/made-by-test", b"xy")
    [found] = tmp_path.rglob("made-by-test")
    assert found.is_relative_to(tree)
    assert found.read_bytes() == b"xy"
