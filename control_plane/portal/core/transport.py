"""Decides whether every demand can be met from the supplies: a transport problem, solved exactly.

Sources are classes of equal machines; sinks are demands, each suited by some classes. Demands are
in machines or in RRU, and the RRU of a machine depend on its class. So this is a flow network with
gains. Flow is pushed along paths of the highest gain, as in K. Onaga, "Optimal flows in general
communication networks" (1967). Then no cycle of the residual network creates flow, and the flow is
maximal when no path is left. If all demands are in machines, every gain is 1, and this is the
algorithm of Edmonds and Karp in whole numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from fractions import Fraction

Amount = int | Fraction
_SLACK = 1 + 1e-12
"""Gains are compared as floats; amounts are exact."""


class FlowNetwork:
    """Nodes are numbers; flow along an arc arrives multiplied by its gain."""

    def __init__(self) -> None:
        """Make a network of the source (0) and the sink (1)."""
        self.arcs: list[list[int]] = [[], []]
        self._head: list[int] = []
        self._capacity: list[Amount | None] = []
        self._gain: list[Amount] = []
        self._weight: list[float] = []

    def node(self) -> int:
        """Return a new node."""
        self.arcs.append([])
        return len(self.arcs) - 1

    def arc(self, tail: int, head: int, capacity: Amount | None, gain: int = 1) -> int:
        """Add an arc with a capacity at its tail (None: unlimited), and return its number."""
        number = len(self._head)
        back = 1 if gain == 1 else Fraction(1, gain)
        rows: tuple[tuple[int, int, Amount | None, Amount], ...] = (
            (tail, head, capacity, gain),
            (head, tail, 0, back),
        )
        for at, to, space, factor in rows:
            self.arcs[at].append(len(self._head))
            self._head.append(to)
            self._capacity.append(space)
            self._gain.append(factor)
            self._weight.append(float(factor))
        return number

    def flow(self, number: int) -> Amount:
        """Return the flow along an arc, measured at its head."""
        back = self._capacity[number + 1]
        assert back is not None
        return back

    def push_all(self) -> Generator[None, None, None]:
        """Push the maximal flow from the source to the sink, path by path."""
        while (best := self._best_gains())[1] > 0:
            yield
            while (path := self._path(best)) is not None:
                self._push(path)
                yield

    def reachable(self, start: int) -> set[int]:
        """Return the nodes to which more flow could still go from a node, except via the sink."""
        reached, waiting = {start}, deque([start])
        while waiting:
            for number in self.arcs[waiting.popleft()]:
                head = self._head[number]
                if head not in reached and head != 1 and self._capacity[number] != 0:
                    reached.add(head)
                    waiting.append(head)
        return reached

    def reaching(self, targets: set[int]) -> set[int]:
        """Return the nodes from which more flow could still go to one of these nodes."""
        reached, waiting = set(targets), deque(targets)
        while waiting:
            node = waiting.popleft()
            for out in self.arcs[node]:
                tail, inward = self._head[out], out ^ 1
                if tail not in reached and self._capacity[inward] != 0:
                    reached.add(tail)
                    waiting.append(tail)
        return reached

    def _best_gains(self) -> list[float]:
        """Return by node the most that a unit of the source becomes there; 0: none arrives."""
        best = [0.0] * len(self.arcs)
        best[0] = 1.0
        waiting, is_waiting = deque([0]), {0}
        while waiting:
            node = waiting.popleft()
            is_waiting.discard(node)
            for number in self.arcs[node]:
                if self._capacity[number] == 0:
                    continue
                head, gain = self._head[number], best[node] * self._weight[number]
                if head != 0 and gain > best[head] * _SLACK:
                    best[head] = gain
                    if head != 1 and head not in is_waiting:
                        waiting.append(head)
                        is_waiting.add(head)
        return best

    def _path(self, best: list[float]) -> list[int] | None:
        """Return the arcs of a shortest path with the best gain, or None."""
        via = [-1] * len(self.arcs)
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for number in self.arcs[node]:
                head = self._head[number]
                if via[head] >= 0 or head == 0 or self._capacity[number] == 0:
                    continue
                if best[node] * self._weight[number] * _SLACK < best[head]:
                    continue
                via[head] = number
                if head == 1:
                    return self._arcs_to_sink(via)
                waiting.append(head)
        return None

    def _arcs_to_sink(self, via: list[int]) -> list[int]:
        path, node = [], 1
        while node != 0:
            path.append(via[node])
            node = self._head[via[node] ^ 1]
        return path[::-1]

    def _push(self, path: list[int]) -> None:
        amount: Amount | None = None
        gain_so_far: Amount = 1
        for number in path:
            capacity = self._capacity[number]
            if capacity is not None:
                limit = capacity if gain_so_far == 1 else capacity / Fraction(gain_so_far)
                amount = limit if amount is None else min(amount, limit)
            gain_so_far = gain_so_far * self._gain[number]
        assert amount is not None
        for number in path:
            arriving = amount * self._gain[number]
            self._change(number, -amount)
            self._change(number ^ 1, arriving)
            amount = arriving

    def _change(self, number: int, by: Amount) -> None:
        capacity = self._capacity[number]
        if capacity is not None:
            self._capacity[number] = capacity + by
