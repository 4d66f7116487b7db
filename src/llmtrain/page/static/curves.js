// The charts of one run, or of several over each other. Curves come with one minimum and maximum per pixel column; rows
// that are written later are appended, and a zoom reads its part in detail.

import { get, notice } from "./api.js";
import { Chart, COLORS } from "./charts.js";
import { h, isNarrow } from "./dom.js";
import { bytes, compact, count, loss, percent, precise } from "./format.js";

const CHARTS = [
  { id: "loss", title: "Loss", unit: "mean loss", metrics: ["train/loss", "val/loss"], format: loss, ticks: precise, isWide: true },
  { id: "perplexity", title: "Validation perplexity", unit: "perplexity", metrics: ["val/perplexity"], format: precise, isOptional: true },
  { id: "bits", title: "Validation bits per byte", unit: "bits per byte", metrics: ["val/bits_per_byte"], format: loss, ticks: precise, isOptional: true },
  { id: "accuracy", title: "Preference accuracy", unit: "share of pairs", metrics: ["train/accuracy", "val/accuracy"], format: percent, isOptional: true },
  { id: "margin", title: "Reward margin", unit: "difference of rewards", metrics: ["train/margin", "val/margin"], format: precise, isOptional: true },
  { id: "chosen", title: "Log-probability of chosen answers", unit: "nats per answer", metrics: ["train/logps_chosen", "val/logps_chosen"], format: precise, isOptional: true },
  { id: "rejected", title: "Log-probability of rejected answers", unit: "nats per answer", metrics: ["train/logps_rejected", "val/logps_rejected"], format: precise, isOptional: true },
  { id: "rewards_chosen", title: "Reward of chosen answers", unit: "reward", metrics: ["train/rewards_chosen", "val/rewards_chosen"], format: precise, isOptional: true },
  { id: "rewards_rejected", title: "Reward of rejected answers", unit: "reward", metrics: ["train/rewards_rejected", "val/rewards_rejected"], format: precise, isOptional: true },
  { id: "kl", title: "KL estimate", unit: "nats per token", metrics: ["train/kl", "val/kl"], format: precise, isOptional: true },
  { id: "lr", title: "Learning rate", unit: "learning rate", metrics: ["train/lr"], format: precise },
  { id: "grad", title: "Gradient norm", unit: "norm before clipping", metrics: ["train/grad_norm"], format: precise },
  { id: "rate", title: "Tokens per second", unit: "tokens/s", metrics: ["train/tokens_per_second"], format: compact },
  { id: "mfu", title: "MFU", unit: "of peak FLOP/s", metrics: ["train/mfu"], format: percent, isOptional: true },
  { id: "memory", title: "Peak memory", unit: "per GPU", metrics: ["train/peak_memory_bytes"], format: bytes, isOptional: true },
];
const FOUND = [  // charts of whatever curves the runs have with these names: tasks, and sources of a mixture
  { prefix: "val/loss/", title: (source) => `Validation loss: ${source}`, unit: "mean loss", format: loss, ticks: precise },
  { prefix: "tasks/", title: (task) => task, unit: "score on the task", format: precise, isScore: true },
];
const BEFORE_FOUND = "lr";
const AXES = { step: "Step", tokens: "Tokens", time: "Time" };
const AXIS_TITLES = { step: "step", tokens: "tokens", time: "time since the first step" };
const FEWEST_SMOOTHED = 3;  // points; of fewer there is nothing to smooth
const AXIS_PIXELS = 70;
const RETRY_MS = 500;
const PROBLEM_MS = 2000;  // until curves that could not be read are asked for again
const RELOAD_GROWTH = 1.5;  // curves are read again when they have this many times the points
const settings = { axis: "step", log: false, smooth: null };  // kept from run to run; smooth: null until the reader moves the slider

export class CurvesPanel {
  constructor(parent, keys, labels) {
    this.keys = keys;
    this.labels = labels;
    this.data = new Map();
    this.ends = new Map();
    this.range = null;
    this.hidden = new Set();  // labels of lines
    this.element = h("div");
    this.grid = h("div", { class: "charts" });
    this.element.append(this.toolbar(), this.grid, this.markKeys());
    parent.append(this.element);
    this.charts = CHARTS.map((each) => this.newChart(each));
  }

