// When a run was started, saved and disturbed: bars and marks over time. The tables below it have the same as text.

import { card, h } from "./dom.js";
import { clock, count, duration, serverNow } from "./format.js";

const MARK_PIXELS = 22;  // marks that are closer become one, with their number
const TICK_PIXELS = 84;
const MAX_LISTED = 8;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000];
const RANGES = { "Last hour": 3600, "Last day": 86400, All: null };
const KINDS = { finished: "good", running: "run", interrupted: "warn", failed: "bad", killed: "bad" };

export class Timeline {
  constructor() {
    this.lanes = [];
    this.isRunning = false;
    this.seconds = null;
    this.ranges = h("span", { class: "group", role: "group", "aria-label": "Part of the time line" });
    this.axis = h("div", { class: "ticks", "aria-hidden": "true" });
    this.rows = h("div", { class: "lanes" });
    this.chosen = h("ul", { class: "chosen", "aria-live": "polite" });
    this.card = card("Time line", this.ranges, h("div", { class: "timeline" }, this.rows, this.axis), this.chosen);
    this.element = h("div", { hidden: true }, this.card);
    this.observer = new ResizeObserver(() => this.rows.clientWidth !== this.width && this.draw());
    this.observer.observe(this.rows);
  }

  set(details, isRunning) {
    this.isRunning = isRunning;
    this.lanes = [startLane(details, isRunning), checkpointLane(details), eventLane(details), nodeLane(details)].filter((lane) => lane.items.length);
    this.draw();
  }

  extent() {
    const items = this.lanes.flatMap((lane) => lane.items);
    const begin = Math.min(...items.map((item) => item.begin));
    const end = Math.max(...items.map((item) => item.end ?? serverNow()));
    return [begin, Math.max(end, begin + 1)];
  }

  draw() {
    this.element.hidden = !this.lanes.length;
    if (this.element.hidden) return;
    this.width = this.rows.clientWidth;
    const [first, last] = this.extent();
    this.showRanges(last - first);
    const begin = this.seconds === null ? first : Math.max(first, last - this.seconds);
    const place = (time) => (100 * (time - begin)) / (last - begin);
    this.rows.replaceChildren(...this.lanes.map((lane) => this.laneElement(lane, begin, last, place)));
    const track = this.rows.querySelector(".track");
    const step = tickStep(last - begin, (track?.clientWidth || 600) / TICK_PIXELS);
    this.axis.replaceChildren(...ticks(begin, last, step).map((time) => {
      const tick = h("span", null, tickText(time, step));
      tick.style.left = `${place(time)}%`;
      return tick;
    }));
  }

  showRanges(span) {
    const names = Object.keys(RANGES).filter((name) => RANGES[name] === null || RANGES[name] < span);
    this.ranges.hidden = names.length < 2;
    this.ranges.replaceChildren(...names.map((name) => h("button", {
      type: "button", "aria-pressed": String(RANGES[name] === this.seconds),
      onclick: () => {
        this.seconds = RANGES[name];
        this.draw();
      },
    }, name)));
  }

  laneElement(lane, begin, last, place) {
    const track = h("div", { class: "track" });
    const items = lane.items.filter((item) => (item.end ?? last) >= begin);
    const pixels = Math.max(200, this.width * 0.85);
    const shown = lane.isBars ? items.map((item) => [item]) : groups(items, ((last - begin) * MARK_PIXELS) / pixels);
    for (const group of shown) track.append(this.itemElement(group, lane, begin, last, place));
    return h("div", { class: "lane" }, h("span", { class: "label" }, lane.name), track);
  }

  itemElement(group, lane, begin, last, place) {
    const item = group[0], kind = group.find((each) => each.kind === "bad")?.kind ?? group.find((each) => each.kind === "warn")?.kind ?? item.kind;
    const text = lane.isBars ? item.label : group.length > 1 ? count(group.length) : "";
    const label = group.length > 1 ? `${group.length} ${lane.name.toLowerCase()}, ${clock(item.begin)}` : item.text;
    const element = h("button", { type: "button", class: `${lane.isBars ? "bar" : "mark"} ${kind} ${lane.shape ?? ""}`, "aria-label": label, title: label }, text);
    element.addEventListener("click", () => this.choose(group));
    element.style.left = `${Math.max(0, place(item.begin))}%`;
    if (lane.isBars) element.style.width = `${Math.min(100, place(item.end ?? last)) - Math.max(0, place(item.begin))}%`;
    return element;
  }

  choose(group) {
    const more = group.length > MAX_LISTED ? [h("li", null, `and ${count(group.length - MAX_LISTED)} more`)] : [];
    this.chosen.replaceChildren(...group.slice(0, MAX_LISTED).map((item) => h("li", null, item.text)), ...more);
  }

  close() {
    this.observer.disconnect();
  }
}

function startLane(details, isRunning) {
  const rows = details.generations.filter((row) => row.started);
  const items = rows.map((row, index) => {
    const isOpen = isRunning && index === rows.length - 1;
    const end = isOpen ? null : Math.max(row.until ?? row.started, row.started), state = isOpen ? "running" : row.ended ?? "killed";
    const steps = row.step === null ? `from step ${count(row.from_step)}` : `steps ${count(row.from_step)} to ${count(row.step)}`;
    const text = `Start ${row.generation} on ${row.host}, ${clock(row.started)}: ${state}, ${steps}, ${duration((end ?? serverNow()) - row.started)}`;
    return { begin: row.started, end, kind: KINDS[state], label: `${row.generation}`, text };
  });
  return { name: "Starts", isBars: true, items };
}

function checkpointLane(details) {
  const items = details.checkpoints.filter((row) => row.time).map((row) => ({ begin: row.time, end: row.time, kind: "", text: `${row.name}${row.is_best ? " (best)" : ""}, saved ${clock(row.time)}` }));
  return { name: "Checkpoints", shape: "diamond", items: items.sort((a, b) => a.begin - b.begin) };
}

function eventLane(details) {
  const items = (details.events ?? []).filter((row) => row.time && !row.is_open).map((row) => ({ begin: row.time, end: row.time, kind: row.is_warning ? "warn" : "", text: `${clock(row.time)} ${row.about}: ${row.reason}. ${row.message}` }));
  return { name: "Events", items: items.sort((a, b) => a.begin - b.begin) };
}

function nodeLane(details) {
  const items = (details.events ?? []).filter((row) => row.time && row.is_open).map((row) => ({ begin: row.time, end: null, kind: "bad", label: row.about, text: `${row.about}: ${row.reason} since ${clock(row.time)}` }));
  return { name: "Nodes", isBars: true, items };
}

function groups(items, seconds) {
  const found = [];
  for (const item of items) {
    const group = found[found.length - 1];
    if (group && item.begin - group[0].begin < seconds) group.push(item);
    else found.push([item]);
  }
  return found;
}

function tickStep(span, most) {
  return STEPS.find((step) => span / step <= Math.max(2, most)) ?? STEPS[STEPS.length - 1];
}

// Times on the clock of the viewer: full hours, and midnights.
function ticks(begin, end, step) {
  const offset = -60 * new Date(begin * 1000).getTimezoneOffset();
  const found = [];
  for (let time = Math.ceil((begin + offset) / step) * step - offset; time <= end; time += step) found.push(time);
  return found;
}

function tickText(time, step) {
  const at = new Date(time * 1000);
  if (step >= 43200 || (at.getHours() === 0 && at.getMinutes() === 0 && step >= 60)) return at.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  const options = { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
  return at.toLocaleTimeString(undefined, { ...options, hourCycle: "h23" });
}
