// Several runs over each other, and what differs in their configs.

import { get, notice, Stream } from "./api.js";
import { card, h } from "./dom.js";
import { CurvesPanel } from "./curves.js";
import { table } from "./ranks.js";
import { runLink, stateBadge } from "./state.js";
import { COLORS } from "./charts.js";
import { compact, count, loss } from "./format.js";

const MAX_RUNS = 8;
const PROBLEM_MS = 2000;  // until configs that could not be read are asked for again

export class CompareView {
  constructor(parent, keys) {
    this.keys = keys.slice(0, MAX_RUNS);
    this.rows = new Map();
    this.labels = this.keys.map((key) => key.slice(key.indexOf("/") + 1));
    this.summary = h("div");
    this.configs = h("div");
    const title = `${this.keys.length} runs`;
    parent.append(h("div", { class: "title" }, h("h1", null, title), keys.length > MAX_RUNS ? h("span", { class: "muted" }, `The first ${MAX_RUNS} of ${keys.length}`) : null), this.summary);
    this.showRows();
    this.panel = new CurvesPanel(parent, this.keys, this.labels);
    parent.append(this.configs);
    this.start();
  }

  async start() {
    await this.panel.load();
    if (this.isClosed) return;
    this.stream = new Stream({ view: "run", key: this.keys }, {
      row: (row) => this.setRow(row),
      rows: (rows) => this.panel.append(rows.key, rows),
      reset: ({ key }) => this.panel.reset(key),
      problem: (problem) => notice(problem.key, problem),
    }, this.panel.position);
    await this.showConfigs();
  }

  setRow(row) {
    notice(row.key, null);
    this.rows.set(row.key, row);
    this.showRows();
  }

  // Every run has its line from the start, so that the charts below stay where they are.
  showRows() {
    const rows = this.keys.map((key, index) => {
      const each = this.rows.get(key) ?? {};
      const swatch = h("i", { class: `swatch points c${COLORS[index % COLORS.length].slice(3)}` });
      const name = h("span", null, swatch, h("a", { href: runLink(key) }, this.labels[index]));
      return [name, stateBadge(each.state ?? "loading"), `${count(each.step)} / ${count(each.max_steps)}`, loss(each.loss), loss(each.val_loss), compact(each.tokens_per_second)];
    });
    this.summary.replaceChildren(card(null, table(["Run", "State", "Step", "Loss", "Validation loss", "Tokens/s, last"], rows)));
  }

  async showConfigs() {
    try {
      const configs = await Promise.all(this.keys.map(async (key) => (await get("/api/config", { key })).config));
      const names = [...new Set(configs.flatMap((config) => Object.keys(config)))].sort();
      const text = (value) => (value === null || value === undefined ? "–" : String(value));
      const rows = names.map((name) => [name, ...configs.map((config) => text(config[name]))]).filter(([name, ...values]) => name !== "output.run_id" && new Set(values).size > 1);
      this.configs.replaceChildren(card("What differs in the configs", rows.length ? table(["Field", ...this.labels], rows) : h("p", { class: "empty" }, "The configs are equal")));
      notice("configs", null);
    } catch (problem) {
      if (this.isClosed) return;
      notice("configs", problem);
      this.again = setTimeout(() => this.showConfigs(), PROBLEM_MS);  // no event tells that they can be read now
    }
  }

  redraw() {
    this.panel.redraw();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.again);
    this.stream?.close();
    this.panel.close();
    for (const key of this.keys) notice(key, null);
  }
}
