// One cell per rank; the time line, pods, starts and events below.

import { card, h, setText } from "./dom.js";
import { Timeline } from "./timeline.js";
import { ago, clock, count, plural, serverNow, shortDuration } from "./format.js";

const SILENT_SEC = 30;
const DENSE_FROM = 96;

export class RanksPanel {
  constructor(parent, onLog) {
    this.onLog = onLog;
    this.cells = new Map();
    this.isRunning = false;
    this.summary = h("span", { class: "muted" });
    this.grid = h("div", { class: "cells" });
    this.chosen = h("p", { class: "muted" }, "Select a rank for its host and log.");
    this.timeline = new Timeline();
    this.pods = h("div");
    this.starts = h("div");
    this.events = h("div");
    const key = (kind, text) => h("span", null, h("i", { class: kind }), text);
    this.element = h(
      "div", null,
      card("Ranks", h("div", { class: "keys" }, this.summary, key("", "heartbeat"), key("slow", "behind the others"), key("silent", `no heartbeat for ${SILENT_SEC} s`)), this.grid, this.chosen),
      this.timeline.element, this.pods, this.starts, this.events,
    );
    parent.append(this.element);
    this.clock = setInterval(() => this.draw(), 2000);
  }

  setRow(row) {
    const wasRunning = this.isRunning;
    this.isRunning = row.state === "running";
    this.draw();
    if (this.details && this.isRunning !== wasRunning) this.setDetails(this.details);
  }

  setRanks(ranks) {
    this.ranks = ranks;
    this.draw();
  }

  draw() {
    const ranks = this.ranks;
    if (!ranks) return;
    const isDense = ranks.rank.length > DENSE_FROM;
    this.grid.classList.toggle("dense", isDense);
    const highest = Math.max(...ranks.step, 0), now = serverNow();
    let silent = 0, slow = 0;
    ranks.rank.forEach((rank, i) => {
      const age = Math.max(0, now - ranks.time[i]);
      const isSilent = this.isRunning && age > SILENT_SEC;
      const isSlow = this.isRunning && !isSilent && ranks.step[i] < highest - 1;
      silent += isSilent;
      slow += isSlow;
      const cell = this.cell(rank);
      const kind = `cell${this.isRunning ? "" : " ended"}${isSilent ? " silent" : isSlow ? " slow" : ""}`;
      if (cell.kind !== kind) cell.element.className = cell.kind = kind;
      setText(cell.name, String(rank));
      if (!isDense) setText(cell.text, `${count(ranks.step[i])}\n${shortDuration(age)}`);
      cell.age = age;
      cell.index = i;
    });
    const present = new Set(ranks.rank);
    for (const [rank, cell] of this.cells) {
      if (!present.has(rank)) {
        cell.element.remove();
        this.cells.delete(rank);
      }
    }
    const parts = [`${plural(ranks.rank.length, "rank")}, step ${count(highest)}`];
    if (silent) parts.push(`${silent} silent`);
    if (slow) parts.push(`${slow} behind`);
    setText(this.summary, ranks.rank.length ? parts.join(", ") : "No heartbeats");
    this.chosen.hidden = !ranks.rank.length;
    if (this.selected !== undefined) this.show(this.selected);
  }

  cell(rank) {
    let cell = this.cells.get(rank);
    if (!cell) {
      cell = { name: h("b"), text: h("span") };
      cell.element = h("button", { type: "button", class: "cell" }, cell.name, cell.text);
      cell.element.addEventListener("click", () => this.show(rank));
      cell.element.addEventListener("mouseenter", () => (cell.element.title = this.describe(rank)));
      this.cells.set(rank, cell);
      this.grid.append(cell.element);
    }
    return cell;
  }

  describe(rank) {
    const i = this.cells.get(rank)?.index;
    if (i === undefined) return `Rank ${rank}`;
    const { step, time, host, hosts } = this.ranks;
    const node = this.nodes?.get(hosts[host[i]]);
    return `Rank ${rank}: step ${count(step[i])}, heartbeat ${ago(time[i])} ago, on ${hosts[host[i]]}${node ? ` (node ${node})` : ""}`;
  }

  show(rank) {
    this.selected = rank;
    const button = h("button", { type: "button", class: "copy" }, `Log of rank ${rank}`);
    button.addEventListener("click", () => this.onLog(rank));
    const text = this.describe(rank);
    if (this.chosenText === text) return;
    this.chosenText = text;
    this.chosen.replaceChildren(text, " ", button);
  }

  setDetails(details) {
    this.details = details;
    this.timeline.set(details, this.isRunning);
    this.nodes = new Map((details.pods ?? []).map((pod) => [pod.name, pod.node]));
    const starts = details.generations.map((row) => [
      row.generation, clock(row.started), row.until ? clock(row.until) : "–", row.host, row.world_size, startUp(row.start_seconds), `${count(row.from_step)} → ${count(row.step ?? row.to_step)}`, row.ended ?? (this.isRunning && row === details.generations[details.generations.length - 1] ? "running" : "no end recorded"),
    ]);
    this.starts.replaceChildren(starts.length ? card("Starts", table(["Start", "Began", "Ended", "Host", "Processes", "Start-up", "Steps", "Result"], starts)) : "");
    const pods = (details.pods ?? []).map((pod) => [pod.index, pod.name, pod.ranks, pod.phase, pod.reason ?? "", pod.node ?? "", pod.restarts, pod.exit_code ?? ""]);
    this.pods.replaceChildren(pods.length ? card("Pods", table(["Pod", "Name", "Ranks", "Phase", "Reason", "Node", "Restarts", "Exit code"], pods)) : "");
    const events = (details.events ?? []).map((event) => [clock(event.time), event.about, event.reason, event.message]);
    this.events.replaceChildren(events.length ? card("Events and node conditions", table(["Time", "Object", "Reason", "Message"], events)) : "");
  }

  close() {
    clearInterval(this.clock);
    this.timeline.close();
    this.element.remove();
  }
}

// How long the phases of a start took, the longest first: 12.1 s (first step 8.0 s, loading torch 4.1 s).
function startUp(seconds) {
  const phases = Object.entries(seconds).sort(([, a], [, b]) => b - a), text = (value) => `${value.toFixed(1)} s`;
  const total = phases.reduce((sum, [, value]) => sum + value, 0);
  return phases.length ? `${text(total)} (${phases.map(([phase, value]) => `${phase} ${text(value)}`).join(", ")})` : "–";
}

export function table(head, rows) {
  return h(
    "div", { class: "scroll" },
    h("table", { class: head.length > 4 ? "plain many" : "plain" },
      h("thead", null, h("tr", null, ...head.map((text) => h("th", null, text)))),
      h("tbody", null, ...rows.map((row) => h("tr", null, ...row.map((value) => h("td", null, value instanceof Node ? value : String(value ?? "–"))))))),
  );
}
