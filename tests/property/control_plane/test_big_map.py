"""A big map behaves like a dictionary under any sequence of operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.runtime.big_map import BigMap

KEYS = st.sampled_from([f"machine-{number}" for number in range(40)])


@given(st.lists(st.tuples(st.sampled_from(["set", "pop", "del", "update"]), KEYS, st.integers())))
def test_it_equals_a_dictionary(steps):
    big, plain = BigMap[int](), dict[str, int]()
    for what, key, value in steps:
        if what == "set":
            big[key] = plain[key] = value
        elif what == "pop":
            assert big.pop(key, None) == plain.pop(key, None)
        elif what == "update":
            big.update({key: value, key + "x": value})
            plain.update({key: value, key + "x": value})
        elif key in plain:
            del big[key], plain[key]
        else:
            with pytest.raises(KeyError):
                del big[key]
        assert (key in big, big.get(key), big.get(key, -1)) == (
            key in plain,
            plain.get(key),
            plain.get(key, -1),
        )
    assert big == plain
    assert len(big) == len(plain)
    assert sorted(big.items()) == sorted(plain.items())
    for key in set(plain):
        assert big[key] == plain[key]
    with pytest.raises(KeyError):
        big["missing"]


def test_its_parts_are_of_about_the_same_size():
    big = BigMap[int]()
    big.update((f"prn2-{number:07}", number) for number in range(64_000))
    sizes = [len(part) for part in big._parts]
    assert min(sizes) > 3_500
    assert max(sizes) < 4_500
