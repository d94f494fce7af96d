"""The only module that changes jobs: stages of a push, as today's job API carries them out.

`PushWriter` is the interface; `JobApiWriter` writes the job's specification with `update.canary`
as the stage. Each call is idempotent. A writer of push intents will implement the same interface.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from agent.api import ImageInfo
from control_plane.api.jobs import JobRecord
from control_plane.api.updates import UpdatePolicy
from control_plane.client import ControlPlaneClient
from conveyor.api import PipelineStage
from conveyor.core.decide import pushing, restored
from conveyor.core.progress import progress
from conveyor.runs import JobProgress
from wire.errors import NotFound


class PushWriter(Protocol):
    """What the service asks of the control plane; each call raises `TwineError`."""

    async def look(self, job: str, image: str) -> JobProgress:
        """Return how far a job is with an image; one without an image does not exist."""
        ...

    async def newest_image(self, name: str) -> str:
        """Return the digest of the newest image of a name; empty: there is none."""
        ...

    async def push(self, job: str, image: str, stage: PipelineStage) -> None:
        """Have the job want an image, on as many tasks as a stage says, at every size."""
        ...

    async def push_back(self, job: str, image: str) -> None:
        """Have all tasks want an earlier image; those that still run it are not restarted."""
        ...

    async def set_frozen(self, job: str, frozen: bool) -> None:
        """Pause the job's update or let it go on; failures and maintenance go on."""
        ...

    async def restore(self, job: str, update: UpdatePolicy) -> None:
        """Put the owner's canary and failure settings back."""
        ...


class JobApiWriter:
    """Implements `PushWriter` with the job API: read, change two keys, write.

    The job API has no compare-and-set: another change of the same job between read and write
    (milliseconds) is overwritten. Push intents will end that.
    """

    def __init__(self, client: ControlPlaneClient) -> None:
        self._client = client

    async def look(self, job: str, image: str) -> JobProgress:
        """Return how far a job is with an image."""
        try:
            return progress(await self._client.get_job(job), image)
        except NotFound:
            return JobProgress(job=job)

    async def newest_image(self, name: str) -> str:
        """Return the digest of the newest image that was signed with a name or fetched from it."""
        found = [i for i in (await self._client.list_images()).images if _is_named(i, name)]
        newest = max(found, key=lambda image: (image.created_at, image.digest), default=None)
        return "" if newest is None else newest.digest

    async def push(self, job: str, image: str, stage: PipelineStage) -> None:
        """Write image and stage into the job's specification."""
        spec = (await self._client.get_job(job)).record.spec
        wanted = replace(spec, image=image, update=pushing(spec.update, stage))
        await self._client.apply_job(wanted)

    async def push_back(self, job: str, image: str) -> None:
        """Roll the job back, which restarts no task that runs the image; else apply the image."""
        record = (await self._client.get_job(job)).record
        if _goes_back_to(record) == image:
            await self._client.change_job("rollback", job)
            return
        update = replace(record.spec.update, canary=None)
        await self._client.apply_job(replace(record.spec, image=image, update=update))

    async def set_frozen(self, job: str, frozen: bool) -> None:
        """Pause or resume the job."""
        await self._client.change_job("pause" if frozen else "resume", job)

    async def restore(self, job: str, update: UpdatePolicy) -> None:
        """Write the owner's settings into the job's specification."""
        spec = (await self._client.get_job(job)).record.spec
        await self._client.apply_job(replace(spec, update=restored(spec.update, update)))


def _is_named(image: ImageInfo, name: str) -> bool:
    return image.reference == name or any(s.name == name for s in image.signatures)


def _goes_back_to(record: JobRecord) -> str:
    """Return the image that `rollback` of the job API goes back to; empty: it cannot be told.

    It takes the newest earlier version with other tasks, so this is certain only if that version
    differs by its image.
    """
    earlier = [version for version in record.specs if version < record.version]
    if not earlier:
        return ""
    image = record.specs[max(earlier)].image
    return image if image != record.spec.image else ""
