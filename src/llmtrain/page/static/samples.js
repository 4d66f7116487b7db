// What models answer to the same prompts, beside each other.

import { get, notice } from "./api.js";
import { card, h } from "./dom.js";
import { count } from "./format.js";

const MAX_MODELS = 4;
const END = "end";  // the sample that a run writes when it finishes

export class SamplesPanel {
  constructor(parent, key, details) {
    this.models = [];
    this.place = h("div");
    this.other = h("select", { "aria-label": "Compare with" }, h("option", { value: "" }, "Compare with another run"));
    this.other.addEventListener("change", () => this.addChosen().catch((problem) => notice("view", problem)));
    parent.append(h("div", { class: "toolbar" }, this.other), card("Samples of the model", this.place));
    this.start(key, details).catch((problem) => notice("view", problem));
  }

  async start(key, details) {
    await this.add(key, details);
    const { rows } = await get("/api/runs");
    const others = rows.filter((row) => row.key !== key);
    this.other.append(...others.map((row) => h("option", { value: row.key }, `${row.run_id} (${row.where})`)));
  }

  async addChosen() {
    const key = this.other.value;
    this.other.value = "";
    if (!key || this.models.some((model) => model.key === key)) return;
    const { details } = await get("/api/run", { key });
    await this.add(key, details);
  }

  async add(key, details) {
    const steps = [...details.samples].reverse().map(String);
    if (details.has_end_sample) steps.unshift(END);
    const model = { key, name: key.slice(key.indexOf("/") + 1), steps, step: steps[0], samples: [] };
    this.models.push(model);
    await this.load(model);
  }

  async load(model) {
    model.samples = model.step === undefined ? [] : (await get("/api/samples", { key: model.key, step: model.step })).samples;
    this.draw();
  }

  draw() {
    const prompts = [...new Set(this.models.flatMap((model) => model.samples.map((row) => row.prompt)))];
    const rows = prompts.map((prompt) => h("div", { class: "sample" }, h("b", null, prompt || "(no prompt)"), this.row(this.models.map((model) => this.answer(model, prompt)))));
    this.place.replaceChildren(this.row(this.models.map((model) => this.head(model))), ...rows);
    this.other.hidden = this.models.length >= MAX_MODELS;
  }

  row(cells) {
    const row = h("div", { class: "models" }, ...cells);
    row.style.setProperty("--models", String(this.models.length));
    return row;
  }

  answer(model, prompt) {
    const found = model.samples.find((row) => row.prompt === prompt);
    return found ? h("pre", null, found.answer) : h("p", { class: "muted" }, "Not asked at this step");
  }

  head(model) {
    const label = (step) => (step === END ? "End of the run" : `Step ${count(Number(step))}`);
    const choice = h("select", { "aria-label": `Step of ${model.name}` }, ...model.steps.map((step) => h("option", { value: step, selected: step === model.step }, label(step))));
    choice.addEventListener("change", () => {
      model.step = choice.value;
      this.load(model).catch((problem) => notice("view", problem));
    });
    const remove = h("button", { type: "button", class: "copy", title: `Remove ${model.name}` }, "Remove");
    remove.addEventListener("click", () => {
      this.models = this.models.filter((each) => each !== model);
      this.draw();
    });
    const isOnly = this.models.length === 1;
    return h("div", { class: "toolbar" }, isOnly ? null : h("b", null, model.name), model.steps.length ? choice : h("span", { class: "muted" }, "No samples"), model === this.models[0] ? null : remove);
  }
}
