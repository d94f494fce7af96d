"""Best-effort work runs on loans, in turns by share, and restarts after a revocation."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from world import World, a_job, scenario

from agent.api import Exit, Limits, TaskState
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.elastic import Elastic, ElasticMode, ElasticSettings
from control_plane.api.jobs import JobSpec
from control_plane.api.opportunistic import QueuedState, QueuedWork, WorkQueue, WorkRequest
from control_plane.cli import main
from control_plane.optimus.core import choosing
from control_plane.optimus.core.choosing import choose_work, in_order, job_of
from control_plane.optimus.daemon import OptimusConfig, serve
from control_plane.optimus.service import LATE_S, Optimus
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import WORK
from wire.errors import Conflict, Forbidden, InvalidInput, NotFound, Unprocessable, Unreachable

pytestmark = pytest.mark.behaviour("EL8", "AP10")

INDEX = Path(__file__).parents[4] / "vm_lab/elastic/index.toml"
"""The index file of `make demo-elastic`."""
APPLY = ElasticSettings(mode=ElasticMode.APPLY, every_s=30, free_idle_s=60)
WHOLE = Limits(memory_max_bytes=800 << 20)


class FrontEnd:
    """The answers of the front end, without HTTP."""

    def __init__(self, world: World) -> None:
        cp = world.cp
        self.get_entitlement = cp.capacity.get_entitlement
        self.get_job, self.apply_job, self.stop_job = cp.get_job, cp.apply_job, cp.stop_job
        self._elastic = cp.elastic

    async def get_signal(self, entitlement: str):
        return self._elastic.signal(entitlement)


def request(name: str, tasks: int = 1, priority: int = 500, **changes) -> WorkRequest:
    job = a_job(tasks, name=name, entitlement="batch", limits=WHOLE, probe=None, **changes)
    return WorkRequest(job=job, priority=priority, attempts=2)


def work(name: str, user: str = "ann", tasks: int = 1, **changes) -> QueuedWork:
    values = {"priority": 500} | {k: changes.pop(k) for k in ("priority",) if k in changes}
    return QueuedWork(
        name=name, user=user, request=request(name, tasks, **values), submitted_at=0.0, **changes
    )


async def an_optimus(world: World, store: MemoryStore) -> Optimus:
    optimus = Optimus(world.runtime, FrontEnd(world), store, "batch", {}, ahead=2)
    await optimus.load()
    return optimus


async def lent_region(world: World) -> None:
    await world.set_up(quota=3)
    spec = EntitlementSpec(machines=0, host_profile="batch", elastic=Elastic(borrow=3))
    await world.cp.capacity.put_entitlement("batch", spec)
    await world.until(lambda: world.cp.elastic._lender.has_surveyed)


async def until(world: World, optimus: Optimus, condition, within_s: float = 900) -> None:
    ends = world.runtime.now() + within_s
    while not condition():
        assert world.runtime.now() < ends, optimus.queue()
        await optimus.run_round()
        await world.runtime.sleep(5)


def states(optimus: Optimus) -> dict[str, QueuedState]:
    return {one.name: one.state for one in optimus.queue().work}


def ends(world: World, task: str, result: str = "success") -> None:
    """End a task without a command, on any machine."""
    for machine in world.region.machines.values():
        if task in machine.tasks:
            machine.report(
                task,
                state=TaskState.STOPPED,
                last_exit=Exit(result=result, code=0, at=world.runtime.date()),
            )


async def healthy(world: World, name: str) -> int:
    return (await world.cp.get_job(name)).running


@scenario(elastic=APPLY)
async def test_work_runs_on_loans_and_is_done_when_its_tasks_end(world: World) -> None:
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index", 2), "ann")
        await until(world, optimus, lambda: world.cp.elastic.signal("batch").machines == 2)
        await world.until(lambda: is_running(world, "index", 2), 300)
        ends(world, "index-0")
        ends(world, "index-1")
        await until(world, optimus, lambda: states(optimus)["index"] is QueuedState.DONE)
        await world.until(lambda: not world.cp.elastic.report().loans, 600)  # no loan remains


@pytest.mark.behaviour("BUG-UX135")
@scenario(elastic=APPLY)
async def test_capacity_is_not_full_while_work_has_no_machine(world: World) -> None:
    """The region reports a shortage only after the round that starts the work."""
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.run_round()
        assert optimus.queue().capacity == "full"
        await optimus.submit("index", request("index", 2), "ann")
        assert optimus.queue().capacity == "absent"
        await optimus.run_round()
        assert optimus.queue().capacity == "absent"
        await until(world, optimus, lambda: optimus.queue().capacity == "full")
        assert len(optimus._placed["index"]) == 2
        await optimus.submit("more", request("more", 1), "ann")
        assert optimus.queue().capacity == "short"


@pytest.mark.behaviour("BUG-UX137")
@scenario(elastic=APPLY)
async def test_no_capacity_is_reported_while_rounds_fail(world: World) -> None:
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        rounds = asyncio.create_task(optimus.run())
        await world.until(lambda: optimus.queue().capacity == "full")
        await world.cp.capacity.delete_entitlement("batch")
        await world.until(lambda: optimus.queue().failing)
        assert optimus.queue().capacity == ""
        rounds.cancel()


async def is_running(world: World, name: str, tasks: int) -> bool:
    return await healthy(world, name) == tasks


@scenario(elastic=APPLY)
async def test_an_owner_comes_first_and_the_work_runs_again_afterwards(world: World) -> None:
    """The guaranteed job gets its machines within the promise. The work has not failed."""
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index", 3), "ann")
        await until(world, optimus, lambda: world.cp.elastic.signal("batch").machines == 3)
        await world.until(lambda: is_running(world, "index", 3), 300)
        requested_at = world.runtime.now()
        await world.cp.apply_job(a_job(3, limits=WHOLE))
        await world.stable("web", 400)
        assert world.runtime.now() - requested_at <= 300
        await optimus.run_round()
        assert states(optimus) == {"index": QueuedState.RUNNING}
        await world.cp.stop_job("web")
        await until(world, optimus, lambda: world.cp.elastic.signal("batch").machines == 3, 1800)
        await world.until(lambda: is_running(world, "index", 3), 300)
        assert optimus.queue().work[0].failures == 0


@scenario(elastic=APPLY)
async def test_failed_work_is_retried_a_bounded_number_of_times(world: World) -> None:
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index"), "ann")
        for state in (QueuedState.WAITING, QueuedState.FAILED):
            await until(world, optimus, lambda: "index-0" in str(world.region.where()))
            await world.until(lambda: is_running(world, "index", 1), 300)
            ends(world, "index-0", "exit-code")
            wanted = state
            await until(world, optimus, lambda wanted=wanted: states(optimus)["index"] is wanted)
        (one,) = optimus.queue().work
        assert (one.failures, one.reason) == (2, "task 0: exit-code")


@pytest.mark.behaviour("BUG-UX140")
@scenario(elastic=APPLY)
async def test_the_queue_outlives_the_process_and_a_name_is_taken_once(world: World) -> None:
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        made = await optimus.submit("index", request("index"), "ann")
        assert await optimus.submit("index", request("index"), "ann") == made
        with pytest.raises(Conflict, match="of ann"):
            await optimus.submit("index", request("index"), "bob")
        with pytest.raises(Conflict, match="of ann: waiting") as refused:
            await optimus.submit("index", request("index", priority=501), "ann")
        assert "twinectl work cancel index" in refused.value.hint
        await optimus.run_round()
        again = await an_optimus(world, store)
        assert states(again) == {"index": QueuedState.RUNNING}
        await again.cancel("index")
        assert again.queue().work == []


@pytest.mark.behaviour("BUG-UX96")
@scenario(elastic=APPLY)
async def test_a_job_that_only_has_the_name_of_work_is_left_alone(world: World) -> None:
    """A restart of twine-optimus stopped the job of another entitlement."""
    await lent_region(world)
    await world.cp.apply_job(a_job(1, name="index"))
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index"), "ann")
        await optimus.run_round()
        (waiting,) = optimus.queue().work
        assert waiting.state is QueuedState.WAITING
        assert waiting.reason == "entitlement front has a job index: the name is taken"
        again = await an_optimus(world, store)
        await again.run_round()
        record = (await world.cp.get_job("index")).record
        assert (record.spec.entitlement, record.stopping) == ("front", False)


@pytest.mark.behaviour("BUG-UX98")
@scenario(elastic=APPLY)
async def test_a_job_that_is_made_while_work_of_its_name_starts_is_left_alone(world: World) -> None:
    """A job that was created between Optimus' check and its write was changed."""
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index"), "ann")
        create = optimus._api.apply_job

        async def late(spec: JobSpec, *, is_new: bool = False):
            await world.cp.apply_job(a_job(1, name="index", entitlement="front"))
            return await create(spec, is_new=is_new)

        optimus._api.apply_job = late
        await optimus.run_round()
        (waiting,) = optimus.queue().work
        assert waiting.state is QueuedState.WAITING
        assert "there is a job 'index' already, in entitlement front" in waiting.reason
        assert (await world.cp.get_job("index")).record.spec.entitlement == "front"


