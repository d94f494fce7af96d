"""Parameters, forms and paths that no link of the console has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace
from test_hostile_texts import HostileFrontEnd
from test_rights import FrontEndStub

from control_plane.api.people import AuditPage
from control_plane.api.routes import ROUTES
from control_plane.web.serving import SESSION_COOKIE, Console
from wire.errors import NotFound
from wire.server import Call

pytestmark = pytest.mark.behaviour("FE1")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Region(FrontEndStub):
    """A front end with an old audit log."""

    def __init__(self) -> None:
        super().__init__(operator=True)
        self.handlers |= {"list_audit": self._audit}
        self.before = ""

    async def _audit(self, call: Call) -> Any:
        self.before = call.query.get("before", "")
        return AuditPage(entries=[], next=12_345_678)


class Gone(HostileFrontEnd):
    """A front end that has jobs, but no task with the index 99."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers["task_story"] = self._story

    async def _story(self, call: Call) -> Any:
        if call.path["index"] == "99":
            raise NotFound("there are no events of task 99")
        return await self._answer(call)


@asynccontextmanager
async def opened(region: Any) -> AsyncIterator[TestClient]:
    app = web.Application()
    Console(region, ROUTES, lambda: 1).add_to(app)
    async with TestClient(TestServer(app), cookies={SESSION_COOKIE: "a" * 12}) as client:
        yield client


@pytest.mark.behaviour("BUG-UX154")
async def test_the_audit_log_has_pages_beyond_a_million_entries() -> None:
    """Regression: its link to older entries was refused."""
    region = Region()
    async with opened(region) as client:
        text = await (await client.get("/ui/audit")).text()
        link = text.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")
        assert (await client.get(f"/ui/audit{link}")).status == 200
        assert region.before == "12345678"
        for number in ("9" * 18, "9" * 40):
            assert (await client.get(f"/ui/audit?before={number}")).status == 400


async def token_of(client: TestClient) -> str:
    page = await (await client.get("/ui/rebalance")).text()
    return page.partition('name="token" value="')[2].partition('"')[0]


@pytest.mark.behaviour("BUG-UX156")
async def test_a_form_that_is_no_text_is_refused() -> None:
    """Regression: it was answered with 500, also if the caller had no rights."""
    region = Region()
    async with opened(region) as client:
        for body in (b"reason=\xff\xfe", b"token=x&%ff=\x80"):
            answer = await client.post("/ui/do/pause_rebalance", data=body, headers=FORM)
            assert (answer.status, "is not UTF-8 text" in await answer.text()) == (400, True)
    assert region.paused == 0


