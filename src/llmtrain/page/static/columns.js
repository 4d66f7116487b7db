// The columns of the list of runs: which there are, which are shown, and what the reader has chosen.

import { h } from "./dom.js";
import { ago, compact, count, duration, left, loss, money, percent, scientific } from "./format.js";

const KEY = "llmtrain.columns";
const NONE = "–";

// What makes a column worth its space, where the reader has not chosen.
const always = () => true;
const never = () => false;
const some = (texts) => texts.some((text) => text !== NONE);
const several = (texts) => new Set(texts.filter((text) => text !== NONE)).size > 1;

function processes(row) {
  return row.where === "local" ? count(row.processes) : `${count(row.pods)} × ${count(row.processes)}`;
}

// `text`: what a cell shows; `value`: what it is sorted by, if it is not the field of this name.
export const COLUMNS = [
  { id: "state", label: "State" },
  { id: "run_id", label: "Run" },
  { id: "progress", label: "Step", value: (row) => (row.max_steps ? row.step / row.max_steps : row.step ? 0 : null) },
  { id: "eta", label: "ETA", text: left, isUseful: some },
  { id: "lr", label: "LR", title: "Learning rate", text: (row) => scientific(row.lr), isUseful: some },
  { id: "seed", label: "Seed", text: (row) => (row.seed === null ? NONE : String(row.seed)), isUseful: several },
  { id: "model", label: "Model", isText: true, text: (row) => row.model ?? NONE, isUseful: several },
  { id: "parameters", label: "Parameters", text: (row) => compact(row.parameters), isUseful: several },
  { id: "dataset", label: "Dataset", isText: true, text: (row) => row.dataset ?? NONE, isUseful: several },
  { id: "loss", label: "Loss", text: (row) => loss(row.loss), isUseful: always },
  { id: "spark", label: "Curve", title: "Curve of the loss", isFixed: true, isUseful: always },
  { id: "val_loss", label: "Val loss", title: "Validation loss", text: (row) => loss(row.val_loss), isUseful: some },
  { id: "best_val_loss", label: "Best val", title: "Best validation loss", text: (row) => loss(row.best_val_loss), isUseful: some },
  { id: "tokens_per_second", label: "Tok/s", title: "Tokens per second, last logged", text: (row) => compact(row.tokens_per_second), isUseful: some },
  { id: "mfu", label: "MFU", text: (row) => percent(row.mfu), isUseful: some },
  { id: "processes", label: "Processes", text: processes, value: (row) => row.pods * row.processes, isUseful: (texts) => texts.some((text) => text !== "1" && text !== "1 × 1") },
  { id: "restarts", label: "Restarts", text: (row) => count(row.restarts), isUseful: (texts) => texts.some((text) => text !== "0") },
  { id: "gpu_hours", label: "GPU h", title: "GPU-hours", text: (row) => compact(row.gpu_hours), isUseful: some },
  { id: "cost", label: "Cost", title: "Cost so far", text: (row) => money(row.cost, row.currency), isUseful: some },
  { id: "seconds", label: "Duration", text: (row) => duration(row.seconds), isUseful: never },
  { id: "age", label: "Age", text: (row) => ago(row.started), value: (row) => row.started, isUseful: always },
];
export const CHOSEN = COLUMNS.filter((column) => column.isUseful);
export const HIGHEST_FIRST = ["progress", "age", "tokens_per_second", "mfu", "restarts", "gpu_hours", "cost", "processes", "parameters", "seconds"];

export function sortValue(row, id) {
  const column = COLUMNS.find((each) => each.id === id);
  return column.value ? column.value(row) : row[id];
}

// A browser may refuse to store anything; the choice then lasts until the page is closed.
function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

export class Columns {
  constructor(onChange) {
    this.onChange = onChange;
    this.chosen = stored();  // id -> whether it is shown, as far as the reader has said
    this.useful = new Set();
    this.boxes = new Map();
    this.panel = h("div", { class: "menu-panel" });
    this.element = h("details", { class: "menu" }, h("summary", { class: "button" }, "Columns"), this.panel);
    for (const column of CHOSEN) {
      const box = h("input", { type: "checkbox", "data-column": column.id });
      box.addEventListener("change", () => this.choose({ ...this.chosen, [column.id]: box.checked }));
      this.boxes.set(column.id, box);
      this.panel.append(h("label", null, box, column.title ?? column.label));
    }
    this.reset = h("button", { type: "button", onclick: () => this.choose({}) }, "Automatic");
    this.panel.append(this.reset);
    this.onOutside = (event) => {
      if (!this.element.contains(event.target)) this.element.open = false;
    };
    document.addEventListener("click", this.onOutside);
  }

  choose(chosen) {
    this.chosen = chosen;
    try {
      localStorage.setItem(KEY, JSON.stringify(chosen));
    } catch {
      // see stored()
    }
    this.show();
    this.onChange();
  }

  // Which columns tell something about these runs.
  learn(rows) {
    const before = this.text;
    this.useful = new Set(CHOSEN.filter(({ text, isUseful }) => isUseful(text ? rows.map(text) : [])).map((column) => column.id));
    this.show();
    if (before !== this.text) this.onChange();
  }

  show() {
    for (const [id, box] of this.boxes) box.checked = this.isShown(id);
    this.reset.disabled = !Object.keys(this.chosen).length;
    this.text = CHOSEN.map(({ id }) => this.isShown(id)).join();
  }

  isShown(id) {
    return this.chosen[id] ?? (!this.boxes.has(id) || this.useful.has(id));
  }

  close() {
    document.removeEventListener("click", this.onOutside);
  }
}