@pytest.mark.behaviour("BUG-UX96")
@scenario(elastic=APPLY)
async def test_a_job_that_took_the_name_of_running_work_is_left_alone(world: World) -> None:
    """Canceling the work stopped the job of another entitlement."""
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index"), "ann")
        await optimus.run_round()
        assert states(optimus) == {"index": QueuedState.RUNNING}
        await world.cp.move_job("index", "front")
        await optimus.run_round()
        assert states(optimus) == {"index": QueuedState.WAITING}
        await optimus.cancel("index")
        record = (await world.cp.get_job("index")).record
        assert (record.spec.entitlement, record.stopping) == ("front", False)


class HeldUp:
    """Delays one call of a front end until `answer` is set."""

    def __init__(self, front: FrontEnd, call: str) -> None:
        self.requested, self.answer = asyncio.Event(), asyncio.Event()
        self._call = getattr(front, call)
        setattr(front, call, self)

    async def __call__(self, *given, **named):
        self.requested.set()
        await self.answer.wait()
        return await self._call(*given, **named)


async def cancelled_during(world: World, call: str) -> None:
    """Cancel work while a round waits for the answer to a call."""
    await lent_region(world)
    async with MemoryStore() as store:
        front = FrontEnd(world)
        optimus = Optimus(world.runtime, front, store, "batch", {}, ahead=2)
        await optimus.load()
        await optimus.submit("index", request("index"), "ann")
        held = HeldUp(front, call)
        round_task = asyncio.create_task(optimus.run_round())
        await held.requested.wait()
        cancelling = asyncio.create_task(optimus.cancel("index"))
        await asyncio.sleep(1)
        held.answer.set()
        await asyncio.gather(round_task, cancelling)
        await optimus.run_round()
        assert optimus.queue().work == []
        await world.until(lambda: is_gone(world, "index"), 300)


