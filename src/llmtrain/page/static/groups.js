// Runs of the list in groups with equal values of config fields: the losses of each group as mean and deviation.

import { get, notice } from "./api.js";
import { h } from "./dom.js";
import { count, loss, plural } from "./format.js";
import { runLink } from "./state.js";

const LOSSES = { best_val_loss: "Best validation loss", val_loss: "Validation loss", train_loss: "Training loss" };
const RELOAD_MS = 3000;  // at most this often, while runs change
const MAX_LINKS = 12;

function mean(found) {
  if (!found.n) return "–";
  return found.standard_deviation === null ? loss(found.mean) : `${loss(found.mean)} ± ${loss(found.standard_deviation)}`;
}

function shown(value) {
  return value === null || value === undefined ? "–" : String(typeof value === "object" ? JSON.stringify(value) : value);
}

function nameOf(values) {
  return Object.entries(values).map(([field, value]) => `${field} ${shown(value)}`).join(", ");
}

export class GroupsPanel {
  // `filter`: text and state of the list; `saved.fields`: what the runs are grouped by, empty for a list of runs.
  constructor(saved, filter, onChange) {
    this.saved = saved;
    this.filter = filter;
    this.onChange = onChange;
    this.choice = h("select", { "aria-label": "Group by" }, h("option", { value: "" }, "Group by …"));
    this.choice.addEventListener("focus", () => this.load());  // the fields in which the runs differ now
    this.choice.addEventListener("change", () => this.group(this.choice.value ? [this.choice.value] : []));
    this.element = h("section", { class: "card", hidden: true });
  }

  get isOn() {
    return this.saved.fields.length > 0;
  }

  group(fields) {
    this.saved.fields = fields;
    this.onChange();
    this.load();
  }

  // Runs have changed, or the filter.
  changed() {
    if (!this.isOn || this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.load();
    }, this.isLoaded ? RELOAD_MS : 0);
  }

  async load() {
    const request = (this.request = {});
    try {
      const answer = await get("/api/groups", { field: this.saved.fields, ...this.filter() });
      if (request !== this.request) return;
      this.isLoaded = true;
      notice("view", null);
      this.show(answer);
    } catch (problem) {
      if (request === this.request) notice("view", problem);
    }
  }

  show(answer) {
    const [field = ""] = this.saved.fields;
    const fields = [...new Set([...answer.fields, ...(field ? [field] : [])])].sort();
    if (fields.join() !== this.fieldsText) {
      this.fieldsText = fields.join();
      this.choice.replaceChildren(h("option", { value: "" }, "Group by …"), ...fields.map((name) => h("option", { value: name }, name)));
    }
    this.choice.value = field;
    this.element.hidden = !this.isOn;
    if (this.isOn) this.element.replaceChildren(this.table(answer), ...this.notes(answer));
  }

  table({ group_by: fields, groups, best }) {
    const rows = groups.map((group) => {
      const isBest = best && best.margin > 0 && JSON.stringify(group.values) === JSON.stringify(best.values);
      const links = group.run_ids.slice(0, MAX_LINKS).flatMap((id) => [h("a", { href: runLink(`local/${id}`) }, id), " "]);
      const more = group.run_ids.length > MAX_LINKS ? `and ${count(group.run_ids.length - MAX_LINKS)} more` : "";
      return h(
        "tr", { class: isBest ? "best" : "" }, ...fields.map((field) => h("td", null, shown(group.values[field]))), h("td", { class: "number" }, count(group.n)),
        ...Object.keys(LOSSES).map((name) => h("td", { class: "number" }, mean(group[name]))), h("td", { class: "links" }, ...links, more),
      );
    });
    const head = [...fields.map((field) => h("th", null, field)), h("th", { class: "number" }, "n"), ...Object.values(LOSSES).map((label) => h("th", { class: "number" }, label)), h("th", null, "Runs")];
    return h("div", { class: "scroll" }, h("table", { class: "plain groups" }, h("thead", null, h("tr", null, ...head)), h("tbody", null, ...rows)));
  }

  notes({ best, groups, mixed_fields: mixed, without_config: without }) {
    const notes = [];
    if (best && best.margin > 0) {
      const what = groups.some((group) => group.n > 1) ? "mean of the best validation losses" : "best validation loss";
      notes.push(h("p", null, h("b", null, `Best: ${nameOf(best.values)}`), `, ${what} ${loss(best.best_val_loss)}, lower by ${loss(best.margin)}.`));
    }
    if (groups.some((group) => group.best_val_loss.standard_deviation !== null)) notes.push(h("p", { class: "muted" }, "Mean ± standard deviation of n runs. Runs with the same final state count once."));
    if (mixed.length) {
      const buttons = mixed.flatMap((field) => [" ", h("button", { type: "button", onclick: () => this.group([...this.saved.fields, field]) }, `and by ${field}`)]);
      notes.push(h("p", { class: "muted" }, `Runs of one group differ in more than the seed: ${mixed.join(", ")}. Group them`, ...buttons));
    }
    if (without) notes.push(h("p", { class: "muted" }, `${plural(without, "run")} without a config here: in no group.`));
    return notes;
  }

  close() {
    clearTimeout(this.timer);
    this.request = null;
  }
}
