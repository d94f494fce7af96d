// Operations of a job by task and time: the rows in view are drawn on a canvas, so that 10,000 tasks
// scroll; zoom and pan by buttons, keys, wheel and drag. Without this script the page has an SVG.
"use strict";
const ROW = 18, LEFT = 96, EDGE = 8, STEPS = [1, 5, 15, 60, 300, 900, 3600, 10800, 21600, 86400, 604800];
const WAITING = ["proposed", "offered", "acknowledged"];
const COLOURS = { start: "--good", restart: "--calm", update: "--purple", move: "--warn2", remove: "--dim", rollout: "--fg" };
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const precise = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const shape = (name, attributes, text) => {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) found.setAttribute(key, attributes[key]);
  if (text !== undefined) found.textContent = text;
  return found;
};
const make = (name, kind, ...inside) => {
  const found = document.createElement(name);
  found.className = kind;
  found.append(...inside);
  return found;
};
class Gantt {
  constructor(box) {
    this.box = box;
    this.url = box.dataset.gantt;
    this.job = box.dataset.job;
    this.view = null; // [begin, end] in seconds; null: all of the window
    this.loaded = 0;
  }
  async load(url) {
    const answer = await fetch(url);
    if (!answer.ok) return;
    this.take((await answer.json()).packed);
    this.loaded = Date.now();
    if (!this.rows) {
      if (!this.data.tasks.length) return;
      this.build();
    }
    this.rows.style.height = this.data.tasks.length * ROW + 4 + "px";
    this.draw();
    performance.mark("rows"); // what benches wait for
  }
  take(data) { // five numbers for each bar (control_plane/web/core/gantt.py); row n begins with bar firsts[n]
    let first = 0;
    this.data = data;
    this.firsts = [0];
    for (const count of data.counts) this.firsts.push(first += count);
    data.states = data.looks.map((look) => data.words[look[2]]);
  }
  from(bar) { return this.data.begin + this.data.bars[5 * bar] / 10; }
  until(bar) {
    const length = this.data.bars[5 * bar + 1];
    return length < 0 ? Infinity : this.from(bar) + length / 10;
  }
  async refresh() { // after a change; a large chart is not loaded again at every one
    const wait = (this.data?.tasks.length || 0) > 1000 ? 10000 : 0;
    if (Date.now() - this.loaded < wait) return;
    const isOutside = this.view && (this.view[0] < this.data.begin || this.view[1] > this.data.end);
    await this.load(isOutside ? this.urlOfView() : this.url);
  }
  urlOfView() {
    const [begin, end] = this.range();
    return this.url.split("?")[0] + `?begin=${Math.floor(begin)}&end=${Math.ceil(end)}&format=json`;
  }
  range() { return this.view || [this.data.begin, this.data.end]; }
  build() {
    const button = (text, label, act) => {
      const found = make("button", "", text);
      found.type = "button";
      found.title = label;
      found.setAttribute("aria-label", label);
      found.onclick = act;
      return found;
    };
    this.label = make("span", "");
    const tools = make("div", "gantt-tools", button("←", "Earlier", () => this.pan(-0.25)), button("→", "Later", () => this.pan(0.25)),
      button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)), button("reset", "Show the whole window", () => this.set(null)), this.label);
    this.axis = shape("svg", { class: "gantt-axis", "aria-hidden": "true" });
    this.picture = make("canvas", "");
    this.picture.setAttribute("role", "img");
    this.all = make("div", "");
    this.rows = make("div", "gantt-rows", this.picture, this.all);
    this.rows.tabIndex = 0;
    this.rows.setAttribute("role", "region");
    this.rows.setAttribute("aria-label", "Operations by task and time; plus and minus zoom, left and right move");
    this.tip = make("div", "gantt-tip");
    this.tip.hidden = true;
    this.box.replaceChildren(tools, this.axis, this.rows, this.tip);
    let waits = false;
    this.rows.onscroll = () => { if (!waits) { waits = true; requestAnimationFrame(() => { waits = false; this.draw(); }); } };
    this.rows.onkeydown = (event) => {
      const act = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.set(null), ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1) }[event.key];
      if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
    };
    this.rows.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.shareAt(event.clientX));
    }, { passive: false });
    this.rows.onpointerdown = (event) => { if (event.button === 0 && event.pointerType === "mouse") this.held = { x: event.clientX, view: this.range() }; };
    this.rows.onpointermove = (event) => this.moved(event);
    this.rows.onpointerleave = () => { this.tip.hidden = true; };
    window.addEventListener("pointerup", () => { this.held = null; this.rows.classList.remove("drag"); });
    new ResizeObserver(() => this.draw()).observe(this.rows);
  }
  width() { return Math.max(50, this.rows.clientWidth - LEFT - EDGE); }
  shareAt(x) { return Math.min(1, Math.max(0, (x - this.rows.getBoundingClientRect().left - LEFT) / this.width())); }
  zoom(factor, part = 0.5) {
    const [begin, end] = this.range(), at = begin + part * (end - begin), span = Math.max(2, (end - begin) * factor);
    this.set([at - part * span, at + (1 - part) * span]);
  }
  pan(part) {
    const [begin, end] = this.range(), by = part * (end - begin);
    this.set([begin + by, end + by]);
  }
  set(view) {
    if (view) { // never beyond now: nothing is known of it
      const over = Math.max(0, view[1] - Date.now() / 1000 - 1);
      view = [Math.max(1, view[0] - over), view[1] - over];
    }
    this.view = view;
    this.draw();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.settle(), 300);
  }
  settle() { // update the page's address, and load what is missing
    const link = new URL(location.href);
    for (const name of ["begin", "end"]) link.searchParams.delete(name);
    if (this.view) {
      link.searchParams.set("begin", Math.floor(this.view[0]));
      link.searchParams.set("end", Math.ceil(this.view[1]));
    }
    history.replaceState(null, "", link);
    const [begin, end] = this.range();
    if (begin < this.data.begin - 1 || end > this.data.end + 1) this.load(this.urlOfView());
  }
  moved(event) {
    if (this.held) {
      const dx = event.clientX - this.held.x;
      if (Math.abs(dx) > 3 || this.view) {
        this.rows.classList.add("drag");
        const [begin, end] = this.held.view, by = -dx / this.width() * (end - begin);
        this.set([begin + by, end + by]);
      }
      return;
    }
    const box = this.rows.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top + this.rows.scrollTop) / ROW);
    const [begin, end] = this.range(), scale = this.width() / (end - begin), x = event.clientX - box.left - LEFT;
    const isAt = (n) => {
      const left = (this.from(n) - begin) * scale, right = (Math.min(end, this.until(n)) - begin) * scale;
      return x >= left - 2 && x <= Math.max(right, left + 3) + 2;
    };
    let bar = row < this.data.tasks.length ? this.firsts[row + 1] - 1 : -1;
    while (bar >= this.firsts[row] && !isAt(bar)) bar--;
    this.tip.hidden = !(bar >= this.firsts[row]);
    if (this.tip.hidden) return;
    this.tip.textContent = this.description(this.data.tasks[row], bar);
    this.tip.style.left = Math.min(event.clientX + 12, innerWidth - this.tip.offsetWidth - 8) + "px";
    this.tip.style.top = (event.clientY + 18 + this.tip.offsetHeight > innerHeight ? event.clientY - this.tip.offsetHeight - 8 : event.clientY + 18) + "px";
  }
  description(task, bar) {
    const { words, looks, bars } = this.data, [length, look, ...places] = bars.slice(5 * bar + 1, 5 * bar + 5);
    const [kind, cause, state, reason, approved] = looks[look].map((n) => words[n]);
    const [source, target] = places.map((n) => words[n]);
    const where = source && target && source !== target ? `from ${source} to ${target}` : (source || target) && `on ${target || source}`;
    const at = (s) => precise.format(new Date(s * 1000));
    const waits = WAITING.includes(state) ? `waits (${state})` : state;
    const times = length < 0 ? `since ${at(this.from(bar))}` : `${at(this.from(bar))} – ${at(this.until(bar))} (${length / 10} s)`;
    return [`${task < 0 ? this.job : this.job + "-" + task}: ${kind} because of ${cause}: ${waits}`, where, reason, approved && `approved by ${approved}`, times].filter(Boolean).join(", ");
  }
  ticks() {
    const [begin, end] = this.range(), most = Math.max(2, this.width() / 110);
    const longest = STEPS.at(-1);
    const step = STEPS.find((s) => (end - begin) / s <= most) || longest * Math.ceil((end - begin) / longest / most);
    const format = step >= 21600 ? day : end - begin < 900 ? precise : clock, found = [];
    for (let at = Math.ceil(begin / step) * step; at <= end; at += step) found.push([LEFT + (at - begin) / (end - begin) * this.width(), format.format(new Date(at * 1000))]);
    return found;
  }
  draw() {
    const [begin, end] = this.range(), width = this.width(), scale = width / (end - begin), ticks = this.ticks();
    const { tasks, bars, looks, states, words } = this.data, all = tasks.length, high = this.rows.clientHeight, top = this.rows.scrollTop, ratio = devicePixelRatio || 1;
    this.axis.replaceChildren(...ticks.map(([x, text]) => shape("text", { x, y: 14, class: "tick" }, text)));
    this.label.textContent = `${day.format(new Date(begin * 1000))} – ${day.format(new Date(end * 1000))}, ${all} rows`;
    if (this.picture.width !== Math.round(this.rows.clientWidth * ratio) || this.picture.height !== Math.round(high * ratio)) {
      this.picture.width = Math.round(this.rows.clientWidth * ratio);
      this.picture.height = Math.round(high * ratio);
      this.picture.style.width = this.rows.clientWidth + "px";
      this.picture.style.height = high + "px";
    }
    this.all.style.height = Math.max(0, all * ROW - high) + "px"; // below the canvas, which stays in view
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const colours = Object.fromEntries(Object.entries(COLOURS).map(([kind, name]) => [kind, colour(name)]));
    const bad = colour("--bad"), warn = colour("--warn"), pen = this.picture.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.rows.clientWidth, high);
    pen.font = "11.5px system-ui, sans-serif";
    pen.fillStyle = colour("--line");
    for (const [x] of ticks) pen.fillRect(Math.round(x), 0, 1, high);
    const last = Math.min(all, Math.ceil((top + high) / ROW));
    let drawn = 0;
    for (let n = Math.floor(top / ROW); n < last; n++) {
      const task = tasks[n], y = n * ROW - top + 2;
      pen.fillStyle = colours.rollout;
      pen.fillText(task < 0 ? "job" : `${this.job.slice(0, 9)}-${task}`, 0, y + 11, LEFT - 6);
      let free = -1; // bars of one pixel and less are drawn once
      for (let bar = this.firsts[n]; bar < this.firsts[n + 1]; bar++) {
        const from = this.from(bar), until = this.until(bar);
        if (until < begin || from > end) continue;
        const x = LEFT + Math.max(0, from - begin) * scale, right = LEFT + (Math.min(end, until) - begin) * scale;
        if (right < free) continue;
        free = Math.max(x + 1.5, right);
        drawn += 1;
        const look = bars[5 * bar + 2], state = states[look];
        pen.globalAlpha = state === "withdrawn" ? 0.45 : 1;
        if (WAITING.includes(state)) {
          pen.strokeStyle = warn;
          pen.setLineDash([3, 2]);
          pen.strokeRect(x + 0.5, y + 0.5, Math.max(1.5, right - x - 1), 13);
        } else {
          pen.fillStyle = state === "failed" ? bad : colours[words[looks[look][0]]] || colours.rollout;
          pen.fillRect(x, y, Math.max(1.5, right - x), 14);
        }
      }
    }
    pen.globalAlpha = 1;
    this.picture.dataset.bars = drawn; // what tests count
    this.picture.setAttribute("aria-label", `${all} tasks with operations`);
  }
}
