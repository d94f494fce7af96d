"""`uninstall` removes everything that `install` put on a host."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import FakeHost, a_spec, running

from agent.host.install import install
from agent.host.uninstall import uninstall
from agent.machine import Completed
from wire.errors import Conflict, ProgramError

SIDEKICK = "/opt/twine/bin/sidekick"


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def root(host: FakeHost) -> Path:
    """Yield the root of a host with programs, before Twine is installed."""
    for name in ("systemctl", "nft", "groupdel", SIDEKICK):
        host.fake.processes.answers[(name,)] = Completed(0, "", "")
    found = host.folder / "root"
    for folder in ("etc/systemd/system", "etc/sysusers.d", "etc/udev/rules.d", "run", "sys/fs/bpf"):
        (found / folder).mkdir(parents=True)
    (found / "etc/systemd/system/other.service").write_text("stays")
    return found


def uninstall_host(host: FakeHost, root: Path, *, purge: bool) -> list[str]:
    machine, run = host.fake.machine, Path(host.config.run_dir)
    return uninstall(root, host.state, run, machine, SIDEKICK, purge=purge)


async def test_after_a_purge_no_file_no_unit_and_no_subvolume_is_left(
    host: FakeHost, root: Path
) -> None:
    before = files(root)
    install(root)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        with pytest.raises(Conflict, match="1 tasks are on this host: twine-task-web"):
            uninstall_host(host, root, purge=True)
        assert len(files(root)) > len(before)
        (root / "sys/fs/bpf/twine-ports/none").mkdir(parents=True)
        (root / "run/twine-kernel/proc").mkdir(parents=True)  # systemd makes it for the unit
        host.fake.systemd.stop("twine-task-web.service")
    gone = uninstall_host(host, root, purge=True)

    assert files(root) == before
    assert files(host.state) == []
    assert not Path(host.config.run_dir).exists()
    assert str(host.state / "tasks" / "web") in gone
    assert host.fake.systemd.units("twine-*") == []
    assert ("groupdel", "twine") in host.fake.processes.calls


async def test_without_purge_images_and_configuration_stay(host: FakeHost, root: Path) -> None:
    install(root)
    async with host.agent():
        pass
    uninstall_host(host, root, purge=False)

    assert (root / "etc/twine/agent.toml").exists()
    assert (host.state / "images" / ("1" * 64)).exists()
    assert not (root / "etc/systemd/system/twine-agent.service").exists()


async def test_settings_of_a_profile_are_given_back_first_or_nothing_is_done(
    host: FakeHost, root: Path
) -> None:
    install(root)
    (host.state / "sidekick").mkdir(parents=True)
    (host.state / "sidekick" / "state.json").write_text("{}")
    host.fake.processes.answers[(SIDEKICK, "rollback")] = ProgramError("it needs a reboot")
    before = files(root)
    with pytest.raises(ProgramError, match="needs a reboot"):
        uninstall_host(host, root, purge=True)

    assert files(root) == before
    assert host.fake.processes.calls == [(SIDEKICK, "rollback")]
