// Curves with uPlot (a global, loaded before). A chart gets series {label, x, y, color, kind} and marks {kind, x, text}.

import { h, setText } from "./dom.js";
import { compact, duration, precise } from "./format.js";

export const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const MARK_COLORS = {
  restart: "--warn", interrupted: "--warn", failed: "--bad", killed: "--bad", checkpoint: "--mark",
};

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888";
}

function faint(value) {
  return value.startsWith("#") && value.length === 7 ? `${value}55` : value;
}

function seriesOptions(each) {
  const stroke = color(each.color);
  if (each.kind === "raw") return { stroke: faint(stroke), width: 1, points: { show: false }, spanGaps: true };
  if (each.kind === "points") {
    const points = { show: true, size: 6, stroke, fill: color("--card") };
    return { stroke, width: 1.5, points, spanGaps: true };
  }
  const points = { show: each.x.length < 2 };
  return { stroke, width: 1.6, points, spanGaps: true, dash: each.kind === "dashed" ? [5, 4] : undefined };
}

export class Chart {
  constructor(parent, { title, unit = "", format = precise, ticks = format, height = 220, hidden = new Set(), onZoom = null, onToggle = null }) {
    this.unit = unit;
    this.hidden = hidden;
    this.onToggle = onToggle;
    this.format = format;
    this.ticks = ticks;
    this.height = height;
    this.onZoom = onZoom;
    this.legend = h("div", { class: "legend" });
    this.points = h("span", { class: "shown" });
    this.canvas = h("div", { class: "canvas" });
    this.empty = h("p", { class: "empty" }, "No values yet");
    this.element = h(
      "figure", { class: "chart" },
      h("figcaption", null, h("h3", null, title), this.legend, this.points),
      this.canvas,
    );
    parent.append(this.element);
    this.plot = null;
    this.shape = "";
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
  }