@pytest.mark.behaviour("BUG-UX156")
@pytest.mark.parametrize("back", ["/ui/\r\nX-Evil: 1", "/ui/\x00", "/ui/ü", "//evil.example"])
async def test_a_form_that_was_carried_out_is_not_answered_with_an_error(back: str) -> None:
    """Regression: a line break in the page to return to was answered with 500 after the change."""
    region = Region()
    async with opened(region) as client:
        form = {"reason": " quiet ", "token": await token_of(client), "back": back}
        answer = await client.post("/ui/do/pause_rebalance", data=form, allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/ui/")
    assert region.paused == 1


@pytest.mark.behaviour("BUG-UX156")
async def test_a_blank_reason_and_a_hold_of_no_minutes_are_refused_in_words_of_the_form() -> None:
    region = Region()
    async with opened(region) as client:
        token = await token_of(client)
        blank = {"reason": "  ", "token": token}
        answer = await client.post("/ui/do/pause_rebalance", data=blank)
        assert (answer.status, "a reason is missing" in await answer.text()) == (400, True)
        for minutes in ("0", "00", "", "1e3", "\u0661", "100000"):
            hold = {"job": "web", "minutes": minutes, "reason": "x", "token": token}
            answer = await client.post("/ui/do/put_hold", data=hold)
            text = await answer.text()
            assert (answer.status, "minutes is a number from 1" in text) == (400, True)
    assert region.paused == 0


@pytest.mark.behaviour("BUG-UX157")
async def test_the_log_of_a_task_that_does_not_exist_is_not_streamed() -> None:
    """Regression: the answer was an empty stream, which a browser opens again and again."""
    async with opened(Gone()) as client:
        assert (await client.get("/ui/jobs/web/tasks/99/log-stream")).status == 404
        assert (await client.get("/ui/jobs/web/tasks/1/log-stream")).status == 200


@pytest.mark.behaviour("BUG-UX157")
async def test_a_task_is_found_by_any_form_of_its_index() -> None:
    """Regression: the page of task 01 showed that the task has no processes."""
    async with opened(Gone()) as client:
        pages = [await (await client.get(f"/ui/jobs/web/tasks/{n}")).text() for n in ("1", "01")]
    assert ["<dt>Health" in page for page in pages] == [True, True]


@pytest.mark.behaviour("BUG-UX157")
@pytest.mark.parametrize("query", ["begin=5&end=3", "begin=5", "end=0&begin=7", "begin=5&end=5"])
async def test_a_span_that_ends_before_it_begins_is_refused(query: str) -> None:
    """Regression: another span was shown without a word."""
    async with opened(Gone()) as client:
        for page in ("/ui/jobs/web", "/ui/jobs/web/operations"):
            answer = await client.get(f"{page}?{query}")
            assert (answer.status, "begin is a time before end" in await answer.text()) == (400, 1)
            assert (await client.get(f"{page}?begin=3&end=5")).status == 200


class Many(HostileFrontEnd):
    """A front end with 401 jobs; a job has 401 tasks."""

    async def _answer(self, call: Call) -> Any:
        answer = await super()._answer(call)
        if call.route.name == "list_jobs":
            return replace(answer, jobs=answer.jobs[:1] * 401)
        if call.route.name == "get_job":
            return replace(
                answer, record=replace(answer.record, tasks=answer.record.tasks[:1] * 401)
            )
        return answer


@pytest.mark.behaviour("BUG-UX163")
@pytest.mark.parametrize(("page", "name"), [("jobs", "first"), ("jobs/web", "task")])
async def test_a_page_beyond_the_end_of_a_list_says_so(page: str, name: str) -> None:
    """Regression: the list of jobs showed that no job matches, that of tasks was empty."""
    async with opened(Many()) as client:
        text = await (await client.get(f"/ui/{page}?{name}=1000")).text()
        assert "beyond the end of the list: it has 401 rows" in text
        assert f"&{name}=400" in text
        assert "beyond the end" not in await (await client.get(f"/ui/{page}?{name}=400")).text()


@pytest.mark.behaviour("BUG-UX162")
async def test_an_unknown_path_of_the_console_is_answered_with_a_page() -> None:
    """Regression: a browser showed the problem document of the API."""
    async with opened(Gone()) as client:
        for path in ("/ui/nothing", "/ui/jobs/web/nothing/at/all", "/ui/static/none.css"):
            answer = await client.get(path)
            assert (answer.status, answer.content_type) == (404, "text/html")
            assert f"the console has no page {path}" in await answer.text()
        assert (await client.post("/ui/jobs")).status == 405


@pytest.mark.behaviour("BUG-UX161")
async def test_a_page_refuses_a_parameter_that_is_given_twice() -> None:
    async with opened(Many()) as client:
        answer = await client.get("/ui/jobs?first=1&first=2")
        text = await answer.text()
        assert (answer.status, "first is given more than once" in text) == (400, True)


@pytest.mark.behaviour("BUG-UX168")
@pytest.mark.parametrize("path", ["/ui/changes", "/ui/jobs/web/tasks/0/log-stream"])
async def test_a_stream_refuses_unknown_and_repeated_parameters(path: str) -> None:
    """Regression: it ignored them, unlike pages."""
    async with opened(Many()) as client:
        for query in ("x=1", "x=1&x=2"):
            answer = await client.get(f"{path}?{query}")
            assert answer.status == 400
            assert "this page has no parameter x" in await answer.text()


@pytest.mark.behaviour("BUG-UX168")
async def test_a_form_refuses_parameters_in_its_address() -> None:
    async with opened(Many()) as client:
        answer = await client.post("/ui/do/pause_job?job=web", data={})
        assert (answer.status, "no parameter job" in await answer.text()) == (400, True)


@pytest.mark.behaviour("BUG-UX174")
@pytest.mark.parametrize("cookie", ["../x", "b" * 12], ids=["malformed", "of another user"])
async def test_a_browser_with_a_cookie_that_it_may_not_use_gets_another_session(
    cookie: str,
) -> None:
    """Formerly each page was refused until the cookie was deleted by hand."""
    region = Region()
    region.sessions.record_request("b" * 12, "bob")
    app = web.Application()
    Console(region, ROUTES, lambda: 1).add_to(app)
    async with TestClient(TestServer(app)) as client:
        refused = await client.get("/ui/audit", cookies={SESSION_COOKIE: cookie})
        assert refused.status == 403
        assert refused.cookies[SESSION_COOKIE]["max-age"] == "0"
        assert refused.cookies[SESSION_COOKIE]["path"] == "/ui"
