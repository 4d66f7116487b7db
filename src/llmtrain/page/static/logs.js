// The log of one rank: its end, and more when one scrolls up. Only some hundred lines are in the page at a time.

import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { bytes, count } from "./format.js";

const MAX_CHUNKS = 6;
const NEAR = 300;

export class LogPanel {
  constructor(parent, key, rank, onRank) {
    this.key = key;
    this.rank = rank;
    this.chunks = [];
    this.isFollowing = true;
    this.ranks = h("select", { "aria-label": "Rank" });
    this.ranks.addEventListener("change", () => onRank(Number(this.ranks.value)));
    const search = h("input", { type: "search", placeholder: "Search the log", "aria-label": "Search the log" });
    search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.search(search.value), 300);
    });
    this.follow = h("button", { type: "button", "aria-pressed": "true" }, "Follow");
    this.follow.addEventListener("click", () => this.toEnd());
    this.place = h("span", { class: "muted" });
    this.note = h("p", { class: "muted wrap", hidden: true });
    this.matches = h("div", { class: "matches", hidden: true });
    this.text = h("pre");
    this.box = h("div", { class: "log", tabindex: "0", role: "log" }, this.text);
    this.box.addEventListener("scroll", () => this.scrolled());
    this.message = h("p", { class: "empty", hidden: true });
    this.element = h("div", null, h("div", { class: "toolbar" }, this.ranks, search, this.follow, this.place), this.note, this.matches, this.message, this.box);
    parent.append(this.element);
  }

  setRanks(ranks) {
    const all = ranks.includes(this.rank) ? ranks : [...ranks, this.rank].sort((a, b) => a - b);
    if (this.ranksText === all.join()) return;
    this.ranksText = all.join();
    this.ranks.replaceChildren(...all.map((rank) => h("option", { value: String(rank) }, `Rank ${rank}`)));
    this.ranks.value = String(this.rank);
  }

  // The end of the file; returns the byte where the stream continues.
  async load() {
    try {
      const chunk = await get("/api/log", { key: this.key, rank: this.rank });
      this.problem(null);
      this.note.hidden = !chunk.note;
      setText(this.note, chunk.note ?? "");
      this.chunks = [];
      this.text.replaceChildren();
      this.add(chunk, true);
      this.toBottom();
      return chunk.end;
    } catch (problem) {
      this.problem(problem);
      return null;
    }
  }

  problem(problem) {
    this.message.hidden = !problem;
    this.box.hidden = Boolean(problem);
    if (problem) setText(this.message, `${problem.message ?? problem.what} ${problem.remedy ?? ""}`);
  }

  // A chunk that the stream sent.
  append(chunk) {
    this.problem(null);
    this.size = chunk.size;
    if (!this.isFollowing) {
      this.show();
      return;
    }
    this.add(chunk, true);
    this.toBottom();
  }

  add(chunk, isAfter, found = null) {
    if (!chunk.text) {
      this.size = chunk.size;
      this.show();
      return;
    }
    const lines = chunk.text.replace(/\n$/, "").split("\n").map(lineElement);
    if (found !== null) lines[0].classList.add("found");
    const part = h("span", null, ...lines);
    const entry = { begin: chunk.begin, end: chunk.end, part };
    if (isAfter) {
      this.text.append(part);
      this.chunks.push(entry);
      while (this.chunks.length > MAX_CHUNKS) this.chunks.shift().part.remove();
    } else {
      const before = this.box.scrollHeight;
      this.text.prepend(part);
      this.box.scrollTop += this.box.scrollHeight - before;
      this.chunks.unshift(entry);
      while (this.chunks.length > MAX_CHUNKS) this.chunks.pop().part.remove();
    }
    this.size = chunk.size;
    this.show();
  }

  show() {
    const begin = this.chunks[0]?.begin ?? 0, end = this.chunks[this.chunks.length - 1]?.end ?? 0;
    setText(this.place, this.size ? `${bytes(end - begin)} of ${bytes(this.size)} loaded` : "The log is empty");
    this.follow.setAttribute("aria-pressed", String(this.isFollowing));
  }

  async scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 8;
    if (this.isBusy) return;
    const first = this.chunks[0], last = this.chunks[this.chunks.length - 1];
    if (isAtEnd && last && last.end >= this.size) this.isFollowing = true;
    else if (!isAtEnd) this.isFollowing = false;
    this.show();
    if (scrollTop < NEAR && first && first.begin > 0) await this.more({ before: first.begin }, false);
    else if (isAtEnd && last && last.end < this.size) await this.more({ after: last.end }, true);
  }

  async more(where, isAfter) {
    this.isBusy = true;
    try {
      this.add(await get("/api/log", { key: this.key, rank: this.rank, ...where }), isAfter);
    } catch (problem) {
      this.problem(problem);
    }
    this.isBusy = false;
  }

  async toEnd() {
    this.isFollowing = true;
    await this.load();
  }

  toBottom() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  async search(text) {
    this.wanted = text;
    this.matches.hidden = !text;
    if (!text) return;
    try {
      const { matches, is_complete: isComplete } = await get("/api/log/search", { key: this.key, rank: this.rank, text });
      if (text !== this.wanted) return;
      const found = `${count(matches.length)} ${matches.length === 1 ? "line" : "lines"}, newest first${isComplete ? "" : "; there are more"}`;
      this.matches.replaceChildren(
        h("p", { class: "muted" }, matches.length ? found : "No line contains this text"),
        ...matches.map((match) => h("button", { type: "button", class: "mono", onclick: () => this.jump(match.offset) }, match.line)),
      );
    } catch (problem) {
      this.problem(problem);
    }
  }

  async jump(offset) {
    this.isFollowing = false;
    this.isBusy = true;
    try {
      const chunk = await get("/api/log", { key: this.key, rank: this.rank, at: offset });
      this.chunks = [];
      this.text.replaceChildren();
      this.add(chunk, true, offset);
      this.box.scrollTop = 0;
    } catch (problem) {
      this.problem(problem);
    }
    this.isBusy = false;
  }

  close() {
    clearTimeout(this.timer);
    this.element.remove();
  }
}

function lineElement(text) {
  const kind = /\b(ERROR|Error|Traceback|CRITICAL|error:)/.test(text) ? " error" : /\b(WARNING|warning)\b/.test(text) ? " warning" : "";
  const tag = /^(.{0,40}?)(\[[A-Z0-9]+\])([\s\S]*)$/.exec(text);
  const parts = tag ? [tag[1], h("span", { class: "tag" }, tag[2]), tag[3]] : [text || "\u00a0"];
  return h("span", { class: `line${kind}` }, ...parts);
}