  newChart(each) {
    const heights = isNarrow() ? { wide: 240, other: 150 } : { wide: 320, other: 200 };
    const chart = new Chart(this.grid, { title: each.title, unit: each.unit, format: each.format, ticks: each.ticks ?? each.format, height: each.isWide ? heights.wide : heights.other, hidden: this.hidden, onZoom: (range) => this.zoom(range), onToggle: (label) => this.toggle(label) });
    chart.element.classList.toggle("wide", Boolean(each.isWide));
    chart.element.dataset.chart = each.id;
    chart.element.hidden = Boolean(each.isOptional);
    return { ...each, chart };
  }

  // After the losses, a chart per source of a mixture and per score that a run has.
  addFoundCharts() {
    const names = new Set([...this.data.values()].flatMap(({ curves }) => Object.keys(curves)));
    for (const { id } of this.charts) names.delete(id);
    for (const name of names) {
      const kind = FOUND.find(({ prefix }) => name.startsWith(prefix));
      if (!kind) continue;
      const added = this.newChart({ ...kind, id: name, title: kind.title(name.slice(kind.prefix.length)), metrics: [name], isOptional: true, isFound: true });
      const place = this.charts.findIndex(({ id }) => id === BEFORE_FOUND);
      this.grid.insertBefore(added.chart.element, this.charts[place].chart.element);
      this.charts.splice(place, 0, added);
    }
  }

  toolbar() {
    const axis = h("span", { class: "group", role: "group", "aria-label": "Horizontal axis" });
    for (const [name, label] of Object.entries(AXES)) {
      const button = h("button", { type: "button", "data-axis": name, "aria-pressed": String(settings.axis === name) }, label);
      button.addEventListener("click", () => this.set({ axis: name }));
      axis.append(button);
    }
    this.axisButtons = axis;
    this.logButton = h("button", { type: "button", "aria-pressed": String(settings.log) }, "Log scale");
    this.logButton.addEventListener("click", () => this.set({ log: !settings.log }));
    this.slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing" });
    this.smoothing = h("output", { class: "smoothing" });
    this.slider.addEventListener("input", () => (this.smoothing.textContent = Number(this.slider.value).toFixed(2)));
    this.slider.addEventListener("change", () => this.set({ smooth: Number(this.slider.value) }));
    this.smoothLabel = h("label", { title: "Weight of the past in a moving average of the training loss", hidden: true }, "Smoothing", this.slider, this.smoothing);
    const shift = (by) => () => this.move(by);
    this.zoomButtons = h(
      "span", { class: "group", role: "group", "aria-label": "Zoom" },
      h("button", { type: "button", title: "Earlier", onclick: shift(-0.5) }, "◀"),
      h("button", { type: "button", title: "Later", onclick: shift(0.5) }, "▶"),
      h("button", { type: "button", title: "Zoom in", onclick: () => this.scale(0.5) }, "+"),
      h("button", { type: "button", title: "Zoom out", onclick: () => this.scale(2) }, "−"),
      h("button", { type: "button", title: "Show everything", "data-zoom": "reset", onclick: () => this.zoom(null) }, "All"),
    );
    return h(
      "div", { class: "toolbar" }, axis, this.logButton, this.smoothLabel, this.zoomButtons,
      h("span", { class: "muted" }, "Drag across a chart to zoom, double-click to show everything."),
    );
  }

  // The slider shows what is in effect, also where the reader has not moved it.
  showSmoothing() {
    const curves = this.keys.map((key) => this.data.get(key)?.curves["train/loss"]).filter(Boolean);
    this.smoothLabel.hidden = !curves.some((curve) => curve.total >= FEWEST_SMOOTHED);
    if (settings.smooth !== null && document.activeElement === this.slider) return;  // it is being moved
    const weight = settings.smooth ?? Math.max(0, ...curves.map((curve) => curve.smooth?.weight ?? 0));
    this.slider.value = String(weight);
    this.smoothing.textContent = weight.toFixed(2);
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    for (const { chart } of this.charts) chart.showHidden();
  }

  markKeys() {
    const line = (kind, text) => h("span", null, h("i", { class: `line ${kind}` }), text);
    return h("div", { class: "marks" }, line("", "restart or interruption"), line("bad", "failure"), h("span", null, h("i", { class: "triangle" }), "checkpoint"), this.keys.length > 1 ? h("span", null, h("i", { class: "swatch dashed" }), "dashed: validation") : null);
  }

  set(change) {
    const isNewAxis = change.axis && change.axis !== settings.axis;
    Object.assign(settings, change);
    for (const button of this.axisButtons.children) button.setAttribute("aria-pressed", String(button.dataset.axis === settings.axis));
    this.logButton.setAttribute("aria-pressed", String(settings.log));
    if (isNewAxis) this.range = null;
    if ("log" in change) this.draw();
    else this.load();
  }

