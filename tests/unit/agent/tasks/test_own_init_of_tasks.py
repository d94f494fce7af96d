"""Tasks with their own init on the machine in memory: accepted, refused, isolated."""

from __future__ import annotations

from typing import Any

import pytest
from builders import IMAGE, OTHER_IMAGE, FakeHost, a_spec, gone, running, unit
from msgspec.structs import replace

from agent.api import Network, NetworkMode, Relaxation, TaskSpec, TaskState
from agent.tasks.core.own_init import FIRST_ID, ID_COUNT, NSPAWN, SLOTS
from wire.errors import Unprocessable

PRIVATE = Network(mode=NetworkMode.PRIVATE)


@pytest.fixture
def image(host: FakeHost) -> str:
    """Return the image that has an init."""
    init = host.state / "images" / IMAGE.removeprefix("sha256:") / "usr/lib/systemd/systemd"
    init.parent.mkdir(parents=True)
    init.write_text("init")
    return IMAGE


def a_machine(**fields: Any) -> TaskSpec:
    own = {"command": [], "relaxations": [Relaxation.OWN_INIT], "network": PRIVATE}
    return a_spec(**{**own, **fields})


def users(host: FakeHost, task_id: str) -> int:
    """Return the first user id of a machine, from the arguments of systemd-nspawn."""
    commands: Any = host.fake.systemd.properties(unit(task_id))["ExecStart"]
    (word,) = [w for w in commands[0] if w.startswith("--private-users=")]
    first, count = word.partition("=")[2].split(":")
    assert int(count) == ID_COUNT
    return int(first)


@pytest.mark.behaviour("AG8")
async def test_machines_have_users_of_their_own_which_a_restart_of_the_agent_keeps(
    host: FakeHost, image: str
) -> None:
    """This includes a machine whose first choice is in use by another."""
    async with host.agent() as client:
        for name in ("a", "b", "c"):
            await client.put_task(name, a_machine(image=image))
            await running(client, name)
        found = {name: users(host, name) for name in ("a", "b", "c")}
        assert len({*found.values()}) == 3
        assert all(FIRST_ID <= ids < FIRST_ID + SLOTS * ID_COUNT for ids in found.values())
    async with host.agent() as client:
        await client.put_task("b", a_machine(image=image, generation=2, stop_timeout_s=77.0))
        again = await running(client, "b")
        assert again.generation == 2
        assert users(host, "b") == found["b"]
        await client.delete_task("b")
        await gone(client, "b")


@pytest.mark.behaviour("AG8")
async def test_mounts_of_a_machine_are_removed_from_outside_before_its_root(
    host: FakeHost, image: str
) -> None:
    """The machine's own unit unmounts within its memory limit; it is killed if that is full."""
    started: list[tuple[str, Any, bool]] = []
    start, root = host.fake.systemd.start_transient, host.state / "tasks" / "web"

    def seen(unit: str, properties: Any) -> None:
        started.append((unit, properties, root.exists()))
        start(unit, properties)

    host.fake.systemd.start_transient = seen  # type: ignore[method-assign]
    async with host.agent() as client:
        await client.put_task("web", a_machine(image=image))
        await running(client, "web")
        await client.delete_task("web")
        await gone(client, "web")

    (_, own, _), (name, properties, is_before) = started
    (command,) = properties["ExecStart"]
    (in_unit,) = own["ExecStopPost"]
    assert (name, properties["Slice"], is_before) == (
        "twine-step-web.service",
        "system.slice",
        True,
    )
    assert command == ["/bin/sh", "-c", *in_unit[5:]]
    assert command[3:5] == ["sh", f"{host.config.run_dir}/machines/web"]
    assert "MemoryMax" not in properties
    assert host.fake.systemd.units("twine-step-*") == []


@pytest.mark.behaviour("AG4")
async def test_a_task_that_cannot_be_a_machine_is_refused_with_every_reason(
    host: FakeHost, image: str
) -> None:
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=r"command: .*; network\.mode: .*private"):
            await client.put_task("web", a_machine(command=["/bin/x"], network=Network()))
        host.give_image(OTHER_IMAGE)
        with pytest.raises(Unprocessable, match=r"has no init .* no /usr/lib/systemd/systemd"):
            await client.put_task("web", a_machine(image=OTHER_IMAGE))
        with pytest.raises(Unprocessable, match="has a command"):
            await client.put_task("web", a_spec(command=[]))
        assert (await client.list_tasks()).tasks == []


@pytest.mark.behaviour("AG4")
async def test_containers_inside_are_a_machines_alone(host: FakeHost, image: str) -> None:
    """Other tasks are refused by name, and only nested machines get mounts for containers."""
    both = [Relaxation.OWN_INIT, Relaxation.NESTED]
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="relaxations: nested requires own-init"):
            await client.put_task("web", a_spec(relaxations=[Relaxation.NESTED]))
        await client.put_task("web", a_machine(image=image))
        await running(client, "web")
        assert ".nested" not in str(host.fake.systemd.properties(unit("web")))
        await client.put_task("web", a_machine(image=image, relaxations=both, generation=2))
        assert (await running(client, "web")).generation == 2
        assert "/.nested:/run/twine-nested" in str(host.fake.systemd.properties(unit("web")))


@pytest.mark.behaviour("F-84")
async def test_an_init_that_is_a_link_out_of_the_image_is_none(host: FakeHost) -> None:
    """The link would lead to the host's own init."""
    host.give_image(OTHER_IMAGE)
    root = host.state / "images" / OTHER_IMAGE.removeprefix("sha256:")
    (root / "usr").mkdir()
    (root / "usr/lib").symlink_to("/usr/lib")
    (root / "lib").symlink_to("/lib")
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="has no init"):
            await client.put_task("web", a_machine(image=OTHER_IMAGE))


@pytest.mark.behaviour("AG4")
async def test_an_operator_switches_it_off_for_a_host(host: FakeHost, image: str) -> None:
    """The host loses the capability, so no control plane sends one. The agent refuses requests."""
    host.config = replace(host.config, own_init=False)
    async with host.agent() as client:
        assert not {"own-init", "nested"} & {*(await client.get_machine()).capabilities}
        with pytest.raises(Unprocessable, match=r"own-init is off .* own_init = false"):
            await client.put_task("web", a_machine(image=image))


@pytest.mark.behaviour("AG4")
async def test_a_host_without_nspawn_reports_it_and_accepts_no_such_task(
    host: FakeHost, image: str
) -> None:
    """Other tasks are still accepted."""
    async with host.agent() as client:
        assert {"own-init", "nested"} < {*(await client.get_machine()).capabilities}
        host.fake.lacking.add(NSPAWN)
        assert "own-init" not in (await client.get_machine()).capabilities
        with pytest.raises(Unprocessable, match="which this host lacks"):
            await client.put_task("web", a_machine(image=image))
        await client.put_task("plain", a_spec())
        assert (await running(client, "plain")).state is TaskState.RUNNING
        assert "--boot" not in str(host.fake.systemd.properties(unit("plain"))["ExecStart"])
