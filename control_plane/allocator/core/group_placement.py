"""Places the equal tasks of one group: each in the first bins of the order that have room."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from control_plane.allocator.core.bin_order import BinOrder, bin_order, first_bins
from control_plane.allocator.core.bin_source import Source
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.draft import Draft
from control_plane.allocator.core.feasibility import admits_any_of
from control_plane.allocator.core.machine_pools import Binned, Machine, Part
from control_plane.allocator.core.machine_search import Search
from control_plane.allocator.core.partition import Bins, Partition
from control_plane.allocator.core.request import Allowance

STEP = 500
"""Tasks that are placed between two checkpoints of the loop."""


class GroupPlacement:
    """One pass over the bins for the tasks of a group; it changes the draft."""

    def __init__(
        self, draft: Draft, search: Search, tasks: list[int], own: Binned, free: Binned
    ) -> None:
        """`own` and `free` are the machines of the entitlement and the free ones, by bins."""
        self._draft, self._search, self._tasks = draft, search, tasks
        self._own, self._free = own, free
        self._sources: dict[Bins, Source] = {}
        self._ahead: list[Bins] = []
        """Bins with too many tasks, until the emptiest bins have more."""
        self._placed = 0

    def steps(self) -> Generator[None, None, list[int]]:
        """Place the tasks; the value is those for which no machine was found."""
        search, tasks = self._search, self._tasks
        growing = 0 if self._draft.taken else 1
        new = self._begin(growing)
        done = self._placed = len(new)
        if done == len(tasks) and search.group is self._draft.request.groups[-1]:
            return []
        order = self._order(new, growing)
        while self._placed < len(tasks) and order.bins is not None:
            if self._placed - done >= STEP:
                done = self._placed
                yield
            if search.is_simple:
                self._placed += self._place_quickly(tasks[self._placed : done + STEP], order)
                if self._placed == len(tasks) or self._placed - done >= STEP:
                    continue
            if (bins := order.bins) is None or self._is_skipped(bins, order):
                continue
            machine = self._pick(bins, order)
            if machine is not None:
                self._put(machine, bins, order)
            elif bins in self._sources and self._sources[bins].paused:
                yield
        return tasks[self._placed :]

    def _order(self, new: list[tuple[Bins, Machine]], growing: int) -> BinOrder:
        """Return the order of the bins after the first tasks were placed."""
        draft, search = self._draft, self._search
        order = bin_order(draft.ranking, self._own, self._free, draft.first_bin, growing=growing)
        for bins, machine in new:
            draft.ranking.count_task_in(bins, machine)
            order.placed()
        draft.taken_by_bucket = {}
        for taken in draft.change.takes:
            draft.taken_by_bucket.setdefault(taken.bucket, []).append(taken)
        if draft.ranking.bounded:
            free = _usable_bins(self._free, search, draft.allowance)
            draft.ranking.compare_bins((*_usable_bins(self._own, search), *free))
        return order

    def _is_skipped(self, bins: Bins, order: BinOrder) -> bool:
        """Return whether a limit of the job excludes the first bins; if so, drop them."""
        ranking = self._draft.ranking
        if ranking.capped and ranking.at_most_reached(bins) is not None:
            order.drop()
            return True
        if ranking.bounded and ranking.max_skew_reached(bins) is not None:
            self._ahead.append(bins)
            order.drop()
            return True
        return False

    def _pick(self, bins: Bins, order: BinOrder) -> Machine | None:
        """Return the best machine of the first bins. Without one, change the order, unless the
        source only paused.
        """
        source, growing = self._sources.get(bins), order.growing
        if source is None:
            own = self._own.get(bins, ())
            machine = None if growing else self._search.first_empty(self._draft, own)
            if machine is not None:
                return machine
            free = self._free.get(bins, ())
            source = self._sources[bins] = Source(self._draft, self._search, own, free)
        machine = source.pick_last() if growing else source.pick()
        if source.paused:
            return None
        if machine is None and not growing and (bins in self._free or source.has_reserved):
            order.take_later()
        elif machine is None:
            order.drop()
        return machine

    def _put(self, machine: Machine, bins: Bins, order: BinOrder) -> None:
        """Place the next task on a machine."""
        draft, ranking = self._draft, self._draft.ranking
        floors = ranking.floors() if self._ahead else []
        self._claim(self._tasks[self._placed], machine, bins)
        if bins in self._sources:
            self._sources[bins].offer_again(machine)
        order.placed()
        if self._ahead and ranking.floors() != floors:  # the emptiest bin caught up
            for waiting in self._ahead:
                order.add(waiting)
            self._ahead.clear()
        if ranking.counts_machines and machine not in draft.with_own_bins:
            order.add(draft.give_own_bins(machine, self._own))
        self._placed += 1

    def _place_quickly(self, tasks: list[int], order: BinOrder) -> int:
        """Place tasks while the first machine of each bin fits; return how many.

        Most tasks are placed here, so this is one loop with as few calls as possible.
        """
        draft, search = self._draft, self._search
        demand = search.demand
        if draft.moving or demand.ports or demand.gpus:
            return 0
        tasks_on, rooms, single_tasks = draft.tasks_on, draft.planned_rooms, draft.single_tasks
        claims, quick_fit = draft.change.claims, search.quick_fit
        count_task_in = draft.ranking.count_task_in
        own, sources = self._own, self._sources
        assert isinstance(own, Partition)
        orders = own.orders(demand, draft.totals)
        placed, powered = 0, draft.power is not None
        for task in tasks:
            if (bins := order.bins) is None or bins in sources:
                break
            kinds = orders.get(bins)
            if kinds is None:
                kinds = orders[bins] = search.bucket_order(own.get(bins, ()))
            machine = quick_fit(draft, kinds)
            if machine is None:
                break
            if powered:
                draft.reserve_power(machine)
            tasks_on[machine] = 1
            count_task_in(bins, machine)
            if machine in rooms:
                rooms[machine].take(demand, machine.capacity)
            else:
                single_tasks[machine] = demand
            claims.append(Claim(task, machine, demand))
            order.placed()
            placed += 1
        return placed

    def _begin(self, growing: int) -> list[tuple[Bins, Machine]]:
        """Place the first tasks of a new job, while the first machines of their bins fit.

        Return their bins and machines. The bins are known beforehand, so no order is needed. Most
        new jobs are placed by this method alone.
        """
        draft, search = self._draft, self._search
        demand, claims, quick_fit = search.demand, draft.change.claims, search.quick_fit
        found: list[tuple[Bins, Machine]] = []
        if not search.is_simple or demand.ports or demand.gpus or draft.power is not None:
            return found
        if draft.tasks_on or draft.planned_rooms or draft.moving:
            return found
        own = self._own
        in_turn = first_bins(draft.ranking, own, self._free, draft.first_bin, growing=growing)
        if not in_turn:
            return found
        assert isinstance(own, Partition)
        orders = own.orders(demand, draft.totals)
        for task, bins in zip(self._tasks, in_turn, strict=False):
            kinds = orders.get(bins)
            if kinds is None:
                kinds = orders[bins] = search.bucket_order(own[bins])
            machine = quick_fit(draft, kinds)
            if machine is None:
                break
            claims.append(Claim(task, machine, demand))
            found.append((bins, machine))
        for _, machine in found:
            draft.tasks_on[machine] = 1
            draft.single_tasks[machine] = demand
        return found

    def _claim(self, task: int, machine: Machine, bins: Bins) -> None:
        draft, demand = self._draft, self._search.demand
        draft.tasks_on[machine] = draft.tasks_on.get(machine, 0) + 1
        draft.ranking.count_task_in(bins, machine)
        moving = draft.moving.get(task) if draft.moving else None
        if moving is not None:
            if moving.machine is machine:  # no other machine is better
                return
            draft.free_claim(moving)
        ports = None
        if demand.ports or machine in draft.planned_rooms or machine in draft.single_tasks:
            planned_room = draft.planned_room(machine)
            planned_room.take(demand, machine.capacity)
            ports = planned_room.pick_ports(demand.ports) if demand.ports else None
        else:
            draft.single_tasks[machine] = demand
        draft.reserve_power(machine)
        draft.change.claims.append(Claim(task, machine, demand, ports))


def _usable_bins(
    binned: Binned, search: Search, allowance: Allowance | None = None
) -> Iterator[Bins]:
    """Yield the bins in which a machine could run the tasks, full or not.

    With an `allowance`, only machines count that the entitlement may take.
    """
    for bins, parts in binned.items():
        if any(_has_suitable_machine(part, search, allowance) for part in parts):
            yield bins


def _has_suitable_machine(part: Part, search: Search, allowance: Allowance | None) -> bool:
    if not admits_any_of(search.demand, part):
        return False
    for machine in part.usable():
        if allowance is not None and allowance.lacks(machine):
            return False  # the same holds for all machines of this bucket
        if search.could_run(machine):
            return True
    return False
