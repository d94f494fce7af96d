"""A report causes rounds only for the jobs that it concerns."""

from msgspec.structs import replace
from world import World, a_job, scenario

from agent.api import Health


async def two_jobs_on_one_machine(w: World) -> list[str]:
    """Return a list that collects the jobs woken from now on."""
    await w.deployed(a_job(2), quota=1)
    await w.cp.apply_job(a_job(2, name="other"))
    await w.stable("other")
    woken: list[str] = []
    wake = w.cp.shards.all[0].scheduler._workers.wake

    def noted(job: str) -> None:
        woken.append(job)
        wake(job)

    w.cp.shards.all[0].scheduler._workers.wake = noted
    return woken


@scenario()
async def test_a_report_of_a_task_wakes_only_its_job(w: World) -> None:
    """On a machine with ten jobs, each report about one task caused ten rounds."""
    woken = await two_jobs_on_one_machine(w)
    (machine,) = {t.placement.machine for t in (await w.cp.get_job("web")).record.tasks}
    status = w.cp._observations.observation(machine).tasks["web-0"]
    w.cp._observations.saw_task(machine, replace(status, health=Health.UNHEALTHY))
    assert woken == ["web"]


@scenario()
async def test_a_report_of_a_machine_wakes_all_jobs_with_tasks_on_it(w: World) -> None:
    woken = await two_jobs_on_one_machine(w)
    (machine,) = {t.placement.machine for t in (await w.cp.get_job("web")).record.tasks}
    w.cp._observations.silent(machine)
    assert woken == ["other", "web"]


@scenario()
async def test_a_fetched_image_wakes_only_the_jobs_that_wait_for_it(w: World) -> None:
    woken = await two_jobs_on_one_machine(w)
    (machine,) = {t.placement.machine for t in (await w.cp.get_job("web")).record.tasks}
    w.cp.shards.all[0].scheduler._destinations._awaited[machine].add("other")
    w.cp._observations.image_came(machine, "sha256:" + "7" * 64)
    assert woken == ["other"]
