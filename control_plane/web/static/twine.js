// Progressive enhancement: times in the viewer's zone, and the page follows changes.
"use strict";
const zone = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const log = document.getElementById("log"), stale = document.getElementById("stale");
const plain = (text) => text.replace(/\x1b\[[0-9;]*[A-Za-z]/g, "");
const ago = (seconds) => {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  return `${Math.max(0, Math.floor(seconds))} s ago`;
};
let skew = 0; // seconds by which the clock of the control plane is ahead of this one
const local = (root) => {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const text = zone.format(new Date(time.dateTime));
    time.title = text + " (" + time.dateTime + ")";
    if (time.textContent === time.dateTime) time.textContent = text;
    else if (time.textContent.endsWith(" ago")) time.dataset.ago = "";
  }
};
const ticks = (root) => { // of charts that the server drew
  for (const tick of root.querySelectorAll("[data-at]")) tick.textContent = (tick.closest("figure") && !("days" in tick.dataset) ? precise : day).format(new Date(tick.dataset.at));
};
const age = () => {
  for (const time of document.querySelectorAll("time[data-ago]")) time.textContent = ago(Date.now() / 1000 + skew - new Date(time.dateTime) / 1000);
};
const charts = () => {
  for (const box of document.querySelectorAll("[data-gantt]")) {
    if (box.gantt) continue;
    box.gantt = new Gantt(box);
    box.gantt.load(box.gantt.url);
  }
};
const asOf = (date) => {
  const time = document.querySelector(".asof time");
  time.dateTime = date.toISOString().slice(0, 19) + "Z";
  time.textContent = zone.format(date);
};
// No reload while the viewer uses a form, a field, a selected text or a log.
const isBusy = () => log || document.querySelector(".act[open]") || document.activeElement?.matches("input, select") || !getSelection().isCollapsed;
let shown = Number(document.body.dataset.revision), loading = false, lastContact = Date.now(), failure = "";
const noContact = stale.textContent;
async function reload() {
  if (loading || isBusy()) return;
  loading = true;
  try {
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    failure = answer.ok ? "" : page.querySelector(".notice.bad")?.textContent || `status ${answer.status}`;
    if (failure || isBusy()) return;
    replaceMain(page);
    shown = Number(page.body.dataset.revision);
    if (!page.body.dataset.every) delete document.body.dataset.every;
    lastContact = Date.now();
  } finally { loading = false; }
}
function replaceMain(page) { // keeps open details, scroll positions, the focus and charts
  const old = document.getElementById("main"), fresh = page.getElementById("main");
  const names = (root, what) => [...root.querySelectorAll(what)];
  const now = names(fresh, ".scroll"), focus = document.activeElement;
  const moved = names(old, ".scroll").map((one) => [one.getAttribute("aria-label"), one.scrollLeft, one.scrollTop]);
  const open = names(old, "details[open]:not(.act) > summary").map((one) => one.textContent.replace(/\d+/g, ""));
  for (const one of names(fresh, "details:not(.act) > summary")) one.parentNode.open = open.includes(one.textContent.replace(/\d+/g, ""));
  const path = focus && old.contains(focus) ? [focus.tagName, focus.getAttribute("href"), focus.getAttribute("aria-label"), focus.textContent].join() : "";
  for (const box of names(old, "[data-gantt]")) {
    const other = [...fresh.querySelectorAll("[data-gantt]")].find((one) => one.dataset.gantt.split("?")[0] === box.dataset.gantt.split("?")[0]);
    if (other && box.gantt?.rows) {
      other.replaceWith(box);
      box.gantt.refresh();
    }
  }
  local(fresh);
  ticks(fresh);
  const inChart = focus?.closest("[data-gantt]");
  old.replaceWith(fresh);
  for (const [label, left, top] of moved) {
    const one = now.find((other) => other.getAttribute("aria-label") === label);
    if (one) { one.scrollLeft = left; one.scrollTop = top; }
  }
  if (inChart) focus.focus({ preventScroll: true });
  else if (path) names(fresh, focus.tagName).find((one) => [one.tagName, one.getAttribute("href"), one.getAttribute("aria-label"), one.textContent].join() === path)?.focus({ preventScroll: true });
  asOf(new Date(page.querySelector(".asof time").dateTime));
  charts();
}
// A log is followed, not loaded again; its start is dropped beyond this many characters.
const LOG_MAX = 4e6;
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
    log.append(plain(JSON.parse(event.data)));
    while (log.textContent.length > LOG_MAX && log.childNodes.length > 1) log.firstChild.remove();
    if (follow) log.scrollTop = log.scrollHeight;
  };
}
skew = new Date(document.querySelector(".asof time").dateTime) / 1000 - Date.now() / 1000;
local(document);
ticks(document);
charts();
if (shown) {
  const changes = new EventSource("/ui/changes");
  changes.onmessage = (event) => {
    lastContact = Date.now();
    if (Number(event.data) !== shown) reload();
    else if (!document.body.dataset.every) asOf(new Date(Date.now() + 1000 * skew));
  };
  setInterval(() => {
    const late = Date.now() - lastContact >= 5000;
    const text = late ? noContact : failure && `This page shows old data: ${failure}`;
    stale.hidden = !text;
    if (text && stale.textContent !== text) stale.textContent = text;
    document.body.classList.toggle("late", Boolean(text));
    document.body.classList.toggle("live", !text);
    age();
  }, 1000);
  setInterval(() => { if (document.body.dataset.every) reload(); }, 1000 * (Number(document.body.dataset.every) || 5));
}
