"""A task with a network of its own, on a machine in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import FakeHost, a_spec, gone, running, until

from agent.api import Network, NetworkMode, TaskState
from agent.machine.fake_network import FakeNetwork
from agent.netplan import TaskNet
from agent.network.networks import Networks, site_with
from agent.runtime.core.records import TaskRecord
from agent.runtime.offload import Lanes
from wire.errors import Unprocessable

PRIVATE = Network(mode=NetworkMode.PRIVATE)


async def test_a_private_task_has_addresses_while_it_lives_and_leaves_nothing(
    tmp_path: Path,
) -> None:  # P9
    host = FakeHost(tmp_path)
    host.give_image()
    network = host.fake.network
    async with host.agent() as client:
        await client.put_task("web", a_spec(network=PRIVATE))
        status = await running(client, "web")
        net = network.networks["web"]
        assert status.addresses == [net.address6, net.address4]

        await client.delete_task("web")
        await gone(client, "web")
    assert network.networks == {}
    assert network.allowed == []


@pytest.mark.behaviour("AG5")
async def test_a_restarted_agent_keeps_networks_of_tasks_and_removes_the_rest(
    tmp_path: Path,
) -> None:  # P9
    host = FakeHost(tmp_path)
    host.give_image()
    network = host.fake.network
    async with host.agent() as client:
        let_in = Network(mode=NetworkMode.PRIVATE, allow_from=["db"])
        await client.put_task("web", a_spec(network=let_in))
        before = (await running(client, "web")).addresses
    network.networks["unknown"] = TaskNet(
        task_id="unknown", namespace="/n", veth="tw1", address4="100.64.0.9", address6="fd74::9"
    )
    network.allowed = None

    async with host.serving() as (services, client):
        await services.networks.in_force.wait()
        assert (await running(client, "web")).addresses == before
    assert set(network.networks) == {"web"}
    assert [(n.task_id, n.allow_from) for n in network.allowed or []] == [("web", ["db"])]


async def test_a_task_that_returns_to_the_hosts_network_loses_its_private_network(
    tmp_path: Path,
) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        await client.put_task("web", a_spec(network=PRIVATE))
        await running(client, "web")
        await client.put_task("web", a_spec(generation=2))
        await until(client, "web", lambda s: s.state is TaskState.RUNNING and s.addresses == [])
    assert host.fake.network.networks == {}


async def test_a_network_that_cannot_be_made_prevents_the_start_and_is_reported(
    tmp_path: Path,
) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    host.fake.network.broken = "cannot ask twine-network.service: it is not there"
    async with host.agent() as client:
        await client.put_task("web", a_spec(network=PRIVATE))
        waiting = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)
        assert "it is not there" in waiting.reason
        assert any("firewall" in p for p in (await client.get_machine()).problems)
        assert host.units() == []
        host.fake.network.broken = ""
        await running(client, "web")


async def test_a_network_option_that_the_host_network_lacks_is_refused_with_the_field(
    tmp_path: Path,
) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=r"network\.egress_mbps needs a network of its own"):
            await client.put_task("web", a_spec(network=Network(egress_mbps=3)))


async def test_a_task_that_starts_before_the_agent_took_over_costs_no_other_its_permissions() -> (
    None
):
    network, lanes = FakeNetwork(), Lanes()
    site = site_with("fd74:7769::/32", "100.64.0.0/10", "", 7443)
    let_in = Network(mode=NetworkMode.PRIVATE, allow_from=["db"])
    specs = {"web": a_spec(network=let_in), "gone": a_spec(network=PRIVATE)}
    before = Networks(network, lanes, site)
    before.expect({}, [])
    await before.ensure(TaskRecord(task_id="web", spec=specs["web"]))
    await before.ensure(TaskRecord(task_id="unknown", spec=specs["gone"]))

    after = Networks(network, lanes, site)
    after.expect(specs, [])
    await after.ensure(TaskRecord(task_id="new", spec=a_spec(network=PRIVATE)))
    lanes.close()

    assert [(n.task_id, n.allow_from) for n in network.allowed or []] == [
        ("web", ["db"]),
        ("new", []),
    ]
    assert set(network.networks) == {"web", "new"}


@pytest.mark.behaviour("BUG-AG57")
async def test_a_restarted_agent_allows_the_addresses_that_tasks_have() -> None:
    """If the address of the host changed, the firewall would drop packets of running tasks."""
    network, lanes = FakeNetwork(), Lanes()
    site = site_with("fd74:7769::/32", "100.64.0.0/10", "", 7443)
    spec = a_spec(network=PRIVATE)
    before = Networks(network, lanes, site)
    before.expect({}, [])
    web = await before.ensure(TaskRecord(task_id="web", spec=spec))

    network.own = "10.77.0.12"
    after = Networks(network, lanes, site)
    after.expect({"web": spec}, [])
    await after.adopt()
    assert [net.address6 for net in network.allowed or []] == web.addresses[:1]
    started = await after.ensure(web)
    lanes.close()
    assert started.addresses[0] == network.networks["web"].address6 != web.addresses[0]
