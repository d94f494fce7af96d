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
const busy = () => document.querySelector("details[open]") || document.activeElement?.matches("input, select");
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
local(document);
if (shown) {
  const changes = new EventSource("/ui/changes");
  changes.onmessage = (event) => {
    heard = Date.now();
    if (Number(event.data) !== shown) reload();
  };
  setInterval(() => { document.getElementById("stale").hidden = Date.now() - heard < 5000; }, 1000);
}
