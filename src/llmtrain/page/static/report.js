// The report: what the page shows of one run or several, from data in the file.

import { data } from "./api.js";
import { CurvesPanel } from "./curves.js";
import { card, command, h, isNarrow, sparkline, tiles } from "./dom.js";
import { beside, bytes, clock, compact, count, duration, loss, money, percent, plural, setServerTime } from "./format.js";
import { RanksPanel, table } from "./ranks.js";
import { configTable, scoreFacts, scoresCard, sourcesCard, whyCard } from "./run.js";
import { stateBadge } from "./state.js";
import { sweepCards } from "./sweep_table.js";

const MAX_DIFFERENCES = 140;
const panels = [];

function facts(run) {
  const { row, details } = run;
  const values = [
    ["Step", row.max_steps ? `${count(row.step)} / ${count(row.max_steps)}` : count(row.step)],
    ["Training loss", loss(row.loss)],
    ["Validation loss", loss(row.val_loss)],
    ["Best validation loss", run.best === null ? "–" : `${loss(run.best.loss)} at ${count(run.best.step)}`],
    ...scoreFacts(details),
    ["Tokens", compact(run.tokens)],
    ["Tokens/s, last", compact(row.tokens_per_second)],
    ["MFU", percent(row.mfu)],
    ["Parameters", compact(details.parameters)],
    ["Processes", count(row.processes)],
    ["Restarts", row.restarts ? count(row.restarts) : "–"],
    ["Duration", beside(run.seconds, row.predicted_seconds, duration)],
    ["Peak memory", beside(row.peak_memory_bytes, row.predicted_memory_bytes, bytes)],
    row.gpu_hours === null ? ["Device", details.machine.device ?? "–"] : ["GPU-hours", compact(row.gpu_hours)],
    ["Cost", money(row.cost, row.currency)],
  ];
  return tiles(h("div", { class: "facts" }), values.filter(([, text]) => text !== "–"));
}

function curves(parent, runs) {
  const panel = new CurvesPanel(parent, runs.map((run) => run.key), runs.map((run) => run.row.run_id));
  const button = h("button", { type: "button", "aria-pressed": "true" }, "Smoothed");  // the file has one smoothed curve
  button.addEventListener("click", () => {
    const isSmooth = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!isSmooth));
    panel.set({ smooth: isSmooth ? 0 : null });
  });
  panel.smoothLabel.replaceWith(runs.some((run) => run.curves["train/loss"]?.smooth) ? button : "");
  panel.load();
  panels.push(panel);
}

function ranks(parent, run) {
  const panel = new RanksPanel(parent, () => {});
  clearInterval(panel.clock);
  panel.setRow(run.row);
  panel.setDetails(run.details);
  if (run.ranks.rank.length) panel.setRanks(run.ranks);
  else panel.element.querySelector(".card")?.remove();
  panel.chosen.remove();
}

function samples(run) {
  if (!run.samples.length) return null;
  const rows = run.samples.map((row) => h("div", { class: "sample" }, row.prompt ? h("b", null, row.prompt) : null, h("pre", null, row.answer)));
  return card(run.sample_step ? `Answers at step ${count(run.sample_step)}` : "A sample of the model", ...rows);
}

// Open where there is room.
function folded(title, ...children) {
  return h("details", { class: "folded", open: !isNarrow() }, h("summary", null, title), ...children);
}

function files(run) {
  const rows = run.details.checkpoints.map((each) => [each.name, [each.is_latest && "latest", each.is_best && "best"].filter(Boolean).join(", "), bytes(each.bytes), clock(each.time)]);
  const about = [["Directory", run.details.path], ...Object.entries(run.details.machine), ["git commit", run.details.git], ["Started", clock(run.row.started)]];
  return h(
    "div", { class: "two" },
    card("Commands", ...run.details.commands.flatMap((each) => [h("span", { class: "muted" }, each.what), command(each.command)])),
    h("div", null, rows.length ? card("Checkpoints", table(["Checkpoint", "", "Size", "Saved"], rows.reverse())) : null, card("Run", table(["", ""], about.filter(([, value]) => value)))),
  );
}

