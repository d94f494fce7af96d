"""A shard is added under load, and `twinectl status` shows it: real processes on a real etcd."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.maintenance import MaintenanceRequest
from control_plane.client import ControlPlaneClient
from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import RegionOfProcesses, region_of_processes
from vm_lab.fleet import FleetHost
from wire.errors import Conflict, TwineError


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with etcd_cluster(1) as cluster:
        yield cluster


async def twinectl(region: RegionOfProcesses, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    run = "from control_plane.cli import main; main()"
    argv = (sys.executable, "-c", run, "--endpoint", f"unix:{region.socket}")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, *arguments, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, (out + err).decode()


@pytest.mark.behaviour("SH2", "SH14", "FE2", "FE3")
async def test_a_shard_is_added_under_load_without_a_failed_request(
    one: Cluster, tmp_path: Path
) -> None:
    """Clients send requests constantly; the new shard gets the next entitlement."""
    async with region_of_processes(tmp_path, one, 2) as region:
        await region.join(4)
        image = await region.image()
        await region.client.put_entitlement("a", EntitlementSpec(machines=2, host_profile="web"))
        await region.run("a1", "a", 2, image)
        assert (await region.client.list_shards()).shards[0].entitlements == ["a"]
        before, failed, requests = region.started(), list[TwineError](), 0
        ends = asyncio.Event()

        async def ask() -> None:
            nonlocal requests
            async with ControlPlaneClient(f"unix:{region.socket}") as client:
                while not ends.is_set():
                    try:
                        assert (await client.get_job("a1")).record.name == "a1"
                        assert len((await client.list_jobs()).jobs) >= 1
                        assert len((await client.list_machines()).machines) == 4
                        requests += 3
                    except TwineError as e:
                        failed.append(e)
                    await asyncio.sleep(0.01)

        requesting = asyncio.create_task(ask())
        adding = asyncio.create_task(twinectl(region, "shard", "add", "2", "--timeout", "3m"))
        await asyncio.to_thread(region.write_credential, 2)
        region.made("shard2", "shard", 2).start()
        code, output = await adding
        assert (code, "shard 2 is ready" in output) == (0, True), output
        for number, name in enumerate(("b", "c"), 1):
            spec = EntitlementSpec(machines=1, host_profile="web")
            await region.client.put_entitlement(name, spec)
            planned = await region.client.plan_job(job(f"{name}1", name, image))
            assert planned.wanted == 1, "an entitlement that has no shard yet can be planned"
            await region.run(f"{name}1", name, 1, image)
            loads = (await region.client.list_shards()).shards
            assert loads[number].entitlements == [name], "the least loaded one that is ready"
        planned = await region.client.plan_job(job("c2", "c", image))
        assert (planned.wanted, len(planned.placed)) == (1, 1), "the remote shard plans"
        ends.set()
        await requesting
        assert failed == []
        assert requests > 0
        assert [unit for unit in region.started() if "a1" in unit] == before


@pytest.mark.behaviour("SH10", "AV7", "HC2")
async def test_status_and_metrics_show_each_process_and_unavailable_ones(
    one: Cluster, tmp_path: Path
) -> None:
    """Leader, term, its start, lag, store, CPU, memory, machines and tasks of each role."""
    async with region_of_processes(tmp_path, one, 3) as region:
        await region.join(3)
        image = await region.image()
        await region.entitle("e1", 2, 1)
        await region.run("j1", "e1", 2, image)
        found = await region.client.region_status()
        assert found.ok, found.troubles
        by_role = {of.role: of for of in found.processes}
        assert sorted(by_role) == ["core", "shard-1", "shard-2"]
        shard = by_role["shard-1"]
        assert (shard.machines, shard.jobs, shard.tasks) == (2, 1, 2)
        assert by_role["core"].machines == 1
        for of in found.processes:
            assert of.since is not None
            assert min(of.term, of.cpu_s, of.memory_bytes, of.revision) > 0
        assert 0.0 < shard.write_p50_s <= shard.write_p99_s
        assert len({of.term for of in found.processes}) == 3
        for gone, unplaced in ((2, 0), (3, 2)):
            held = [v.record.machine for v in (await region.client.list_machines()).machines]
            held.sort(key=lambda name: name not in {h.name for h in region.hosts if tasks_on(h)})
            request = MaintenanceRequest(machines=held[:gone], reason="racks")
            preview = await region.client.preview_plan("p1", request)
            assert [(of.job, of.there, of.unplaced) for of in preview.jobs] == [("j1", 2, unplaced)]
            assert not any("not searched" in note for note in preview.notes), (
                "the shard reported it"
            )
        with pytest.raises(Conflict, match="shards run in other processes"):
            await region.client.plan_rebalance()
        text = b"".join([chunk async for chunk in region.client.shard_metrics(1)]).decode()
        for line in (
            'twine_role_machines{role="shard-1"} 2.0',
            'twine_role_ready{role="shard-1"} 1.0',
            f'twine_role_term{{role="shard-1"}} {shard.term:.1f}',
            'twine_store_write_seconds{quantile="0.99"}',
            "process_cpu_seconds_total",
        ):
            assert line in text, line
        region.processes[1].end(signal.SIGKILL)

        async def is_named() -> bool:
            return any(
                trouble.startswith("shard-1: shard 1 is unavailable")
                for trouble in (await region.client.region_status()).troubles
            )

        await region.until(is_named, "status names the shard that is away")
        code, output = await twinectl(region, "status", "-o", "json")
        processes = {of["role"]: of for of in json.loads(output)["processes"]}
        assert code == 1
        assert [processes[role]["ok"] for role in sorted(processes)] == [True, False, True]
        assert processes["shard-1"]["host"] == shard.host


def tasks_on(host: FleetHost) -> bool:
    """Return whether a task was started on a host."""
    return any(unit.startswith("twine-task") for unit in host.machine.systemd.started)


def job(name: str, entitlement: str, image: str) -> JobSpec:
    """Return a job of one task."""
    return JobSpec(
        name=name,
        entitlement=entitlement,
        tasks=1,
        image=image,
        command=["/bin/serve"],
        limits=Limits(memory_max_bytes=64 << 20),
    )
