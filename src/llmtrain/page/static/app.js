// Which view is shown: #/ the runs, #/run/KEY/TAB one run, #/compare/KEY,KEY several, #/sweep/NAME a sweep.

import { notice, openSession, session } from "./api.js";
import { h } from "./dom.js";
import { CompareView } from "./compare.js";
import { RunView } from "./run.js";
import { RunsView } from "./runs.js";
import { SweepView } from "./sweep.js";

const main = document.getElementById("view");
let current = null;
let place = "";

function parse() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (name === "run" && rest.length >= 2) return { name, key: `${rest[0]}/${rest[1]}`, tab: rest[2] ?? "curves" };
  if (name === "compare") return { name, keys: rest.join("/").split(",").filter(Boolean) };
  if (name === "sweep" && rest[0]) return { name, sweep: rest[0] };
  return { name: "runs" };
}

function show() {
  const wanted = parse();
  const target = JSON.stringify({ ...wanted, tab: null });
  if (current && target === place) {
    current.setTab?.(wanted.tab);
    return;
  }
  place = target;
  current?.close();
  for (const key of ["view", "curves", "configs", "local", "cluster"]) notice(key, null);
  main.replaceChildren();
  window.scrollTo(0, 0);
  if (wanted.name === "run") current = new RunView(main, wanted.key, wanted.tab);
  else if (wanted.name === "compare") current = new CompareView(main, wanted.keys);
  else if (wanted.name === "sweep") current = new SweepView(main, wanted.sweep);
  else current = new RunsView(main);
}

async function start() {
  try {
    await openSession();
  } catch (problem) {
    notice("view", problem);
    main.replaceChildren(h("p", { class: "empty" }, "The page cannot be shown."));
    return;
  }
  const cluster = session.cluster ? ` and ${session.cluster.namespace} on ${session.cluster.name}` : "";
  document.getElementById("where").textContent = `${session.root}${cluster}`;
  addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current?.redraw?.());
  show();
}

start();
