// Progressive enhancement: times in the viewer's zone, and the page follows changes.
"use strict";
const zone = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const local = (root) => {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const text = zone.format(new Date(time.dateTime));
    time.title = text + " (" + time.dateTime + ")";
    if (time.textContent === time.dateTime) time.textContent = text;
  }
};
const log = document.getElementById("log");
const busy = () => log || document.querySelector("details[open]") || document.activeElement?.matches("input, select");
let shown = Number(document.body.dataset.revision), loading = false, heard = Date.now();
async function reload() {
  if (loading || busy()) return;
  loading = true;
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of ["main", ".asof"]) {
      const fresh = page.querySelector(part);
      local(fresh);
      document.querySelector(part).replaceWith(fresh);
    }
    shown = Number(page.body.dataset.revision);
  } finally { loading = false; }
}
// A log is followed, not loaded again; what is beyond this many characters is dropped from its start.
const KEPT = 4e6;
if (log?.dataset.stream) {
  const atEnd = () => log.scrollTop + log.clientHeight > log.scrollHeight - 20;
  const state = document.getElementById("log-state");
  const lines = new EventSource(log.dataset.stream);
  log.scrollTop = log.scrollHeight;
  let opened = false;
  lines.onopen = async () => {
    state.hidden = true;
    if (opened) { // lines may have been written while the stream was away
      const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
      log.textContent = page.getElementById("log").textContent;
    }
    opened = true;
  };
  lines.onerror = () => { state.hidden = false; state.textContent = "The log is not followed now; trying again."; };
  lines.onmessage = (event) => {
    const follow = atEnd();
    log.append(JSON.parse(event.data));
    while (log.textContent.length > KEPT && log.childNodes.length > 1) log.firstChild.remove();
    if (follow) log.scrollTop = log.scrollHeight;
  };
}
local(document);
if (shown) {
  const changes = new EventSource("/ui/changes");
  changes.onmessage = (event) => {
    heard = Date.now();
    if (Number(event.data) !== shown) reload();
  };
  setInterval(() => { document.getElementById("stale").hidden = Date.now() - heard < 5000; }, 1000);
}
