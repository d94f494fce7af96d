"""The console in Debian's Chromium, with a control plane and agents in memory."""

from __future__ import annotations

import http.cookiejar
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import axe_playwright_python
import pytest
from click.testing import CliRunner
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from control_plane.broker.core.region_map import MAP_FACTS
from control_plane.daemon import main as control_plane
from control_plane.web.forms import ACTIONS
from control_plane.web.page_request import Page
from control_plane.web.pages import PAGES
from tests.integration.web.service_programs import JOB, PATIENCE_S, PIPELINE, ctl, job_of, services

pytestmark = pytest.mark.behaviour("FE1", "FE7")

SHOTS = Path(os.environ.get("TWINE_SHOTS", "build/screenshots"))
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
RUN_AXE = """
const done = arguments[0], tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
axe.run({runOnly: {type: "tag", values: tags}}).then(done);
"""
ASOF = By.CSS_SELECTOR, ".asof time"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
BARS = """
const done = arguments[0], parse = (text) => new DOMParser().parseFromString(text, "text/html");
fetch(location.href).then((answer) => answer.text())
  .then((text) => done(parse(text).querySelectorAll(".gantt rect").length));
"""
"""Number of bars in the served page, before its script changes them."""
FILLED = {"job": "web", "index": "0", "machine": "h0000", "pipeline": PIPELINE}


def path_of(page: Page) -> str:
    job = JOB if page.path.startswith("/ui/autoscaling/") else "web"
    return page.path.format(**{**FILLED, "job": job})


@contextmanager
def matching_output(argv: list[str], pattern: str) -> Iterator[str]:
    """Run a program and yield the matches in its output; it ends with SIGINT."""
    # A shell starts background jobs with SIGINT ignored, and programs inherit that.
    restore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    call = f"{restore}; from {argv[0]} import main; main()"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", call, *argv[1:]], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            yield next(m[1] for line in lines if (m := re.search(pattern, line)))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, dev = tmp_path_factory.mktemp("services"), ["vm_lab.cli", "dev", "--agents", "8"]
    with (
        matching_output(dev, r"TWINE_ENDPOINT=(\S+)") as found,
        services(found, folder),
    ):
        yield found


@contextmanager
def console(endpoint: str) -> Iterator[str]:
    """Yield a one-time link."""
    with matching_output(
        ["control_plane.cli", "--endpoint", endpoint, "ui"], r"open (http\S+)"
    ) as link:
        yield link


class Visitor:
    """A client with the cookie of an open console."""

    def __init__(self, link: str) -> None:
        # Browsers send Secure cookies to a loopback address over HTTP, too.
        policy = http.cookiejar.DefaultCookiePolicy(secure_protocols=("http", "https"))
        jar = http.cookiejar.CookieJar(policy)
        cookies = urllib.request.HTTPCookieProcessor(jar)
        self._opener, self.base = urllib.request.build_opener(cookies), link.split("/open/")[0]
        self.get_url(link)

    def get_url(self, url: str, data: bytes | None = None) -> tuple[int, str, dict[str, str]]:
        try:
            answer = self._opener.open(url, data, timeout=PATIENCE_S)
        except urllib.error.HTTPError as e:
            answer = e
        return answer.status, answer.read().decode(), dict(answer.headers)

    def get(self, path: str) -> tuple[int, str, dict[str, str]]:
        return self.get_url(self.base + path)

    def post(self, path: str, **fields: str) -> tuple[int, str, dict[str, str]]:
        return self.get_url(self.base + path, urllib.parse.urlencode(fields).encode())


@pytest.fixture
def visitor(endpoint: str) -> Iterator[Visitor]:
    with console(endpoint) as link:
        yield Visitor(link)