@pytest.mark.behaviour("BUG-CP74")
@scenario(elastic=APPLY)
async def test_work_that_is_cancelled_during_a_round_does_not_come_back(world: World) -> None:
    """The round wrote the work again as running."""
    await cancelled_during(world, "get_job")


@pytest.mark.behaviour("BUG-CP74")
@scenario(elastic=APPLY)
async def test_work_that_is_cancelled_while_it_starts_leaves_no_job(world: World) -> None:
    """Its job kept running without a record, so it was never stopped."""
    await cancelled_during(world, "apply_job")


async def is_gone(world: World, name: str) -> bool:
    try:
        return (await world.cp.get_job(name)).record.stopping
    except NotFound:
        return True


@pytest.mark.behaviour("BUG-CP74")
@scenario(elastic=APPLY)
async def test_two_users_that_claim_a_name_at_once_do_not_share_it(world: World) -> None:
    """The second request replaced the work of the first. Both users were informed of a wait."""
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        found = await asyncio.gather(
            *(optimus.submit("index", request("index"), user) for user in ("ann", "bob")),
            return_exceptions=True,
        )
        assert [type(one) for one in found] == [QueuedWork, Conflict]
        assert [one.user for one in optimus.queue().work] == ["ann"]


@pytest.mark.behaviour("BUG-CP75")
@scenario(elastic=APPLY)
async def test_work_that_may_not_run_delays_no_other_work(world: World) -> None:
    """The error of the first work ended each round, and no later work was started."""
    await lent_region(world)
    async with MemoryStore() as store:
        front = FrontEnd(world)
        apply = front.apply_job

        async def refusing(spec: JobSpec, *, is_new: bool = False):
            if spec.name == "bad":
                raise Forbidden("optimus is not a host admin")
            return await apply(spec, is_new=is_new)

        front.apply_job = refusing
        optimus = Optimus(world.runtime, front, store, "batch", {}, ahead=2)
        await optimus.load()
        await optimus.submit("bad", request("bad"), "ann")
        await optimus.submit("good", request("good"), "ann")
        await optimus.run_round()
        assert states(optimus) == {"bad": QueuedState.WAITING, "good": QueuedState.RUNNING}
        assert [one.reason for one in optimus.queue().work if one.name == "bad"] == [
            "optimus is not a host admin"
        ]


