"""Decides which images and layers are removed: by use, by age, and by free disk space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86_400.0
GRACE_S = 3_600.0
"""An image that was received or used within this time stays even on a full disk: a task may be
about to start from it."""


@dataclass(frozen=True, slots=True)
class ImageUse:
    """An image, and the tasks that use it."""

    digest: str
    last_used: float
    """Seconds since 1970: when it was received, or when a task was last made from it."""
    bytes: int = 0
    """The most space that its removal can free."""
    tasks: Sequence[str] = ()
    layers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer; `held` while an image that needs it is in transfer."""

    chain: str
    held: bool = False


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Free bytes, and the limits for removing images."""

    free: int
    wanted: int
    """With fewer free bytes than this, unused images are removed."""
    keep_s: float
    """How long an unused image stays."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether something stays, and why."""

    stays: bool
    why: str


def decide_images(
    images: Sequence[ImageUse], limits: RetentionLimits, now: float
) -> dict[str, RetentionDecision]:
    """Return the decision of each image. Images unused for the longest time are removed first."""
    decisions: dict[str, RetentionDecision] = {}
    free = limits.free
    for image in sorted(images, key=lambda i: (i.last_used, i.digest)):
        idle = max(0.0, now - image.last_used)
        if image.tasks:
            others = f" and {len(image.tasks) - 1} more" if len(image.tasks) > 1 else ""
            decisions[image.digest] = RetentionDecision(
                True, f"task {image.tasks[0]}{others} runs from it"
            )
        elif idle >= limits.keep_s:
            kept = _age(limits.keep_s)
            why = f"it was not used for {_age(idle)}; unused images are kept for {kept}"
            decisions[image.digest] = RetentionDecision(False, why)
            free += image.bytes
        elif free < limits.wanted and idle >= GRACE_S:
            why = f"the disk is short: {free >> 20} MiB of {limits.wanted >> 20} MiB are free"
            decisions[image.digest] = RetentionDecision(
                False, f"{why}, and it was not used for {_age(idle)}"
            )
            free += image.bytes
        else:
            why = f"used {_age(idle)} ago; it is kept for {_age(limits.keep_s)}"
            decisions[image.digest] = RetentionDecision(True, why)
    return decisions


def decide_layers(
    layers: Sequence[LayerUse], images: Sequence[ImageUse], decisions: dict[str, RetentionDecision]
) -> dict[str, RetentionDecision]:
    """Return the decision of each layer, given the decisions of the images."""
    users: dict[str, int] = {}
    for image in images:
        if decisions[image.digest].stays:
            for chain in image.layers:
                users[chain] = users.get(chain, 0) + 1
    layer_decisions = {}
    for layer in layers:
        count = users.get(layer.chain, 0)
        if count:
            users_text = "1 image uses" if count == 1 else f"{count} images use"
            layer_decisions[layer.chain] = RetentionDecision(True, f"{users_text} it")
        elif layer.held:
            layer_decisions[layer.chain] = RetentionDecision(True, "a running image fetch needs it")
        else:
            layer_decisions[layer.chain] = RetentionDecision(False, "no image uses it")
    return layer_decisions


def _age(seconds: float) -> str:
    for size, word in ((DAY_S, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {word}{'' if count == 1 else 's'}"
    return f"{int(seconds)} seconds"
