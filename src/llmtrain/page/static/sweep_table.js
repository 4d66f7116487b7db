// The table of a sweep, and its trials as lines through their values (parallel coordinates): on the page and in reports.

import { card, h, svg } from "./dom.js";
import { count, duration, loss, money, precise } from "./format.js";

const WIDTH = 960, HEIGHT = 260, MARGIN = 70, TOP = 30, BOTTOM = 26;

function shown(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? precise(value) : String(typeof value === "object" ? JSON.stringify(value) : value);
}

// The best first: those that trained longest, by their score.
export function ordered(sweep, rows = sweep.rows) {
  const rank = (row) => (row.score === null ? 0 : sweep.is_higher_better ? -row.score : row.score);
  return [...rows].sort((a, b) => (a.score === null) - (b.score === null) || b.step - a.step || rank(a) - rank(b) || a.trial - b.trial);
}

function meanOf(seeds) {
  if (!seeds || seeds.mean === null) return "–";
  return seeds.standard_error === null ? loss(seeds.mean) : `${loss(seeds.mean)} ± ${loss(seeds.standard_error)}`;
}

export function sweepTable(sweep, link) {
  const hasSeeds = sweep.rows.some((row) => row.seeds), hasCost = sweep.rows.some((row) => row.cost);
  const head = ["Trial", ...sweep.fields, "Status", "Step", sweep.metric, ...(hasSeeds ? ["Mean ± error"] : []), "Tokens", "Time", ...(hasCost ? ["Cost"] : [])];
  const rows = ordered(sweep).map((row) => {
    const cells = [
      link(row) ? h("a", { href: link(row) }, String(row.trial)) : String(row.trial), ...sweep.fields.map((field) => shown(row.values[field])),
      row.reason ? `${row.status} (${row.reason})` : row.status, count(row.step), loss(row.score), ...(hasSeeds ? [meanOf(row.seeds)] : []),
      row.tokens === null ? "–" : count(row.tokens), row.seconds === null ? "–" : duration(row.seconds), ...(hasCost ? [row.cost ? money(row.cost.cost, row.cost.currency) : "–"] : []),
    ];
    return h("tr", { class: sweep.winner?.trial === row.trial ? "best" : "" }, ...cells.map((cell) => h("td", null, cell)));
  });
  return h("div", { class: "scroll" }, h("table", { class: "plain groups" }, h("thead", null, h("tr", null, ...head.map((name) => h("th", null, name)))), h("tbody", null, ...rows)));
}

// Where a value lies on its axis, from 0 to 1: numbers by their size (logarithmic if they span more than a factor of
// 20), everything else in the order in which it occurs.
function axisOf(name, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length && known.every((value) => typeof value === "number")) {
    const low = Math.min(...known), high = Math.max(...known), isLog = low > 0 && high / low > 20;
    const scale = isLog ? Math.log : (value) => value;
    const span = scale(high) - scale(low);
    return { name, ticks: low === high ? [low] : [low, high], at: (value) => (typeof value === "number" && span ? (scale(value) - scale(low)) / span : 0.5) };
  }
  const names = [...new Set(known.map(shown))];
  return { name, ticks: names, at: (value) => (names.length > 1 ? names.indexOf(shown(value)) / (names.length - 1) : 0.5) };
}

export function parallelCoordinates(sweep) {
  const rows = sweep.rows.filter((row) => row.score !== null);
  if (!rows.length || !sweep.fields.length) return null;
  const axes = sweep.fields.map((field) => ({ ...axisOf(field, rows.map((row) => row.values[field])), of: (row) => row.values[field] }));
  axes.push({ ...axisOf(sweep.metric, rows.map((row) => row.score)), of: (row) => row.score });
  const left = (index) => MARGIN + (index * (WIDTH - 2 * MARGIN)) / Math.max(1, axes.length - 1);
  const top = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const image = svg("svg", { class: "parallel", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Trials by their values and their score" });
  for (const row of ordered(sweep, rows).reverse()) {  // the best is drawn last, above the others
    const points = axes.flatMap((axis, index) => {
      const value = axis.of(row);
      return value === null || value === undefined ? [] : [`${left(index).toFixed(1)},${top(axis.at(value)).toFixed(1)}`];
    });
    const isBest = sweep.winner?.trial === row.trial;
    image.append(svg("polyline", { class: isBest ? "best" : row.status, points: points.join(" ") }, svg("title", null, `trial ${row.trial}: ${loss(row.score)}`)));
  }
  axes.forEach((axis, index) => {
    image.append(svg("line", { x1: left(index), x2: left(index), y1: top(0), y2: top(1) }));
    image.append(svg("text", { x: left(index), y: 14, "text-anchor": "middle", class: "name" }, axis.name));
    for (const tick of axis.ticks) image.append(svg("text", { x: left(index) + 5, y: top(axis.at(tick)) + 4 }, shown(tick)));
  });
  return image;
}

export function sweepCards(sweep, link) {
  const { winner } = sweep;
  const lines = [];
  if (winner) {
    const values = Object.entries(winner.values).map(([field, value]) => `${field} ${shown(value)}`).join(", ") || "the config";
    const found = winner.seeds ? `${meanOf(winner.seeds)} (${winner.seeds.n} seeds)` : loss(winner.score);
    lines.push(h("p", null, h("b", null, `Best: trial ${winner.trial}, ${values}`), `, ${sweep.metric} ${found}.`));
    if (winner.not_distinguishable_from.length) lines.push(h("p", { class: "muted" }, `Not distinguishable from trial ${winner.not_distinguishable_from.join(", ")} (Welch's t-test, 5 %).`));
    for (const edge of winner.at_edge) {
      lines.push(h("p", { class: "muted" }, `${edge.field} ${shown(edge.value)} is near the ${edge.end} end of ${edge.range}: a wider range may have a better value.`));
    }
  } else if (sweep.is_complete) {
    lines.push(h("p", null, "Every trial diverged or failed."));
  } else {
    const ended = sweep.rows.filter((row) => !["waiting", "running"].includes(row.status)).length;
    lines.push(h("p", { class: "muted" }, `${sweep.is_running ? "Running" : "Interrupted"}: ${ended} of ${sweep.trials} trials ended, ${sweep.running} running.`));
  }
  const picture = parallelCoordinates(sweep);
  return [card(null, ...lines), picture ? card(`Values and ${sweep.metric}`, h("div", { class: "scroll" }, picture)) : null, card("Trials", sweepTable(sweep, link))].filter(Boolean);
}