function allFields(run) {
  return h("details", null, h("summary", { class: "muted" }, `All ${count(Object.keys(run.config).length)} fields of the config`), configTable(run.config, null, "", ""));
}

// Of several runs, the fields that all have in common are shown once, above them.
function config(run, isOnly) {
  if (!isOnly) return card(null, allFields(run));
  return card(`Config: ${plural(Object.keys(run.changed).length, "field")} set`, configTable(run.changed, null, "", ""), allFields(run));
}

function commonConfig(runs) {
  const [first, ...others] = runs;
  const common = Object.entries(first.changed).filter(([name, value]) => others.every((run) => name in run.changed && run.config[name] === value));
  return common.length ? card(null, folded(`Config of all runs: ${plural(common.length, "field")} set`, configTable(Object.fromEntries(common), null, "", ""))) : "";
}

function showRun(parent, run, isOnly) {
  parent.append(h("div", { class: "title", id: run.key }, h("h1", null, run.row.run_id), stateBadge(run.row.state)), facts(run));
  if (run.why) parent.append(whyCard(run.why, run.row.state));
  if (isOnly) curves(parent, [run]);
  parent.append(sourcesCard(run.row.sources) ?? "");
  if (run.data.length) parent.append(card("Data", table(run.data[0], run.data.slice(1))));
  const more = h("div", { class: "below" });
  parent.append(more);
  more.append(scoresCard(run.details) ?? "", samples(run) ?? "", config(run, isOnly), folded("Commands, checkpoints and machine", files(run)));
  if (run.ranks.rank.length > 1 || run.details.generations.length > 1) ranks(more, run);
}

function overview(parent, runs) {
  const rows = runs.map((run) => [
    h("a", { href: `#${run.key}` }, run.row.run_id), stateBadge(run.row.state), sparkline(run.curves["train/loss"] ?? { x: [], y: [] }),
    run.row.max_steps ? `${count(run.row.step)} / ${count(run.row.max_steps)}` : count(run.row.step), loss(run.row.loss), loss(run.row.val_loss),
    run.best === null ? "–" : loss(run.best.loss), compact(run.row.tokens_per_second), percent(run.row.mfu), count(run.row.processes), duration(run.seconds),
  ]);
  parent.append(h("div", { class: "title" }, h("h1", null, plural(runs.length, "run"))));
  parent.append(card(null, table(["Run", "State", "", "Step", "Loss", "Val loss", "Best", "Tok/s, last", "MFU", "Processes", "Duration"], rows)));
  curves(parent, runs);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const text = (value) => (value === null || value === undefined ? "–" : String(value));
  const isOwn = (name) => name !== "output.run_id" && runs.some((run) => name in run.changed);  // not what follows from other fields
  const differing = names.filter((name) => isOwn(name) && new Set(runs.map((run) => text(run.config[name]))).size > 1);
  const differences = differing.map((name) => [name, ...runs.map((run) => text(run.config[name]))]);
  const shown = differences.slice(0, MAX_DIFFERENCES);
  parent.append(h("div", { class: "below" }, card("Differences in the configs", shown.length ? table(["Field", ...runs.map((run) => run.row.run_id)], shown) : h("p", { class: "empty" }, "The configs are equal")), commonConfig(runs)));
}

setServerTime(data.written);
const main = document.getElementById("view");
main.replaceChildren();
if (data.sweep) {
  const shown = new Set(data.runs.map((run) => run.row.run_id));  // links lead to the trials that the file has
  const title = h("div", { class: "title" }, h("h1", null, `Sweep ${data.sweep.name}`));
  main.append(title, ...sweepCards(data.sweep, (row) => (shown.has(row.run_id) ? `#run-${row.run_id}` : null)));
}
if (data.runs.length > 1) overview(main, data.runs);
for (const run of data.runs) showRun(main, run, data.runs.length === 1);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels.forEach((panel) => panel.redraw()));