  zoom(range) {
    this.range = range;
    this.draw();
    this.load();
  }

  extent() {
    const ends = [...this.data.values()].map((each) => each.curves["train/loss"]?.x ?? []).filter((x) => x.length);
    if (!ends.length) return null;
    return this.range ?? [Math.min(...ends.map((x) => x[0])), Math.max(...ends.map((x) => x[x.length - 1]))];
  }

  // From the first step of all curves to the last, so that all charts have one axis.
  wholeRange() {
    const all = [...this.data.values()].flatMap(({ curves }) => Object.values(curves).map(({ x }) => x)).filter((x) => x.length);
    if (!all.length) return [0, 1];
    return [Math.min(...all.map((x) => x[0])), Math.max(...all.map((x) => x[x.length - 1]))];
  }

  move(by) {
    const range = this.extent();
    if (range) this.zoom(range.map((value) => value + by * (range[1] - range[0])));
  }

  scale(by) {
    const range = this.extent();
    if (!range) return;
    const middle = (range[0] + range[1]) / 2, half = ((range[1] - range[0]) / 2) * by;
    this.zoom([middle - half, middle + half]);
  }

  // Positions of all runs in their metrics, for the stream.
  get position() {
    return this.keys.map((key) => this.data.get(key)?.position ?? "0-0").join(",");
  }

  async load() {
    const request = (this.request = {});
    const metric = this.charts.filter(({ isFound }) => !isFound).flatMap(({ chart, metrics, isWide }) => {
      const width = chart.canvas.clientWidth || this.grid.clientWidth / (isWide ? 1 : 2);
      return metrics.map((name) => `${name}:${Math.max(50, Math.round(width - AXIS_PIXELS))}`);
    });
    const query = { axis: settings.axis, smooth: settings.smooth, metric };
    if (this.range) Object.assign(query, { from: this.range[0], to: this.range[1] });
    const answers = await Promise.all(this.keys.map((key) => get("/api/curves", { key, ...query }).catch((problem) => ({ problem }))));
    if (request !== this.request) return;
    const problem = answers.find((answer) => answer.problem)?.problem;
    notice("curves", problem);
    // The run may be back before the stream looks for it, and then no event tells.
    if (problem) this.readAgain(PROBLEM_MS);
    answers.forEach((answer, index) => {
      const key = this.keys[index];
      if (answer.problem) return;
      const end = parseInt(answer.position, 10), loaded = answer.curves["train/loss"]?.total ?? 0;
      this.data.set(key, { ...answer, end, loaded, marksText: this.data.get(key)?.marksText });
      if (this.ends.get(key) > end) this.readAgain(RETRY_MS);  // rows came meanwhile
    });
    this.addFoundCharts();
    this.draw();
  }

  // At the time that was asked for first: rows may come more often than that.
  readAgain(wait) {
    this.again ??= setTimeout(() => {
      this.again = null;
      this.load();
    }, wait);
  }

  // The metrics of a run were replaced.
  reset(key) {
    this.ends.delete(key);
    this.load();
  }

  // New rows, as columns, with the bytes in the metrics between which they are.
  append(key, rows) {
    const data = this.data.get(key);
    this.ends.set(key, rows.end);
    if (!data || rows.end <= data.end) return;
    if (rows.begin !== data.end) return this.load();  // what was loaded ends elsewhere
    data.end = rows.end;
    const x = (table) => {
      if (settings.axis === "time") return table.time.map((value) => value - data.time_base);
      return settings.axis === "tokens" ? table.tokens.map((value) => value ?? lastOf(data.curves["train/loss"].x)) : table.step;
    };
    let isLong = false;
    if (rows.eval.step.length && this.charts.some(({ isScore }) => isScore)) this.readAgain(PROBLEM_MS);
    for (const [name, table] of Object.entries(rows.sources)) {
      if (data.curves[name]) this.extend(data.curves[name], x(table), table[name]);
      else this.readAgain(RETRY_MS);
    }
    for (const { metrics, chart } of this.charts.filter(({ isFound }) => !isFound)) {
      for (const name of metrics) {
        const table = name.startsWith("val/") ? rows.eval : rows.train;
        const curve = data.curves[name];
        if (!curve || !table.step.length) continue;
        this.extend(curve, x(table), table[name]);
        isLong = isLong || curve.x.length > 4 * (chart.canvas.clientWidth || 600);
      }
    }
    this.draw();
    const total = data.curves["train/loss"]?.total ?? 0;  // the weight of the moving average depends on it
    if (isLong || (settings.smooth === null && total > RELOAD_GROWTH * data.loaded)) this.load();
  }