@contextmanager
def chromium(link: str) -> Iterator[webdriver.Chrome]:
    """Yield Debian's Chromium with a page open."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1300,1000"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    try:
        driver.get(link)
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def session(endpoint: str) -> Iterator[webdriver.Chrome]:
    with console(endpoint) as link, chromium(link) as driver:
        yield driver


@pytest.fixture
def browser(session: webdriver.Chrome) -> webdriver.Chrome:
    """The browser of all tests, at the first page."""
    opened(session, "/ui/")
    return session


def opened(browser: webdriver.Chrome, path: str) -> None:
    browser.get(browser.current_url.split("/ui/")[0] + path)


@pytest.fixture(scope="module")
def viewer(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    """Yield a user with a credential, who is a viewer."""
    credential = tmp_path_factory.mktemp("ann") / "ann.cred"
    url = json.loads(ctl(endpoint, "token", "create", "--host", "unused"))["url"]
    state = Path(endpoint.removeprefix("unix:")).parent / "cp"
    arguments = ["add", "ann", "--out", str(credential), "--state", str(state), "--url", url]
    result = CliRunner().invoke(control_plane, ["user", *arguments])
    assert result.exit_code == 0, result.output
    with matching_output(
        ["control_plane.cli", "--credential", str(credential), "ui"], r"open (http\S+)"
    ) as link:
        yield Visitor(link)


def is_there(visitor: Visitor) -> bool:
    try:
        visitor.get("/ui/")
    except OSError:
        return False
    return True


def status_of(endpoint: str) -> dict:
    return json.loads(ctl(endpoint, "job", "status", "web", "-o", "json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_every_page_is_served_without_script_and_as_json(visitor: Visitor, page) -> None:
    path = path_of(page)
    status, text, headers = visitor.get(path)
    assert status == 200, text
    assert "<h1>" in text
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert not re.search(r"\son\w+=|<script>|<style>|style=", text), "inline code is refused"
    status, text, headers = visitor.get(f"{path}?format=json")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "application/json")
    assert json.loads(text)["now"] > 0


def test_a_link_works_once_and_nothing_is_shown_without_its_cookie(endpoint: str) -> None:
    with console(endpoint) as link:
        visitor = Visitor(link)
        assert visitor.get("/ui/")[0] == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(link)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{visitor.base}/ui/")
        other = urllib.request.Request(f"{visitor.base}/ui/", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(other)
        assert visitor.get("/v1/jobs")[0] == 404, "only the console is passed on"


def test_a_form_of_another_site_changes_nothing(visitor: Visitor, endpoint: str) -> None:
    for token in ({}, {"token": "0" * 64}, {"token": "ü"}):
        status, text, _ = visitor.post("/ui/do/pause_job", job="web", **token)
        assert status == 403
        assert "not of a page of this console" in text
    assert not status_of(endpoint)["record"].get("paused")


@pytest.mark.behaviour("BUG-UX129")
def test_an_unknown_format_of_a_page_is_refused(visitor: Visitor) -> None:
    """Regression: `?format=xml` was answered with the page."""
    status, text, _ = visitor.get("/ui/jobs?format=xml")
    assert status == 400
    assert "parameter format is json, not &#39;xml&#39;" in text


def test_unknown_jobs_and_parameters_are_reported_on_a_page(visitor: Visitor) -> None:
    status, text, _ = visitor.get("/ui/jobs/none")
    assert (status, "no job" in text) == (404, True)
    status, text, _ = visitor.get("/ui/jobs?sort=%3Cscript%3E")
    assert (status, "<script>" in text.replace('<script src="/ui/static/twine.js"', "")) == (
        400,
        False,
    )
    assert visitor.get("/ui/jobs?colour=state")[0] == 400


def test_lists_are_sorted_and_coloured_by_choice(visitor: Visitor) -> None:
    for sort in ("name", "health", "entitlement", "tasks"):
        status, text, _ = visitor.get(f"/ui/jobs?sort={sort}&search=we")
        assert status == 200, text
        assert "/ui/jobs/web" in text
    for colour in MAP_FACTS:
        assert visitor.get(f"/ui/?colour={colour}")[0] == 200
    for window in ("15m", "7d", "all"):
        assert visitor.get(f"/ui/jobs/web?window={window}&back=1")[0] == 200


def test_names_that_are_html_are_shown_as_text(visitor: Visitor, endpoint: str) -> None:
    """The text is one that a user can set: the reason of a drain."""
    hostile = "<img src=x onerror=alert(1)>\u202e" + "x" * 100
    ctl(endpoint, "machine", "drain", "h0007", "--reason", hostile)
    for path in ("/ui/", "/ui/machines/h0007"):
        text, until = "", time.monotonic() + PATIENCE_S  # the region page is up to 10 s old
        while "&lt;img src=x" not in text and time.monotonic() < until:
            _, text, _ = visitor.get(path)
        assert "&lt;img src=x" in text
        assert "<img" not in text
    ctl(endpoint, "machine", "undrain", "h0007")


def test_a_machine_is_drained_and_undrained_by_forms_with_a_reason(
    visitor: Visitor, endpoint: str
) -> None:
    _, text, _ = visitor.get("/ui/machines/h0006")
    token = re.search(r'name="token" value="(\w+)"', text)[1]
    form = {"token": token, "machine": "h0006", "back": "/ui/machines/h0006"}
    status, text, _ = visitor.post("/ui/do/drain_machines", **form)
    assert (status, "a reason is missing" in text) == (400, True)
    status, text, _ = visitor.post("/ui/do/drain_machines", **form, reason="x" * 10_000)
    assert (status, "the form is invalid" in text) == (400, True)
    assert "Undrain" not in visitor.get("/ui/machines/h0006")[1]
    status, text, _ = visitor.post("/ui/do/drain_machines", **form, reason="new fans")
    assert (status, "new fans" in text) == (200, True)
    status, text, _ = visitor.post("/ui/do/undrain_machines", **form)
    assert (status, "Undrain" in text, ">open<" in text) == (200, False, False)
    assert "drain_machines" in ctl(endpoint, "audit")


def test_each_intent_of_a_job_is_shown_with_its_writer(visitor: Visitor, endpoint: str) -> None:
    ctl(endpoint, "job", "hold", "web", "--for", "60s", "--reason", "<b>freeze</b>")
    _, text, _ = visitor.get("/ui/jobs/web")
    assert "&lt;b&gt;freeze&lt;/b&gt;" in text
    ctl(endpoint, "job", "hold", "web", "--end")


def test_a_log_is_shown_and_followed(browser: webdriver.Chrome, endpoint: str) -> None:
    """The page has the last lines; the browser follows the stream, which sends only new ones."""
    browser.get(browser.current_url.split("/ui/")[0] + "/ui/jobs/web/tasks/0")
    browser.find_element(By.LINK_TEXT, "Live output").click()
    assert "runs no program" in browser.find_element(By.ID, "log").text
    shown = ctl(endpoint, "job", "logs", "web", "0")
    patient(browser).until(
        lambda b: b.find_element(By.ID, "log").text.count("\n") >= shown.count("\n")
    )
    browser.get(browser.current_url + "?lines=1000")
    assert browser.find_element(By.CSS_SELECTOR, "[aria-current=true]").text == "1000"
    assert browser.find_element(By.ID, "log").get_attribute("data-stream")


def test_a_session_is_listed_and_ended_and_its_console_ends(endpoint: str) -> None:
    arguments = ["control_plane.cli", "--endpoint", endpoint, "ui"]
    with matching_output(arguments, r"open (http\S+)") as link:
        visitor = Visitor(link)
        session = re.findall(r"<code>([0-9a-f]{12})</code>", visitor.get("/ui/myself")[1])[0]
        assert f"{session}  local:0" in ctl(endpoint, "ui", "--sessions")
        ctl(endpoint, "ui", "--end", session)
        status, text, _ = visitor.get("/ui/")
        assert (status, "this session was ended by local:0" in text) == (403, True)
        assert "end_session" in ctl(endpoint, "audit")
        until = time.monotonic() + PATIENCE_S
        while is_there(visitor) and time.monotonic() < until:
            time.sleep(0.1)
        assert not is_there(visitor)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(browser: webdriver.Chrome, scheme: str) -> None:
    """axe finds no violation of WCAG 2.2 A and AA; a picture of each page is kept."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    base = browser.current_url.split("/ui/")[0]
    found = []
    for page in PAGES:
        browser.get(base + path_of(page))
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE})
        result = browser.execute_async_script(RUN_AXE)
        found += [f"{page.path}: {v['id']}: {v['nodes'][0]['html']}" for v in result["violations"]]
        assert result["passes"]
        broken = [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
        found += [f"{page.path}: {message}" for message in broken]
        name = page.template.removesuffix(".html")
        browser.save_screenshot(str(SHOTS / f"{name}-{scheme}.png"))
        if scheme == "dark":
            continue
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        found += [f"{page.path}: {wide} pixels wide on a phone"] if wide > PHONE["width"] else []
        browser.save_screenshot(str(SHOTS / f"{name}-phone.png"))
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert found == []


def test_a_page_in_chromium_follows_changes_and_forms_reach_the_audit_log(
    browser: webdriver.Chrome, endpoint: str
) -> None:
    wait = patient(browser)
    SHOTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(SHOTS / "region.png"))
    assert len(browser.find_elements(By.CSS_SELECTOR, ".grid .cell")) == 8
    browser.find_element(By.LINK_TEXT, "Jobs").click()
    browser.find_element(By.LINK_TEXT, "web").click()
    bars = browser.execute_async_script(BARS)
    events = json.loads(ctl(endpoint, "job", "events", "web", "-o", "json"))["events"]
    assert bars == len([e for e in events if e["task"] is not None])
    browser.save_screenshot(str(SHOTS / "job.png"))

    chart = wait.until(lambda b: b.find_element(By.CSS_SELECTOR, ".gantt-rows"))
    drawn = chart.find_element(By.TAG_NAME, "canvas").get_attribute("data-bars")
    assert 0 < int(drawn) <= len(events), "bars of one pixel are drawn once"
    chart.send_keys("+")  # zoom by keyboard: the link has the shown range
    wait.until(lambda b: "begin=" in b.current_url)
    browser.get(browser.current_url)
    chart = wait.until(lambda b: b.find_element(By.CSS_SELECTOR, ".gantt-rows, .gantt .empty"))
    browser.get(browser.current_url.split("?")[0])
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to content"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait.until(lambda b: b.switch_to.active_element.get_attribute("id") == "main")

    ctl(endpoint, "task", "restart", "web-0", "--reason", "seen in the page")
    wait.until(lambda b: "seen in the page" in b.find_element(By.TAG_NAME, "main").text)

    pause = browser.find_element(By.XPATH, "//summary[text()='Pause']")
    pause.send_keys(Keys.ENTER)  # by keyboard alone
    browser.find_element(By.XPATH, "//button[contains(., 'Pause web')]").send_keys(Keys.ENTER)
    wait.until(lambda b: b.find_elements(By.XPATH, "//summary[text()='Resume']"))
    assert "pause_job" in ctl(endpoint, "audit")
    ctl(endpoint, "job", "resume", "web")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.behaviour("FE1")
