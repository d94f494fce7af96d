"""The only module that changes jobs: it writes their push intents.

`PushWriter` is the interface, `PushIntents` calls the front end. A write names the version of the
intent that it replaces. Size, holds, canaries and the runtime are other dimensions with other
writers: job control composes them with the push.
"""

from __future__ import annotations

from typing import Protocol

from agent.api import ImageInfo
from control_plane.api.intent_changes import PushChange
from control_plane.api.intents import Dimension
from control_plane.client import ControlPlaneClient
from conveyor.core.acts import DeliveryAct, GiveBack, PushBack, PushStage, SetFrozen
from conveyor.core.progress import progress
from conveyor.core.stages import push_of
from conveyor.runs import JobProgress
from wire.errors import NotFound


class PushWriter(Protocol):
    """The service's access to the control plane; each call raises `TwineError`."""

    async def read_progress(self, job: str, image: str) -> JobProgress:
        """Return the progress of a job with an image; that of a missing job has no image."""
        ...

    async def newest_image(self, name: str) -> str:
        """Return the digest of the newest image of a name or digest; empty: there is none."""
        ...

    async def write(self, act: DeliveryAct) -> None:
        """Carry out an act; `Conflict` if the push changed since the act was decided."""
        ...


class PushIntents:
    """Implements `PushWriter` with the front end's API."""

    def __init__(self, client: ControlPlaneClient) -> None:
        self._client = client

    async def read_progress(self, job: str, image: str) -> JobProgress:
        """Return the progress of a job with an image."""
        try:
            return progress(await self._client.get_job(job), image)
        except NotFound:
            return JobProgress(job=job)

    async def newest_image(self, name: str) -> str:
        """Return the digest of the image that a name means now."""
        return newest((await self._client.list_images()).images, name)

    async def write(self, act: DeliveryAct) -> None:
        """Write the push of a job, or pause or resume it."""
        if isinstance(act, SetFrozen):
            await self._client.change_job("pause" if act.frozen else "resume", act.job)
        else:
            await self._client.put_intent(act.job, Dimension.PUSH, push_change(act))


def push_change(act: PushStage | PushBack | GiveBack) -> PushChange:
    """Return the write of a push, which replaces the version that the act was decided on."""
    match act:
        case PushStage():
            part = push_of(act.stage)
            return PushChange(
                image=act.image,
                share=part.share,
                tasks=part.tasks,
                expect=act.expect,
                reason=act.reason,
                take_over=act.take_over,
            )
        case PushBack():
            return PushChange(
                image=act.image, expect=act.expect, reason=act.reason, take_over=act.take_over
            )
        case GiveBack():
            return PushChange(gives_back=True, expect=act.expect, reason=act.reason)


def newest(images: list[ImageInfo], name: str) -> str:
    """Return the digest of the newest image of a name; empty: there is none.

    A name of the image store means one image at a time, of any age; a digest means itself.
    """
    matches = [image for image in images if name in (*image.names, image.digest)]
    matches = matches or [image for image in images if _is_signed_as(image, name)]
    last = max(matches, key=lambda image: (image.created_at, image.digest), default=None)
    return "" if last is None else last.digest


def _is_signed_as(image: ImageInfo, name: str) -> bool:
    """Return whether a name is an image's registry reference, or a name that it is signed with."""
    return image.reference == name or any(s.name == name for s in image.signatures)