@pytest.mark.behaviour("BUG-CP98")
@pytest.mark.parametrize("during", ["get_job", "apply_job"])
def test_a_start_that_comes_through_late_leaves_no_unfollowed_job(during: str) -> None:
    """The front end's answer timed out; the job appears after Optimus looked for it."""

    @scenario(elastic=APPLY)
    async def late(world: World) -> None:
        await lent_region(world)
        async with MemoryStore() as store:
            front = FrontEnd(world)
            apply, get_job, sent = front.apply_job, front.get_job, list[JobSpec]()

            async def times_out(spec: JobSpec, *, is_new: bool = False):
                if during == "apply_job" and sent:
                    await apply(sent.pop(), is_new=True)
                    return await apply(spec, is_new=is_new)
                sent.append(spec)
                raise Unreachable("the front end did not answer in 30 s")

            async def not_yet(name: str):
                try:
                    return await get_job(name)
                finally:
                    if during == "get_job" and sent:
                        await apply(sent.pop(), is_new=True)

            front.apply_job = times_out
            optimus = Optimus(world.runtime, front, store, "batch", {}, ahead=2)
            await optimus.load()
            await optimus.submit("index", request("index", 1), "ann")
            with pytest.raises(Unreachable):
                await optimus.run_round()
            front.get_job = not_yet
            await optimus.run_round()
            front.apply_job = apply
            assert await is_gone(world, "index") or states(optimus)["index"] is QueuedState.RUNNING
            await until(world, optimus, lambda: world.cp.elastic.signal("batch").machines == 1)
            await world.until(lambda: is_running(world, "index", 1), 300)
            ends(world, "index-0")
            await until(world, optimus, lambda: states(optimus)["index"] is QueuedState.DONE)
            await world.until(lambda: is_gone(world, "index"), 300)

    late()


@pytest.mark.behaviour("BUG-CP119")
@pytest.mark.parametrize("restarts", [False, True])
def test_work_cancelled_before_its_late_start_leaves_no_job(restarts: bool) -> None:
    """The start timed out, the user cancelled, and then the front end made the job."""

    @scenario(elastic=APPLY)
    async def late(world: World) -> None:
        await lent_region(world)
        async with MemoryStore() as store:
            front, sent = FrontEnd(world), list[JobSpec]()
            apply = front.apply_job

            async def times_out(spec: JobSpec, *, is_new: bool = False):
                sent.append(spec)
                raise Unreachable("the front end did not answer in 30 s")

            front.apply_job = times_out
            optimus = Optimus(world.runtime, front, store, "batch", {}, ahead=2)
            await optimus.load()
            await optimus.submit("index", request("index", 1), "ann")
            with pytest.raises(Unreachable):
                await optimus.run_round()
            await optimus.cancel("index")
            assert optimus.queue().work == []
            with pytest.raises(NotFound):
                await optimus.cancel("index")
            with pytest.raises(Conflict, match="may still come through"):
                await optimus.submit("index", request("index", 1), "ann")
            if restarts:
                optimus = await an_optimus(world, store)
            await optimus.run_round()
            await apply(sent.pop(), is_new=True)
            front.apply_job = apply
            await optimus.run_round()
            await world.until(lambda: is_gone(world, "index"), 300)
            await world.runtime.sleep(LATE_S)
            await optimus.run_round()
            assert (await store.list_prefix(WORK)).entries == ()
            assert (await optimus.submit("index", request("index", 1), "ann")).name == "index"

    late()


@pytest.mark.behaviour("BUG-CP119")
@scenario(elastic=APPLY)
async def test_work_whose_start_was_answered_can_be_submitted_again_at_once(world: World) -> None:
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        await optimus.submit("index", request("index"), "ann")
        await optimus.run_round()
        await optimus.cancel("index")
        assert (await store.list_prefix(WORK)).entries == ()
        assert (await optimus.submit("index", request("index"), "bob")).user == "bob"


@pytest.mark.behaviour("BUG-CP118")
@scenario(elastic=APPLY)
async def test_one_damaged_piece_of_work_stops_no_other(world: World) -> None:
    await lent_region(world)
    async with MemoryStore() as store:
        optimus = await an_optimus(world, store)
        for name in ("good", "bad"):
            await optimus.submit(name, request(name), "ann")
        await optimus.run_round()
        await store.txn({}, [Put(f"{WORK}bad", b"\x00 no record at all")])

        again = await an_optimus(world, store)
        assert states(again) == {"good": QueuedState.RUNNING}
        assert again.queue().damaged == ["bad"]
        with pytest.raises(Conflict, match="record of work 'bad' is damaged"):
            await again.submit("bad", request("bad"), "ann")
        await again.run_round()
        assert not await is_gone(world, "bad")
        await again.cancel("bad")
        assert again.queue().damaged == []
        await world.until(lambda: is_gone(world, "bad"), 300)
        assert (await an_optimus(world, store)).queue().damaged == []


