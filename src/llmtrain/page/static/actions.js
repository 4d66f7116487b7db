// Stop, resume, recover and delete: only with --allow-actions, and after a confirmation that names the run.

import { notice, post, Refused } from "./api.js";
import { h } from "./dom.js";

const LABELS = { stop: "Stop", resume: "Resume", recover: "Recover", delete: "Delete" };

export function actionButtons(row, actions) {
  return actions.map((action) =>
    h("button", { type: "button", class: action === "delete" ? "danger" : "", "data-action": action, onclick: () => confirm(row, action) }, LABELS[action]));
}

function confirm(row, action) {
  const name = h("input", { type: "text", autocomplete: "off", "aria-label": "Run id" });
  const run = h("button", { type: "button", class: "danger", disabled: true, "data-confirm": action }, `${LABELS[action]} ${row.run_id}`);
  const cancel = h("button", { type: "button" }, "Cancel");
  const output = h("pre", { hidden: true });
  const dialog = h(
    "dialog", null, h("h2", null, `${LABELS[action]} run ${row.run_id}?`),
    h("p", { class: "muted" }, `Type ${row.run_id} to confirm.`), name, output, h("div", { class: "buttons" }, cancel, run),
  );
  name.addEventListener("input", () => (run.disabled = name.value !== row.run_id));
  cancel.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  run.addEventListener("click", async () => {
    run.disabled = true;
    cancel.textContent = "Close";
    output.hidden = false;
    output.textContent = "Working";
    try {
      const answer = await post("/api/actions", { key: row.key, action, confirm: name.value });
      output.textContent = answer.output;
    } catch (problem) {
      output.textContent = problem instanceof Refused ? `${problem.message} ${problem.remedy ?? ""}` : String(problem);
      notice("action", null);
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}