def test_a_stale_page_shows_its_age_and_its_last_content(endpoint: str) -> None:
    """After five seconds without an answer there is a banner. Printed pages have no buttons."""
    with ExitStack() as stack:
        serving = stack.enter_context(ExitStack())
        browser = stack.enter_context(chromium(serving.enter_context(console(endpoint))))
        browser.get(browser.current_url.split("/ui/")[0] + "/ui/jobs/web")
        wait = patient(browser)
        as_of = browser.find_element(*ASOF)
        assert as_of.is_displayed()
        assert not browser.find_element(By.ID, "stale").is_displayed()
        before = as_of.get_attribute("datetime")
        wait.until(lambda b: b.find_element(*ASOF).get_attribute("datetime") > before)
        assert browser.find_element(By.CSS_SELECTOR, ".acts").is_displayed()
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        shown = [browser.find_element(By.CSS_SELECTOR, one) for one in ("nav", ".acts", "footer")]
        assert not any(one.is_displayed() for one in shown)
        assert browser.find_element(By.TAG_NAME, "main").is_displayed()
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})
        serving.close()
        wait.until(lambda b: b.find_element(By.ID, "stale").is_displayed())
        assert "old data" in browser.find_element(By.ID, "stale").text
        assert "Healthy" in browser.find_element(By.TAG_NAME, "main").text


