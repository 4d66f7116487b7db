// Requests to the server, and the stream of changes.

import { h } from "./dom.js";
import { setServerTime } from "./format.js";

export const session = { csrf: null, root: "", cluster: null };

export class Refused extends Error {
  constructor(status, value) {
    super(value.what ?? `The server answered with status ${status}.`);
    this.status = status;
    this.remedy = value.remedy;
  }
}

async function answerOf(response) {
  let value = {};
  try {
    value = await response.json();
  } catch {
    // not JSON: a proxy in between
  }
  if (!response.ok) throw new Refused(response.status, value);
  return value;
}

export async function get(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined) parameters.append(name, each);
    }
  }
  return answerOf(await fetch(`${path}?${parameters}`, { headers: { accept: "application/json" } }));
}

export async function post(path, body) {
  const headers = { "content-type": "application/json", "x-csrf-token": session.csrf ?? "" };
  return answerOf(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

export async function openSession() {
  Object.assign(session, await get("/api/session"));
  setServerTime(session.now);
}

const connection = document.getElementById("connection");

function showConnection(name, text) {
  connection.className = `connection ${name}`;
  connection.textContent = text;
}

// A stream that is closed while the page is hidden, and continues where it was: browsers allow six connections.
export class Stream {
  constructor(query, handlers, position = "") {
    this.query = query;
    this.handlers = handlers;
    this.position = position;
    this.source = null;
    this.wait = 1000;
    this.onVisible = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.onVisible);
    this.open();
  }

  open() {
    if (this.source || this.isClosed || document.hidden) return;
    const parameters = new URLSearchParams();
    for (const [name, value] of Object.entries(this.query)) {
      for (const each of Array.isArray(value) ? value : [value]) parameters.append(name, each);
    }
    if (this.position) parameters.append("from", this.position);
    const source = new EventSource(`/api/stream?${parameters}`);
    this.source = source;
    source.onopen = () => {
      this.wait = 1000;
      showConnection("live", "live");
    };
    source.onerror = () => this.retry();
    for (const [name, handler] of Object.entries(this.handlers)) {
      source.addEventListener(name, (event) => {
        this.position = event.lastEventId || this.position;
        handler(JSON.parse(event.data));
      });
    }
  }

  // An EventSource gives up after an answer that is not a stream, as while the server restarts.
  async retry() {
    this.pause();
    showConnection("lost", "not connected; trying again");
    try {
      await get("/api/session");
    } catch (problem) {
      if (problem instanceof Refused && problem.status === 401) {
        showConnection("lost", problem.remedy);
        return;
      }
    }
    this.timer = setTimeout(() => this.open(), this.wait);
    this.wait = Math.min(this.wait * 1.7, 15000);
  }

  pause() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  close() {
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.onVisible);
    this.pause();
  }
}

export function notice(key, problem) {
  const box = document.getElementById("notices");
  [...box.children].find((each) => each.dataset.key === key)?.remove();
  if (!problem) return;
  const element = h("div", { class: "notice", role: "alert" }, h("b", null, problem.what ?? problem.message), " ", problem.remedy ?? "");
  element.dataset.key = key;
  box.append(element);
}
