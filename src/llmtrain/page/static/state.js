// The state of a run as a badge, and where a run is on the page.

import { h } from "./dom.js";

const WARN = ["interrupted", "stopped", "pending", "starting", "restarting", "suspended", "stopping", "incomplete", "removed"];
const BAD = ["failed", "killed", "unknown", "unreadable"];

export function stateBadge(state) {
  const kind = state === "running" ? "running" : state === "finished" ? "finished" : BAD.includes(state) ? "bad" : WARN.includes(state) ? "warn" : "";
  return h("span", { class: `state ${kind}` }, state);
}

export function runLink(key, tab = "") {
  return `#/run/${key.split("/").map(encodeURIComponent).join("/")}${tab ? `/${tab}` : ""}`;
}
