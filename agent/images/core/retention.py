"""Which images and layers may go: by use, by age, and when the disk is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86_400.0
GRACE_S = 3_600.0
"""An image that came or was used within the last hour stays even on a full disk: its caller
is about to start from it."""


@dataclass(frozen=True, slots=True)
class ImageUse:
    """An image, and the tasks that use it."""

    digest: str
    last_used: float
    """Seconds since 1970: when it came, or when a task was last made from it."""
    bytes: int = 0
    """What its removal may give back, at most."""
    tasks: Sequence[str] = ()
    layers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer; `held` while an image that needs it is on its way."""

    chain: str
    held: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """How much there is, and how much there shall be."""

    free: int
    wanted: int
    """Below this, unused images go."""
    keep_s: float
    """How long an unused image stays."""


@dataclass(frozen=True, slots=True)
class RetentionFate:
    """Whether something stays, and why."""

    stays: bool
    why: str


def decide_images(images: Sequence[ImageUse], room: Room, now: float) -> dict[str, RetentionFate]:
    """Return what becomes of each image. The longest unused go first, as many as needed."""
    fates: dict[str, RetentionFate] = {}
    free = room.free
    for image in sorted(images, key=lambda i: (i.last_used, i.digest)):
        idle = max(0.0, now - image.last_used)
        if image.tasks:
            others = f" and {len(image.tasks) - 1} more" if len(image.tasks) > 1 else ""
            fates[image.digest] = RetentionFate(True, f"task {image.tasks[0]}{others} runs from it")
        elif idle >= room.keep_s:
            why = f"it was not used for {_age(idle)}; {_age(room.keep_s)} are kept"
            fates[image.digest] = RetentionFate(False, why)
            free += image.bytes
        elif free < room.wanted and idle >= GRACE_S:
            why = f"the disk is short: {free >> 20} MiB of {room.wanted >> 20} MiB are free"
            fates[image.digest] = RetentionFate(
                False, f"{why}, and it was not used for {_age(idle)}"
            )
            free += image.bytes
        else:
            why = f"used {_age(idle)} ago; it is kept for {_age(room.keep_s)}"
            fates[image.digest] = RetentionFate(True, why)
    return fates


def decide_layers(
    layers: Sequence[LayerUse], images: Sequence[ImageUse], fates: dict[str, RetentionFate]
) -> dict[str, RetentionFate]:
    """Return what becomes of each layer, given what becomes of the images."""
    users: dict[str, int] = {}
    for image in images:
        if fates[image.digest].stays:
            for chain in image.layers:
                users[chain] = users.get(chain, 0) + 1
    found = {}
    for layer in layers:
        count = users.get(layer.chain, 0)
        if count:
            words = "1 image stands" if count == 1 else f"{count} images stand"
            found[layer.chain] = RetentionFate(True, f"{words} on it")
        elif layer.held:
            found[layer.chain] = RetentionFate(True, "an image that is being taken in needs it")
        else:
            found[layer.chain] = RetentionFate(False, "no image stands on it")
    return found


def _age(seconds: float) -> str:
    for size, word in ((DAY_S, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {word}{'' if count == 1 else 's'}"
    return f"{int(seconds)} seconds"
