"""Which images and layers may be removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.images.core.retention import (
    DAY_S,
    GRACE_S,
    ImageUse,
    LayerUse,
    RetentionLimits,
    decide_images,
    decide_layers,
)

NOW = 100 * DAY_S
ROOMY = RetentionLimits(free=10 << 30, wanted=1 << 30, keep_s=7 * DAY_S)


def an_image(digest: str, idle_s: float, *tasks: str, layers: tuple[str, ...] = ()) -> ImageUse:
    return ImageUse(digest, NOW - idle_s, 100 << 20, tasks, layers)


def test_an_image_stays_while_a_task_runs_from_it_however_old() -> None:
    decisions = decide_images([an_image("a", 90 * DAY_S, "web", "db")], ROOMY, NOW)
    assert (decisions["a"].stays, decisions["a"].why) == (True, "task web and 1 more runs from it")


def test_an_image_unused_for_long_is_removed() -> None:
    decisions = decide_images([an_image("old", 8 * DAY_S), an_image("new", 6 * DAY_S)], ROOMY, NOW)
    assert decisions["old"].why == "it was not used for 8 days; unused images are kept for 7 days"
    assert [d for d, f in decisions.items() if f.stays] == ["new"]


def test_a_short_disk_removes_the_longest_unused_images_and_only_as_needed() -> None:
    images = [an_image(name, idle) for name, idle in (("a", 5e4), ("b", 2e5), ("c", 9e4))]
    short = RetentionLimits(free=(1 << 30) - (150 << 20), wanted=1 << 30, keep_s=7 * DAY_S)
    decisions = decide_images(images, short, NOW)
    assert sorted(d for d, f in decisions.items() if not f.stays) == ["b", "c"]
    assert decisions["b"].why.startswith("the disk is short: 874 MiB of 1024 MiB are free")


def test_a_new_image_stays_on_a_full_disk() -> None:
    full = RetentionLimits(free=0, wanted=1 << 30, keep_s=7 * DAY_S)
    assert decide_images([an_image("a", GRACE_S - 1)], full, NOW)["a"].stays


def test_a_layer_is_removed_with_the_last_image_that_uses_it() -> None:
    images = [
        an_image("old", 8 * DAY_S, layers=("base", "one")),
        an_image("new", 0, layers=("base", "two")),
    ]
    decisions = decide_images(images, ROOMY, NOW)
    layers = [LayerUse("base"), LayerUse("one"), LayerUse("two"), LayerUse("three", held=True)]
    found = decide_layers(layers, images, decisions)
    assert {c: f.stays for c, f in found.items()} == {
        "base": True,
        "one": False,
        "two": True,
        "three": True,
    }
    assert found["base"].why == "1 image uses it"


IMAGES = st.builds(
    ImageUse,
    st.text("abcdef", min_size=3, max_size=3),
    st.floats(0, NOW),
    st.integers(0, 1 << 30),
    st.lists(st.just("web"), max_size=1),
    st.lists(st.sampled_from("xyz"), max_size=3),
)


@pytest.mark.behaviour("F-40")
@given(
    st.lists(IMAGES, unique_by=lambda i: i.digest, max_size=8),
    st.integers(0, 4 << 30),
    st.integers(0, 4 << 30),
)
def test_objects_in_use_are_never_removed(images: list[ImageUse], free: int, wanted: int) -> None:
    """An image of a task, a layer of a remaining image, and a new object stay."""
    decisions = decide_images(images, RetentionLimits(free, wanted, 7 * DAY_S), NOW)
    layers = decide_layers([LayerUse(c) for c in "xyz"], images, decisions)
    for image in images:
        if image.tasks or NOW - image.last_used < GRACE_S:
            assert decisions[image.digest].stays
        if decisions[image.digest].stays:
            assert all(layers[chain].stays for chain in image.layers)
    unused = [i for i in images if not i.tasks and i.last_used <= NOW - GRACE_S]
    if free < wanted and unused:
        assert not decisions[min(unused, key=lambda i: (i.last_used, i.digest)).digest].stays