  // view: {axis, axisTitle, log, extent: [low, high] of all charts, range: [low, high] or null}
  set(series, marks, view, pointsText = "") {
    this.series = series;
    this.marks = marks;
    this.view = view;
    setText(this.points, pointsText);
    const filled = series.some((each) => each.x.length > 0);
    const shape = JSON.stringify([series.map((s) => [s.label, s.color, s.kind, s.x.length < 2]), view.axis, view.log]);
    if (!filled) {
      this.drop();
      this.canvas.replaceChildren(this.empty);
      return;
    }
    const data = this.data();
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, true);
    } else {
      this.shape = shape;
      this.build(data);
    }
    this.buildLegend();
  }

  data() {
    const tables = this.series.map((each) => [each.x, this.view.log ? each.y.map((v) => (v > 0 ? v : null)) : each.y]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  build(data) {
    this.drop();
    this.canvas.replaceChildren();
    const text = color("--muted"), line = color("--grid");
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 18, labelGap: 0 };
    const time = this.view.axis === "time";
    const options = {
      width: Math.max(100, this.canvas.clientWidth), height: this.height,
      legend: { show: false },
      cursor: { sync: { key: "llmtrain" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: (_, low, high) => this.view.range ?? (low === high ? [low, high + 1] : this.view.extent ?? [low, high]) },
        y: this.view.log ? { distr: 3 } : { range: (_, low, high) => padded(low, high) },
      },
      axes: [
        { ...axis, label: this.view.axisTitle, size: 28, space: 64, values: (_, ticks) => ticks.map((v) => (time ? duration(v) : compact(v))) },
        { ...axis, label: this.unit, size: 58, values: (_, ticks) => ticks.map((v) => (v === null ? "" : this.ticks(v))) },
      ],
      series: [{}, ...this.series.map((each) => ({ ...seriesOptions(each), show: !this.isHidden(each) }))],
      hooks: {
        drawAxes: [(plot) => this.drawMarks(plot)],  // also once after `destroy`
        setCursor: [(plot) => this.showLegend(plot.cursor.idx)],
        setSelect: [(plot) => this.zoomed(plot)],
      },
    };
    this.plot = new uPlot(options, data, this.canvas);
    this.plot.over.addEventListener("dblclick", () => this.onZoom?.(null));
  }

  zoomed(plot) {
    if (plot.select.width < 4) return;
    const low = plot.posToVal(plot.select.left, "x"), high = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom?.([low, high]);
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of this.marks) {
      if (mark.x === null) continue;
      const left = Math.round(plot.valToPos(mark.x, "x", true));
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color(MARK_COLORS[mark.kind] ?? "--mark");
      if (mark.kind === "checkpoint") {
        const bottom = bbox.top + bbox.height, size = 4 * devicePixelRatio;
        ctx.beginPath();
        ctx.moveTo(left, bottom - 2 * size);
        ctx.lineTo(left - size, bottom);
        ctx.lineTo(left + size, bottom);
        ctx.fill();
      } else {
        ctx.lineWidth = devicePixelRatio;
        ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(left, bbox.top);
        ctx.lineTo(left, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  // A raw curve is shown and hidden with the smoothed one.
  isHidden(each) {
    const smoothed = this.series.find((other) => other.smoothOf === each.label);
    return this.hidden.has((smoothed ?? each).label);
  }

  showHidden() {
    if (!this.plot) return;
    this.series.forEach((each, index) => this.plot.setSeries(index + 1, { show: !this.isHidden(each) }));
    this.buildLegend();
  }

  // One entry per line; a click hides it, where there are several.
  buildLegend() {
    const shown = this.series.filter((each) => each.kind !== "raw" || !this.series.some((s) => s.smoothOf === each.label));
    const shape = JSON.stringify(shown.map((each) => [each.label, each.color, each.kind, this.isHidden(each)]));
    if (shape !== this.legendShape) {
      this.legendShape = shape;
      this.at = h("span", { class: "at", hidden: true });
      this.entries = shown.map((each) => this.legendEntry(each, shown.length > 1));
      this.legend.replaceChildren(this.at, ...this.entries.map(({ element }) => element));
    }
    shown.forEach((each, index) => (this.entries[index].series = each));
    this.showLegend(null);
  }

  legendEntry(each, isButton) {
    const swatch = h("i", { class: `swatch ${each.kind ?? ""}` });
    swatch.style.setProperty("--line", color(each.color));
    const value = h("b");
    const parts = [swatch, each.label, " ", value];
    if (!isButton || !this.onToggle) return { value, element: h("span", null, ...parts) };
    const isShown = !this.isHidden(each);
    const properties = { type: "button", title: isShown ? "Hide this line" : "Show this line", "aria-pressed": String(isShown), onclick: () => this.onToggle(each.label) };
    return { value, element: h("button", properties, ...parts) };
  }

  // Values at the cursor; without one, the last values.
  showLegend(index) {
    if (!this.plot || !this.entries) return;
    const at = index === null || index === undefined ? null : this.plot.data[0][index];
    for (const { series, value } of this.entries) {
      const shown = this.series.find((other) => other.label === series.smoothOf) ?? series;  // the number is never smoothed
      const number = at === null ? shown.y[shown.y.length - 1] : nearest(shown, at);
      setText(value, number === undefined ? "–" : this.format(number));
    }
    this.at.hidden = at === null;
    if (at !== null) setText(this.at, this.view.axis === "time" ? duration(at) : `${this.view.axis} ${compact(at)}`);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width > 0 && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
  }

  redraw() {
    if (!this.plot) return;
    this.shape = this.legendShape = "";
    this.set(this.series, this.marks, this.view, this.points.textContent);
  }

  drop() {
    this.plot?.destroy();
    this.plot = null;
    this.shape = "";
  }

  destroy() {
    this.observer.disconnect();
    this.drop();
    this.element.remove();
  }
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const space = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - space < 0 ? 0 : low - space, high + space];
}

// The value at or before x, by bisection.
function nearest(each, x) {
  let low = 0, high = each.x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (each.x[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return each.y[Math.max(0, low - 1)];
}
