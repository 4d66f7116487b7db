// One sweep: its table, its trials as lines through their values, and the curves of the best of them, live.

import { get, notice, Stream } from "./api.js";
import { h } from "./dom.js";
import { CurvesPanel } from "./curves.js";
import { runLink } from "./state.js";
import { ordered, sweepCards } from "./sweep_table.js";

const RELOAD_MS = 3000;
const MAX_CURVES = 8;

export class SweepView {
  constructor(parent, name) {
    this.name = name;
    this.cards = h("div");
    this.curves = h("div");
    this.keys = "";
    parent.append(h("div", { class: "title" }, h("h1", null, `Sweep ${name}`)), this.cards, this.curves);
    this.load();
  }

  async load() {
    try {
      const sweep = await get("/api/sweep", { name: this.name });
      if (this.isClosed) return;
      notice("view", null);
      const text = JSON.stringify(sweep);
      if (text !== this.text) {
        this.text = text;
        this.cards.replaceChildren(...sweepCards(sweep, (row) => runLink(row.key)));
        this.showCurves(sweep);
      }
    } catch (problem) {
      if (!this.isClosed) notice("view", problem);
    }
    if (!this.isClosed) this.timer = setTimeout(() => this.load(), RELOAD_MS);
  }

  // The curves of the best trials so far. They are built again only when other trials are best.
  async showCurves(sweep) {
    const started = ordered(sweep).filter((row) => row.has_files && row.status !== "equal").slice(0, MAX_CURVES);
    started.sort((a, b) => a.trial - b.trial);
    const keys = started.map((row) => row.key);
    if (!keys.length || keys.join() === this.keys) return;
    this.keys = keys.join();
    this.stream?.close();
    this.panel?.close();
    this.curves.replaceChildren();
    const panel = new CurvesPanel(this.curves, keys, started.map((row) => `trial ${row.trial}`));
    this.panel = panel;
    await panel.load();
    if (this.isClosed || panel !== this.panel) return;
    this.stream = new Stream({ view: "run", key: keys }, {
      rows: (rows) => panel.append(rows.key, rows),
      reset: ({ key }) => panel.reset(key),
    }, panel.position);
  }

  redraw() {
    this.panel?.redraw();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.stream?.close();
    this.panel?.close();
  }
}