  extend(curve, xs, ys) {
    xs.forEach((at, index) => {
      const value = ys[index];
      if (this.range && at > this.range[1]) return;
      curve.total += 1;
      if (value === null || at === null) return;
      curve.x.push(at);
      curve.y.push(value);
      if (curve.smooth) {
        const before = lastOf(curve.smooth.y) ?? value;
        curve.smooth.x.push(at);
        curve.smooth.y.push(curve.smooth.weight * before + (1 - curve.smooth.weight) * value);
      }
    });
  }

  draw() {
    this.showSmoothing();
    const [begin, end] = this.wholeRange();
    const view = { extent: [begin < end / 10 ? 0 : begin, end], axis: settings.axis, axisTitle: AXIS_TITLES[settings.axis], log: settings.log, range: this.range };
    const marks = this.keys.length === 1 ? this.data.get(this.keys[0])?.marks ?? [] : [];
    const set = ({ chart, metrics, isOptional, isScore }) => {
      const series = this.keys.flatMap((key, index) => this.seriesOf(key, index, metrics, isScore));
      chart.element.hidden = Boolean(isOptional) && !series.some((each) => each.x.length);
      if (!chart.element.hidden) chart.set(series, marks, view, this.pointsText(metrics[0]));
    };
    const [loss, ...others] = this.charts;
    set(loss);
    if (this.isDrawn) {
      others.forEach(set);
      this.arrange();
      return;
    }
    // The first time, the loss is on screen before the others are drawn.
    requestAnimationFrame(() => setTimeout(() => {
      if (!this.request || this.isDrawn) return;  // closed, or drawn meanwhile
      this.isDrawn = true;
      this.draw();
    }));
  }

  // Rows of two or three charts that fill the width, however many have values.
  arrange() {
    const shown = this.charts.map(({ chart }) => chart.element).filter((element) => !element.hidden && !element.classList.contains("wide"));
    const rows = Math.ceil(shown.length / 3);
    const sizes = shown.map((_, index) => Math.ceil((shown.length - (index % rows)) / rows)).sort((a, b) => b - a);
    shown.forEach((element, index) => {
      element.style.setProperty("--span", String(6 / sizes[index]));  // of six columns
      element.classList.toggle("alone", shown.length % 2 === 1 && index === shown.length - 1);
    });
  }

  seriesOf(key, index, metrics, isScore) {
    const data = this.data.get(key);
    if (!data) return [];
    const isOnly = this.keys.length === 1;
    const own = COLORS[index % COLORS.length];
    const found = [];
    for (const name of metrics) {
      const curve = data.curves[name] ?? { x: [], y: [] };
      const isVal = name.startsWith("val/") && metrics.length > 1;  // beside the training
      const label = isOnly ? (isVal ? "validation" : metrics.length > 1 ? "training" : "") : `${this.labels[index]}${isVal ? " (val)" : ""}`;
      const paint = isOnly && isVal ? COLORS[1] : own;
      if (curve.smooth && settings.smooth !== 0) {
        if (isOnly) found.push({ label: "raw", x: curve.x, y: curve.y, color: paint, kind: "raw" });
        found.push({ label, x: curve.smooth.x, y: curve.smooth.y, color: paint, kind: "line", smoothOf: "raw" });
      } else if (curve.x.length || !isVal) {
        found.push({ label, x: curve.x, y: curve.y, color: paint, kind: isVal ? (isOnly ? "points" : "dashed") : isScore ? "points" : "line" });
      }
    }
    return found;
  }

  pointsText(name) {
    const curves = this.keys.map((key) => this.data.get(key)?.curves[name]).filter(Boolean);
    const shown = sum(curves.map((curve) => curve.x.length)), total = sum(curves.map((curve) => curve.total));
    return total ? `${count(Math.min(shown, total))} of ${count(total)} points` : "";
  }

  setMarks(key, details) {
    const data = this.data.get(key);
    const text = JSON.stringify([details.marks, details.task_scores]);
    if (!data || text === data.marksText) return;
    const isFirst = data.marksText === undefined;
    data.marksText = text;
    if (!isFirst || details.marks.length !== data.marks.length) this.load();
  }

  redraw() {
    for (const { chart } of this.charts) chart.redraw();
  }

  close() {
    this.request = null;
    clearTimeout(this.again);
    for (const { chart } of this.charts) chart.destroy();
  }
}

function lastOf(values) {
  return values[values.length - 1];
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
