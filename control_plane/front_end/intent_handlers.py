"""The front end's handlers about intents of jobs."""

from __future__ import annotations

from control_plane.api.intent_wishes import IntentWish, JobIntents
from control_plane.front_end.recorder import caller_of
from control_plane.scheduler.intent_service import IntentService
from wire.server import Call


class IntentHandlers:
    """A handler for each row of `api.intent_routes`; the writer is whoever calls."""

    def __init__(self, intents: IntentService) -> None:
        """Take what the handlers call."""
        self._intents = intents

    async def get_intents(self, call: Call) -> JobIntents:
        """Show what each writer wants."""
        return self._intents.show(call.path["job"])

    async def put_push(self, call: Call) -> JobIntents:
        """Push to a part of the tasks."""
        return await self._intents.push(call.path["job"], call.body, caller_of(call.peer))

    async def put_size(self, call: Call) -> JobIntents:
        """Say how many tasks there shall be."""
        return await self._intents.size(call.path["job"], call.body, caller_of(call.peer))

    async def put_canary(self, call: Call) -> JobIntents:
        """Have some tasks run a variant."""
        return await self._intents.canary(call.path["job"], call.body, caller_of(call.peer))

    async def put_hold(self, call: Call) -> JobIntents:
        """Begin nothing for a while."""
        return await self._intents.hold(call.path["job"], call.body, caller_of(call.peer))

    async def put_infrastructure(self, call: Call) -> JobIntents:
        """Take what operators roll out."""
        writer = caller_of(call.peer)
        return await self._intents.infrastructure(call.path["job"], call.body, writer)

    async def withdraw_intent(self, call: Call) -> JobIntents:
        """End a canary or a hold."""
        expect = call.number("expect")
        wish = IntentWish(
            reason=call.query.get("reason", "")[:512],
            expect=None if expect is None else int(expect),
            take_over=call.flag("take_over"),
        )
        name, dimension = call.path["job"], call.path["dimension"]
        return await self._intents.withdraw(name, dimension, wish, caller_of(call.peer))
