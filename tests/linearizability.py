"""Checks whether one order of operations explains what clients of registers saw (Wing, Gong, Lowe).

A history has the calls and answers of many clients. It is linearizable if each operation can be
given one moment between its call and its answer. A register that does the operations in the order
of these moments must then give the same answers.

Keys are independent: each is checked alone. A write with an unknown outcome may have happened at
any moment after its call, or never.

J. M. Wing, C. Gong, "Testing and Verifying Concurrent Objects", 1993; G. Lowe, "Testing for
Linearizability", 2017: a state that was searched before (operations done, value) is not searched
again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class RegisterOperation:
    """One operation on one register. All times are of one clock, in any unit."""

    key: str
    kind: str
    """`read`, `write`, or `swap`: a write that happens only if the register has `expected`."""
    value: Any
    """The value that was read or is written."""
    called: float
    answered: float = NEVER
    """NEVER if the outcome is unknown. A read without an outcome is left out."""
    expected: Any = None
    refused: bool = False
    """The answer of the swap was that the register has another value."""


@dataclass
class Recorder:
    """Records the operations of clients, in any order of completion."""

    done: list[RegisterOperation] = field(default_factory=list)

    def add(self, operation: RegisterOperation) -> None:
        """Record one operation."""
        self.done.append(operation)


def violations_in(history: Iterable[RegisterOperation], initial: Any = None) -> list[str]:
    """Return the keys for whose operations no order exists."""
    by_key: dict[str, list[RegisterOperation]] = defaultdict(list)
    for operation in history:
        if operation.kind != "read" or operation.answered < NEVER:
            by_key[operation.key].append(operation)
    return sorted(key for key, of in by_key.items() if not _has_order(of, initial))


def _apply(operation: RegisterOperation, value: Any) -> tuple[bool, Any]:
    """Return whether an operation can happen at this value, and the value afterwards."""
    if operation.kind == "read":
        return operation.value == value, value
    if operation.kind == "write":
        return True, operation.value
    if operation.refused:
        return value != operation.expected, value
    return value == operation.expected, operation.value


def _has_order(operations: Sequence[RegisterOperation], initial: Any) -> bool:
    """Search depth first for an order. A bit set records which operations are done."""
    known = sum(1 << n for n, operation in enumerate(operations) if operation.answered < NEVER)
    stack, seen = [(0, initial)], {(0, initial)}
    while stack:
        done, value = stack.pop()
        if done & known == known:
            return True
        left = [n for n in range(len(operations)) if not done >> n & 1]
        first_answer = min(operations[n].answered for n in left)
        for n in left:
            if operations[n].called > first_answer:
                continue  # another operation was answered before the call of this one
            possible, after = _apply(operations[n], value)
            state = (done | 1 << n, after)
            if possible and state not in seen:
                seen.add(state)
                stack.append(state)
    return False
