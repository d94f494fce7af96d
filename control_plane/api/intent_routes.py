"""The front end's routes about intents; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.intent_wishes import (
    CanaryWish,
    HoldWish,
    InfrastructureWish,
    JobIntents,
    PushWish,
    SizesWritten,
    SizeWish,
    SizeWishes,
)
from control_plane.api.jobs import JobBriefs
from control_plane.api.people import Needs
from control_plane.api.validate import canary_relations, push_relations
from wire.routes import Route

_INTENTS = "/v1/jobs/{job}/intents"

INTENT_ROUTES: tuple[Route, ...] = (
    Route(
        "list_job_briefs",
        "GET",
        "/v1/job-briefs",
        response=JobBriefs,
        needs=Needs.VIEWER,
        summary="All jobs in brief: size, healthy tasks, versions of intents",
    ),
    Route(
        "get_intents",
        "GET",
        _INTENTS,
        response=JobIntents,
        needs=Needs.VIEWER,
        summary="What each writer wants of a job, and what it comes to",
    ),
    Route(
        "put_push",
        "PUT",
        f"{_INTENTS}/push",
        request=PushWish,
        response=JobIntents,
        needs=Needs.OWNER,
        relations=push_relations,
        summary="Push a specification or an image to a part of a job's tasks",
    ),
    *(
        Route(
            f"put_{dimension}",
            "PUT",
            f"{_INTENTS}/{dimension}",
            request=wish,
            response=JobIntents,
            needs=needs,
            relations=canary_relations if wish is CanaryWish else None,
            summary=summary,
        )
        for dimension, wish, needs, summary in (
            ("size", SizeWish, Needs.OWNER, "Say how many tasks a job shall have"),
            ("canary", CanaryWish, Needs.OWNER, "Have some tasks run a variant for a while"),
            ("hold", HoldWish, Needs.OWNER, "Begin nothing that an intent asks for, for a while"),
            (
                "infrastructure",
                InfrastructureWish,
                Needs.OPERATOR,
                "Say which runtime the next push of a job starts with",
            ),
        )
    ),
    Route(
        "put_sizes",
        "PUT",
        "/v1/sizes",
        request=SizeWishes,
        response=SizesWritten,
        needs=Needs.ANY_OWNER,
        summary="Say how many tasks each of many jobs shall have; each is checked by itself",
    ),
    Route(
        "withdraw_intent",
        "DELETE",
        f"{_INTENTS}/{{dimension}}",
        query=("expect", "take_over", "reason"),
        response=JobIntents,
        needs=Needs.OWNER,
        summary="End a job's canary or hold before its time",
    ),
)