@pytest.mark.behaviour("FE1", "BUG-UX158")
def test_a_page_of_a_removed_job_says_that_it_is_old(
    browser: webdriver.Chrome, endpoint: str, tmp_path: Path
) -> None:
    """Regression: the page showed the job as healthy and itself as live."""
    spec = job_of("brief", status_of(endpoint)["record"]["spec"]["image"])
    (tmp_path / "brief.json").write_text(json.dumps(spec))
    ctl(endpoint, "job", "apply", str(tmp_path / "brief.json"))
    opened(browser, "/ui/jobs/brief")
    banner = browser.find_element(By.ID, "stale")
    patient(browser).until(lambda b: b.find_elements(By.CSS_SELECTOR, "body.live"))
    assert not banner.is_displayed()
    ctl(endpoint, "job", "stop", "brief")
    patient(browser).until(lambda _: "there is no job" in banner.text)
    assert banner.text == "This page shows old data: there is no job 'brief'"
    assert browser.find_elements(By.CSS_SELECTOR, "body.late")


def patient(browser: webdriver.Chrome) -> WebDriverWait:
    """Return a wait that tolerates a page replacing its elements after a change."""
    return WebDriverWait(browser, PATIENCE_S, ignored_exceptions=[StaleElementReferenceException])


def send(browser: webdriver.Chrome, label: str, **fields: str) -> None:
    """Open the form with this label on the page that is shown, fill it in and send it.

    :raises NoSuchElementException: the page has no such form, or lost it meanwhile
    """
    browser.find_element(By.XPATH, f"//summary[text()='{label}']").click()
    form = browser.find_element(By.CSS_SELECTOR, ".act[open] form")
    for name, value in fields.items():
        form.find_element(By.NAME, name).clear()
        form.find_element(By.NAME, name).send_keys(value)
    form.find_element(By.TAG_NAME, "button").click()


