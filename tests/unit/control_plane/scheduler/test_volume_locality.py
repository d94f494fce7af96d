"""Tasks that keep data on their machines are not moved for the sake of the spread."""

from __future__ import annotations

from typing import Any, cast

import pytest

from agent.api import Volume, VolumeKind
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.scheduler.placement import Placements


class MoveRequested(Exception):
    """The allocator was called for moves."""


class Allocator:
    """Raises `MoveRequested` on every request for moves."""

    index: Any = None

    def pool_of(self, _: JobSpec) -> str:
        raise MoveRequested

    entitlement_of = repairs = pool_of


def a_job(kind: VolumeKind) -> JobRecord:
    spec = JobSpec(
        name="db",
        entitlement="e",
        tasks=2,
        image="sha256:" + "1" * 64,
        command=["x"],
        volumes={"data": Volume(kind=kind, path="/data", max_bytes=1 << 20)},
    )
    return JobRecord(name="db", spec=spec, version=1)


@pytest.mark.behaviour("AG9")
async def test_no_move_for_the_spread_leaves_a_persistent_volume_behind() -> None:
    placing = Placements(cast("Any", Allocator()))
    assert await placing.repairs(a_job(VolumeKind.PERSISTENT), {}) == ()
    with pytest.raises(MoveRequested):
        await placing.repairs(a_job(VolumeKind.SCRATCH), {})
