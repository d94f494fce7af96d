"""The front end's routes about intents; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    JobIntents,
    PushChange,
    SizeChange,
    SizeChanges,
    SizesWritten,
)
from control_plane.api.jobs import JobBriefs
from control_plane.api.people import Needs
from control_plane.api.route_rows import owner_row, viewer_row
from control_plane.api.validate import canary_relations, push_relations
from wire.routes import Route

_INTENTS = "/v1/jobs/{job}/intents"

INTENT_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "list_job_briefs",
        "/v1/job-briefs",
        JobBriefs,
        "All jobs in short: size, healthy tasks, versions of intents",
    ),
    viewer_row(
        "get_intents", _INTENTS, JobIntents, "Intents of each writer for a job, and their effect"
    ),
    owner_row(
        "put_push",
        f"PUT {_INTENTS}/push",
        JobIntents,
        "Push a specification or an image to a part of a job's tasks",
        request=PushChange,
        relations=push_relations,
    ),
    *(
        Route(
            f"put_{dimension}",
            "PUT",
            f"{_INTENTS}/{dimension}",
            request=change,
            response=JobIntents,
            needs=needs,
            relations=canary_relations if change is CanaryChange else None,
            summary=summary,
        )
        for dimension, change, needs, summary in (
            ("size", SizeChange, Needs.OWNER, "Set the number of tasks of a job"),
            ("canary", CanaryChange, Needs.OWNER, "Run a variant on some tasks for a while"),
            (
                "hold",
                HoldChange,
                Needs.OWNER,
                "Begin no change that an intent asks for, for a while",
            ),
            (
                "infrastructure",
                InfrastructureChange,
                Needs.OPERATOR,
                "Set the runtime with which the next push of a job starts",
            ),
        )
    ),
    Route(
        "put_sizes",
        "PUT",
        "/v1/sizes",
        request=SizeChanges,
        response=SizesWritten,
        needs=Needs.ANY_OWNER,
        summary="Set the number of tasks of many jobs; each job is checked separately",
    ),
    owner_row(
        "withdraw_intent",
        f"DELETE {_INTENTS}/{{dimension}}",
        JobIntents,
        "End a job's canary or hold before its time",
        query=("expect", "take_over", "reason"),
    ),
)
