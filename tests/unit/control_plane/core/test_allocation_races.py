"""Real threads that allocate for different jobs on few machines (optimistic concurrency)."""

import random
import sys
import threading
from collections.abc import Callable

import pytest
from regions import FREE, GIB, POOL, Allowance, RegionIndex, a_request, add, check, plan, state

from control_plane.core.feasibility import Demand
from control_plane.core.region_index import Change

THREADS = 8
ROUNDS = 150
DEMANDS = [Demand(GIB, cpus=1), Demand(2 * GIB, cpus=0.3, ports=("http",)), Demand(GIB, rru=0.7)]


class Race:
    """Workers on one index; every change that is reserved is known until it is over."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index = RegionIndex(self.lock)
        for msb in range(4):
            add(self.index, f"a{msb} b{msb}", f"msb{msb}")
            add(self.index, f"f{msb}", f"msb{msb}", pool=FREE)
        self.conflicts = 0
        self.settled = 0
        self.failures: list[BaseException] = []
        self.barrier = threading.Barrier(THREADS)
        self.over = threading.Event()

    def watch(self) -> None:
        """Look at all machines under the lock, again and again: none is over its capacity."""
        while not self.over.is_set():
            with self.lock:
                for machine in self.index.machines.values():
                    capacity = machine.capacity
                    assert 0 <= machine.free_memory <= capacity.memory_bytes
                    assert -1e-6 <= machine.free_rru <= capacity.rru

    def work(self, number: int) -> None:
        rnd = random.Random(number)
        for turn in range(ROUNDS):
            job, pool = f"job{number}", POOL if number % 4 else "e2"
            demand, tasks = rnd.choice(DEMANDS), rnd.choice([0, 3, 6, 12])
            request = a_request(tasks, job, pool, demand)
            if turn % 10 == 0:
                self.barrier.wait(10)
            for _ in range(50):
                made = plan(self.index, request, Allowance(machines=rnd.choice([0, 2])))
                if turn % 10 == 0:
                    self.barrier.wait(10)  # all have planned before any reserves
                if not self.index.reserve(made.change):
                    self.finish(made.change, rnd)
                    break
                self.conflicts += 1
                if turn % 10 == 0:
                    break
        made = plan(self.index, a_request([], f"job{number}", POOL), Allowance(machines=0))
        assert self.index.reserve(made.change) == ()
        self.index.settle(made.change)

    def finish(self, change: Change, rnd: random.Random) -> None:
        if rnd.random() < 0.2:
            self.index.rollback(change)
            return
        self.index.settle(change)
        self.settled += 1

    def run(self) -> None:
        watcher = threading.Thread(target=self.guarded(self.watch))
        workers = [threading.Thread(target=self.guarded(self.work, n)) for n in range(THREADS)]
        for thread in (watcher, *workers):
            thread.start()
        for worker in workers:
            worker.join(60)
        self.over.set()
        watcher.join(10)
        assert self.failures == []

    def guarded(self, call: Callable[..., None], *arguments: int) -> Callable[[], None]:
        def run() -> None:
            try:
                call(*arguments)
            except BaseException as e:
                self.failures.append(e)
                self.barrier.abort()

        return run


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_no_machine_is_oversubscribed_by_workers_that_race(frequent_switches):  # AL11 MO9
    race = Race()
    race.run()
    index = race.index
    check(index)
    assert race.conflicts > 0
    assert race.settled > THREADS * ROUNDS / 4
    assert index.claims == {}
    for machine in list(index.machines.values()):
        assert not machine.jobs
        index.put(machine.name, machine.capacity, machine.place, machine.name[0], "")
    fresh = Race().index
    for machine in list(fresh.machines.values()):
        fresh.put(machine.name, machine.capacity, machine.place, machine.name[0], "")
    assert state(index) == state(fresh)


def test_of_plans_for_the_same_room_one_is_carried_out(frequent_switches):  # AL11
    index = RegionIndex(threading.Lock())
    add(index, "m1")
    demand = Demand(3 * GIB, cpus=1)
    barrier, won = threading.Barrier(THREADS), []

    def work(number: int) -> None:
        made = plan(index, a_request(1, f"job{number}", demand=demand), Allowance(machines=0))
        assert made.unplaced == ()
        barrier.wait(10)
        if not index.reserve(made.change):
            index.settle(made.change)
            won.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(won) == 1
    check(index)
