"""A long-polled agent: what its silence means, and what its answers mean."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp.test_utils import unused_port

from agent.api import Event, Events
from control_plane.agents.polled import PolledAgent, PolledEvents, PollPatience
from control_plane.runtime.runtime import Runtime
from wire.errors import Busy, Refused, TwineError, Unreachable

SHORT = PollPatience(wait_s=0.05, give_up_s=0.2)


def news(number: int) -> Events:
    event = Event(sequence=number, at=0.0, kind="task", object="t", message="")
    return Events(events=[event], latest=number, boot_id="b1")


def quiet(boot_id: str = "b1") -> Events:
    return Events(events=[], latest=0, boot_id=boot_id)


def stream(ask: Callable[[int, float], Awaitable[Events]], *, alive: bool = False) -> PolledEvents:
    async def takes() -> bool:
        return alive

    return PolledEvents(ask, takes, Runtime(), 0, SHORT)


def test_quiet_answers_are_signs_of_life_and_no_news():
    answers = iter([quiet(), quiet(), quiet(), news(7)])
    requests: list[int] = []

    async def ask(after: int, _: float) -> Events:
        requests.append(after)
        return next(answers)

    async def main() -> None:
        events = stream(ask)
        assert events.last_contact_at == float("-inf")
        assert (await events.next()).events == []  # the first answer contains the boot
        began = events.last_contact_at
        assert (await events.next()).latest == 7
        assert events.last_contact_at > began

    asyncio.run(main())
    assert requests == [0, 0, 0, 0]


def test_another_boot_is_news():
    answers = iter([quiet(), quiet("b2")])

    async def ask(*_: object) -> Events:
        return next(answers)

    async def main() -> str:
        events = stream(ask)
        await events.next()
        return (await events.next()).boot_id

    assert asyncio.run(main()) == "b2"


@pytest.mark.behaviour("BUG-CP21", "F-53")
@pytest.mark.parametrize(("alive", "kind"), [(True, Busy), (False, Unreachable)])
def test_no_answer_in_time_means_something_else_on_a_host_that_lives(
    alive: bool, kind: type[TwineError]
):

    async def ask(*_: object) -> Events:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TwineError, match="not answered within") as caught:
        asyncio.run(stream(ask, alive=alive).next())
    assert type(caught.value) is kind


@pytest.mark.behaviour("BUG-CP21")
def test_an_agent_that_accepts_connections_without_an_answer_is_busy():
    """Uses real sockets. If no program listens, the connection is refused."""

    async def main() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        agent = PolledAgent(f"https://127.0.0.1:{port}", None, Runtime(), SHORT)
        with pytest.raises(Busy, match="accepts connections"):
            await agent.get_machine()
        with pytest.raises(Busy):
            await agent.follow(0).next()
        await agent.close()
        server.close()
        absent = PolledAgent(f"https://127.0.0.1:{unused_port()}", None, Runtime(), SHORT)
        with pytest.raises(Refused):
            await absent.get_machine()
        await absent.close()

    asyncio.run(main())