def submit(browser: webdriver.Chrome, path: str, label: str, **fields: str) -> None:
    """Open a page, and send its form with this label as soon as it is there."""
    opened(browser, path)
    patient(browser).until(lambda b: send(b, label, **fields) or True)


def text_of(browser: webdriver.Chrome) -> str:
    return str(browser.execute_script("return document.getElementById('main').innerText"))


@pytest.mark.behaviour("FE1")
def test_forms_in_chromium_reach_the_audit_log_with_their_reason(
    browser: webdriver.Chrome, endpoint: str, tmp_path: Path
) -> None:
    """A request is approved, a machine is drained and confirmed down, a job is rolled back."""
    wait = patient(browser)
    ctl(endpoint, "entitlement", "request", "front", "--machines", "7", "--reason", "calm")
    submit(browser, "/ui/entitlements", "Approve", reason="it is calm")
    wait.until(lambda b: "7" in b.find_element(By.CSS_SELECTOR, ".numbers td").text)
    assert "Approve" not in text_of(browser)

    submit(browser, "/ui/machines/h0004", "Drain", reason="loud fan")
    wait.until(lambda b: "loud fan" in text_of(b))
    submit(browser, "/ui/machines/h0004", "Undrain")
    wait.until(lambda b: "Undrain" not in text_of(b))

    changed = status_of(endpoint)["record"]["spec"] | {"environment": {"COLOUR": "blue"}}
    (tmp_path / "web.json").write_text(json.dumps(changed))
    ctl(endpoint, "job", "apply", str(tmp_path / "web.json"))
    wait.until(lambda _: status_of(endpoint)["phase"] == "stable")
    submit(browser, "/ui/jobs/web", "Pause")
    wait.until(lambda b: "Resume" in text_of(b))
    submit(browser, "/ui/jobs/web", "Resume")
    wait.until(lambda b: "Pause" in text_of(b))
    submit(browser, "/ui/jobs/web", "Roll back")
    wait.until(lambda _: "rollback_job" in ctl(endpoint, "audit"))

    # the agent of the machine is refused and becomes silent
    ctl(endpoint, "machine", "revoke-identity", "h0005")

    def confirmed(b: webdriver.Chrome) -> bool:
        opened(b, "/ui/machines/h0005")
        if b.find_element(By.CSS_SELECTOR, ".facts .badge").text == "down":
            return True
        # refused until the agent was silent for long enough
        send(b, "Confirm down", reason="it is off")
        return False

    wait.until(confirmed)
    wait.until(lambda _: "rollback_job" in ctl(endpoint, "audit"))
    entries = json.loads(ctl(endpoint, "audit", "-o", "json"))["entries"]
    recorded = {entry["action"]: entry for entry in entries if entry["outcome"] == "done"}
    reasons = {"approve_request": "it is calm", "drain_machines": "loud fan"}
    for action, reason in (reasons | {"confirm_down": "it is off"}).items():
        assert reason in recorded[action]["detail"]
    assert recorded.keys() >= {"undrain_machines", "pause_job", "resume_job", "rollback_job"}
    opened(browser, "/ui/audit")
    assert "it is off" in text_of(browser)


@pytest.mark.behaviour("FE1")
def test_a_viewer_sees_no_forms_and_its_form_requests_are_refused(
    viewer: Visitor, endpoint: str
) -> None:
    """Each form follows the permissions of its route. Nothing is changed, and the audit log shows
    that.
    """
    for page in PAGES:
        status, text, _ = viewer.get(path_of(page))
        assert status == (403 if page.path.endswith(("/audit", "/logs")) else 200), page.path
        shown = set(re.findall(r'action="/ui/do/(\w+)"', text))
        assert shown <= {"end_session"}, "a viewer ends sessions of their own"
    token = re.search(r'name="token" value="(\w+)"', viewer.get("/ui/myself")[1])[1]
    fields = {"job": "web", "index": "0", "machine": "h0001", "request": "r1", "minutes": "1"}
    before = status_of(endpoint)
    for route in (action.route for action in ACTIONS if action.route != "end_session"):
        sent = fields | {"token": token, "reason": "mine"}
        status, text, _ = viewer.post(f"/ui/do/{route}", **sent)
        assert (status, "may not call" in text) == (403, True), text
        assert "not of a page of this console" not in text
    assert status_of(endpoint)["record"] == before["record"]
    entries = json.loads(ctl(endpoint, "audit", "--who", "user:ann", "-o", "json"))["entries"]
    refused = {entry["action"] for entry in entries if entry["outcome"] == "refused"}
    assert refused >= {"pause_job", "approve_request"}, "some a minute are written down"