@pytest.mark.behaviour("BUG-CP87")
def test_a_long_queue_is_sorted_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue was sorted for each chosen piece of work, which took seconds."""
    sorted_ = []

    def counted(*given):
        sorted_.append(given)
        return in_order(*given)

    monkeypatch.setattr(choosing, "in_order", counted)
    queue = [work(f"w{i:03}", f"user{i % 3}") for i in range(300)]
    start, stop = choose_work(queue, {"user1": 200}, 100, 0.0)
    assert (len(start), stop, len(sorted_)) == (100, [], 1)
    users = [one.user for one in queue if one.name in start]
    assert [users.count(f"user{i}") for i in range(3)] == [25, 50, 25]


@scenario(elastic=APPLY)
async def test_an_entitlement_with_its_own_machines_is_refused(world: World) -> None:
    await world.set_up(quota=3)
    async with MemoryStore() as store:
        optimus = Optimus(world.runtime, FrontEnd(world), store, "front", {}, ahead=2)
        with pytest.raises(Unprocessable, match="'front' is not only for best-effort work"):
            await optimus.run_round()


@pytest.mark.behaviour("BUG-UX119")
@scenario(elastic=APPLY)
async def test_a_job_file_of_another_entitlement_is_refused(world: World) -> None:
    """The file's entitlement was ignored, and the work ran in that of the queue."""
    optimus = await an_optimus(world, MemoryStore())
    other = WorkRequest(job=a_job(1, name="index", entitlement="front"))
    with pytest.raises(InvalidInput, match=r"job\.entitlement: 'front' is not 'batch'"):
        await optimus.submit("index", other, "ann")
    assert optimus.queue().work == []


def test_users_take_turns_by_their_shares_and_what_they_used() -> None:
    queue = [work(f"a{n}", "ann") for n in range(6)] + [work(f"b{n}", "bob") for n in range(6)]
    start, stop = choose_work(queue, {"bob": 200}, 6, 0.0)
    assert stop == []
    assert sum(name.startswith("b") for name in start) == 4
    used = [replace(queue[0], state=QueuedState.DONE, ended_at=0.0, machine_s=1000.0), *queue[1:]]
    assert in_order(used, {})[0].user == "bob"


def test_work_of_higher_priority_takes_the_place_of_lower_and_none_other_is_stopped() -> None:
    running = [work(f"r{n}", state=QueuedState.RUNNING) for n in range(2)]
    same = choose_work([*running, work("same")], {}, 2, 0.0)
    assert same == ([], [])
    start, stop = choose_work([*running, work("urgent", priority=900)], {}, 2, 0.0)
    assert start == ["urgent"]
    assert stop == ["r1"]


def test_work_that_failed_waits_and_large_work_is_begun_alone() -> None:
    assert choose_work([work("again", retry_at=60.0)], {}, 5, 0.0) == ([], [])
    assert choose_work([work("again", retry_at=60.0)], {}, 5, 60.0) == (["again"], [])
    assert choose_work([work("large", tasks=100)], {}, 5, 0.0) == (["large"], [])


def test_its_jobs_are_in_its_entitlement_and_do_not_restart_by_themselves() -> None:
    job: JobSpec = job_of(work("index"), "batch")
    assert (job.name, job.entitlement, job.restart.when) == ("index", "batch", "never")


def typed(socket: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["work", *arguments, "--socket", socket])


@pytest.mark.behaviour("EL8")
async def test_a_job_file_is_handed_in_as_it_is_written(tmp_path: Path) -> None:
    """The file is sent through the socket; times and sizes have units, as in `job apply`."""
    config = OptimusConfig(
        entitlement="batch",
        endpoint=f"unix:{tmp_path}/missing",
        state=f"{tmp_path}/state",
        socket=f"{tmp_path}/socket",
    )
    file, stopping = tmp_path / "index.toml", asyncio.Event()
    file.write_text(f'image = "sha256:{64 * "0"}"\n' + INDEX.read_text())
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('name = "x"\nstop_timeout_s = "soon"\n')
    serving = asyncio.create_task(serve(config, stopping))
    while not Path(config.socket).exists():
        await asyncio.sleep(0.01)
    refused = await asyncio.to_thread(typed, config.socket, "submit", str(wrong))
    assert refused.exit_code != 0
    assert "stop_timeout_s" in refused.output
    made = await asyncio.to_thread(typed, config.socket, "submit", str(file))
    assert made.exit_code == 0, made.output
    listed = await asyncio.to_thread(typed, config.socket, "list", "-o", "json")
    stopping.set()
    await serving
    job = msgspec.json.decode(listed.output, type=WorkQueue).work[0].request.job
    assert (job.name, job.stop_timeout_s, job.limits.memory_max_bytes) == ("index", 5.0, 16 << 20)
