"""The checker of histories accepts answers that one register can give, and refuses others."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.linearizability import NEVER, RegisterOperation, violations_in


def read(value: object, called: float, answered: float) -> RegisterOperation:
    return RegisterOperation("k", "read", value, called, answered)


def write(value: object, called: float, answered: float = NEVER) -> RegisterOperation:
    return RegisterOperation("k", "write", value, called, answered)


def swap(
    expected: object, value: object, called: float, answered: float, **more: bool
) -> RegisterOperation:
    return RegisterOperation("k", "swap", value, called, answered, expected, **more)


GOOD = {
    "nothing": [],
    "a read of what was never written": [read(None, 0, 1)],
    "one after the other": [write(1, 0, 1), read(1, 2, 3), write(2, 4, 5), read(2, 6, 7)],
    "a read during a write may see either": [write(1, 0, 9), read(None, 1, 2), read(1, 3, 4)],
    "an unknown write may be seen late": [write(1, 0), read(None, 1, 2), read(1, 3, 4)],
    "an unknown write may never happen": [write(1, 0), read(None, 1, 2), read(None, 3, 4)],
    "writes of two clients at once": [write(1, 0, 9), write(2, 0, 9), read(2, 10, 11)],
    "one of two swaps": [swap(None, 1, 0, 9), swap(None, 2, 0, 9, refused=True), read(1, 10, 11)],
    "a write that ends after a read of another": [
        write(1, 0, 5),
        write(2, 1, 3),
        read(2, 4, 6),
        read(1, 7, 8),
    ],
}
BAD = {
    "a stale read": [write(1, 0, 1), read(None, 2, 3)],
    "a lost write": [write(1, 0, 1), write(2, 2, 3), read(1, 4, 5)],
    "back in time": [write(1, 0, 9), read(1, 1, 2), read(None, 3, 4)],
    "from nowhere": [read(7, 0, 1)],
    "seen before it was called": [read(1, 0, 1), write(1, 2, 3)],
    "two swaps from one value": [swap(None, 1, 0, 9), swap(None, 2, 0, 9), read(1, 10, 11)],
    "refused without a reason": [swap(None, 1, 0, 1, refused=True)],
    "an unknown write that is undone": [write(1, 0), read(1, 1, 2), read(None, 3, 4)],
    "two clients that see opposite orders": [
        *(write(1, 0, 1), write(2, 0, 1)),
        *(read(1, 2, 3), read(2, 4, 5), read(1, 6, 7)),
    ],
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD.keys())
def test_known_good_histories_are_accepted(history: list[RegisterOperation]) -> None:
    assert violations_in(history) == []


@pytest.mark.parametrize("history", BAD.values(), ids=BAD.keys())
def test_known_bad_histories_are_refused(history: list[RegisterOperation]) -> None:
    assert violations_in(history) == ["k"]


def test_keys_are_checked_apart_and_the_bad_one_is_named() -> None:
    good = [RegisterOperation("good", "write", 1, 0, 1), RegisterOperation("good", "read", 1, 2, 3)]
    assert violations_in([*good, *BAD["a stale read"]]) == ["k"]


def played(
    chance: random.Random, read_at: Callable[[list[object]], object]
) -> list[RegisterOperation]:
    """Return what clients see of a register that does each operation between its call and its
    answer."""
    moments = sorted((chance.random(), n) for n in range(60))
    values: list[object] = [None]
    history = []
    for moment, n in moments:
        called, answered = moment - chance.random() / 10, moment + chance.random() / 10
        if chance.random() < 0.5:
            values.append(n)
            history.append(write(n, called, NEVER if chance.random() < 0.2 else answered))
        else:
            history.append(read(read_at(values), called, answered))
    return history


@pytest.mark.parametrize("seed", range(30))
def test_histories_of_a_real_register_are_accepted_in_any_order(seed: int) -> None:
    assert violations_in(played(random.Random(seed), lambda values: values[-1])) == []


def test_a_register_that_sometimes_answers_from_an_old_copy_is_refused() -> None:
    found = [
        violations_in(played(random.Random(seed), lambda values: values[max(0, len(values) - 12)]))
        for seed in range(30)
    ]
    assert all(keys == ["k"] for keys in found)
