// The list of runs.

import { get, notice, Stream } from "./api.js";
import { h, setText, sparkline } from "./dom.js";
import { count, plural } from "./format.js";
import { CHOSEN, COLUMNS, Columns, HIGHEST_FIRST, sortValue } from "./columns.js";
import { GroupsPanel } from "./groups.js";
import { runLink, stateBadge } from "./state.js";

const BATCH = 80;
const saved = { text: "", state: "", sort: "age", up: false, picked: new Set(), fields: [] };  // as it was, when one comes back

export class RunsView {
  constructor(parent) {
    this.rows = new Map();
    this.cells = new Map();
    this.sparks = new Map();
    this.wanted = new Set();
    this.shown = 0;
    this.order = [];
    this.build(parent);
    this.visible = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "100px" });
    this.end = new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && this.more(), { rootMargin: "600px" });
    this.end.observe(this.sentinel);
    this.stream = new Stream({ view: "runs" }, { runs: (changes) => this.update(changes) });
    this.clock = setInterval(() => this.tick(), 10000);
  }

  build(parent) {
    const search = h("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", value: saved.text });
    search.addEventListener("input", () => this.filter({ text: search.value }));
    this.states = h("select", { "aria-label": "State" });
    this.states.addEventListener("change", () => this.filter({ state: this.states.value }));
    this.total = h("span", { class: "muted" });
    this.compare = h("button", { type: "button", class: "primary", disabled: true }, "Compare");
    this.compare.addEventListener("click", () => {
      location.hash = `#/compare/${[...saved.picked].map(encodeURIComponent).join(",")}`;
    });
    this.columns = new Columns(() => this.showColumns());
    this.groups = new GroupsPanel(saved, () => ({ text: saved.text, state: saved.state }), () => this.showGroups());
    this.head = h("tr", null, h("th", null, ""));
    for (const column of COLUMNS) {
      const arrow = h("span", { class: "arrow" });
      const button = h("button", { type: "button", title: column.title }, column.label, arrow);
      button.addEventListener("click", () => this.sortBy(column.id));
      this.head.append(h("th", { class: column.text && !column.isText ? "number" : "", "data-id": column.id }, column.isFixed ? column.label : button));
    }
    this.body = h("tbody");
    this.sentinel = h("div");
    this.empty = h("p", { class: "loading" }, "Loading");
    this.list = h("section", { class: "card runs" }, h("table", null, h("thead", null, this.head), this.body), this.empty, this.sentinel);
    this.sweeps = h("p", { class: "sweeps muted", hidden: true });
    parent.append(
      this.sweeps, h("div", { class: "toolbar" }, search, this.states, this.groups.choice, this.columns.element, this.total, h("span", { class: "spacer" }), this.compare),
      this.groups.element, this.list,
    );
    this.showSort();
    this.showPicked();
    this.showGroups();
    this.groups.load();
    this.loadSweeps();
  }

  async loadSweeps() {
    try {
      const { sweeps } = await get("/api/sweeps");
      const links = sweeps.flatMap(({ name, is_running: isRunning }) => [" ", h("a", { href: `#/sweep/${encodeURIComponent(name)}` }, name), isRunning ? " (running)" : ""]);
      this.sweeps.replaceChildren("Sweeps:", ...links);
      this.sweeps.hidden = !sweeps.length;
    } catch {
      // the stream shows that the server is away
    }
  }

  showGroups() {
    this.list.hidden = this.groups.isOn;
    this.columns.element.hidden = this.groups.isOn;
    this.groups.element.hidden = !this.groups.isOn;
  }

  showColumns() {
    for (const cell of this.head.querySelectorAll("[data-id]")) cell.hidden = !this.columns.isShown(cell.dataset.id);
    for (const cells of this.cells.values()) this.hideCells(cells);
  }

  hideCells(cells) {
    for (const { id } of CHOSEN) cells[id].hidden = !this.columns.isShown(id);
  }

  update(changes) {
    if (changes.is_all) this.rows.clear();
    for (const row of changes.rows) this.rows.set(row.key, row);
    for (const key of changes.removed) this.rows.delete(key);
    for (const where of ["local", "cluster"]) notice(where, changes.problems.find((each) => each.where === where));
    for (const row of changes.rows) {
      const cells = this.cells.get(row.key);
      if (cells) this.fill(cells, row);
      this.sparks.delete(row.key);
      if (cells?.isVisible) this.wanted.add(row.key);
    }
    this.showStates();
    this.columns.learn([...this.rows.values()]);
    this.arrange();
    this.groups.changed();
    this.loadSparks();
  }

  showStates() {
    const states = [...new Set([...this.rows.values()].map((row) => row.state))].sort();
    const text = states.join();
    if (text === this.statesText) return;
    this.statesText = text;
    this.states.replaceChildren(h("option", { value: "" }, "All states"), ...states.map((state) => h("option", { value: state }, state)));
    this.states.value = saved.state;
  }

  filter(change) {
    Object.assign(saved, change);
    this.arrange();
    this.groups.changed();
  }

  sortBy(id) {
    if (saved.sort === id) saved.up = !saved.up;
    else Object.assign(saved, { sort: id, up: !HIGHEST_FIRST.includes(id) });
    this.showSort();
    this.arrange();
  }

  showSort() {
    for (const cell of this.head.querySelectorAll("th")) {
      const arrow = cell.querySelector(".arrow");
      if (arrow) arrow.textContent = cell.dataset.id === saved.sort ? (saved.up ? " ↑" : " ↓") : "";
    }
  }

  // Puts the rows in order. Elements exist only for the part of the list that has been scrolled to.
  arrange() {
    const text = saved.text.trim().toLowerCase();
    const rows = [...this.rows.values()].filter(
      (row) =>
        (!saved.state || row.state === saved.state) &&
        (!text || `${row.run_id} ${row.name} ${row.state} ${row.why ?? ""} ${row.where} ${row.model ?? ""} ${row.dataset ?? ""}`.toLowerCase().includes(text)),
    );
    const sign = saved.up ? 1 : -1;
    rows.sort((a, b) => {
      const first = sortValue(a, saved.sort), second = sortValue(b, saved.sort);
      const none = (first === null || first === undefined) - (second === null || second === undefined);
      if (none) return none;
      if (first === second) return a.key < b.key ? -1 : 1;
      return first < second ? -sign : sign;
    });
    this.order = rows.map((row) => row.key);
    const all = this.rows.size, found = rows.length;
    setText(this.total, found === all ? plural(all, "run") : `${count(found)} of ${plural(all, "run")}`);
    this.empty.hidden = found > 0;
    setText(this.empty, all ? "No run matches" : "No runs yet");
    this.shown = Math.min(Math.max(BATCH, this.shown), found);
    this.place();
  }

  more() {
    if (this.shown >= this.order.length) return;
    this.shown = Math.min(this.shown + BATCH, this.order.length);
    this.place();
  }

  place() {
    const keys = this.order.slice(0, this.shown);
    const wanted = keys.map((key) => this.element(key));
    const present = [...this.body.children];
    if (present.length !== wanted.length || present.some((each, i) => each !== wanted[i])) this.body.replaceChildren(...wanted);
  }

  element(key) {
    let cells = this.cells.get(key);
    if (!cells) {
      cells = this.make(key);
      this.cells.set(key, cells);
      this.fill(cells, this.rows.get(key));
      this.visible.observe(cells.row);
    }
    return cells.row;
  }

  make(key) {
    const pick = h("input", { type: "checkbox", "aria-label": `Select ${key}`, checked: saved.picked.has(key) });
    pick.addEventListener("change", () => {
      if (pick.checked) saved.picked.add(key);
      else saved.picked.delete(key);
      this.showPicked();
    });
    const cells = { isVisible: false };
    const cell = (name, kind, label = "") => (cells[name] = h("td", { class: kind, "data-label": label }));
    const more = CHOSEN.map((column) => cell(column.id, column.id === "spark" ? "sparkcell" : `detail ${column.isText ? "text" : "number"}`, column.label));
    cells.row = h("tr", { "data-key": key }, h("td", { class: "pick" }, pick), cell("state", "statecell"), cell("name", "name"), cell("progress", "progresscell"), ...more);
    cells.link = h("a", { href: runLink(key) });
    cells.why = h("span", { class: "why" });
    cells.sub = h("span", { class: "sub" });
    cells.name.append(cells.link, cells.why);
    cells.steps = h("span", { class: "sub" });
    cells.bar = h("i");
    cells.track = h("div", { class: "bar" }, cells.bar);
    cells.progress.append(h("div", { class: "progress" }, cells.steps, cells.track));
    this.hideCells(cells);
    return cells;
  }

  fill(cells, row) {
    if (cells.stateText !== row.state) {
      cells.stateText = row.state;
      cells.state.replaceChildren(stateBadge(row.state));
    }
    setText(cells.link, row.run_id);
    cells.link.title = row.name && row.name !== row.run_id ? `${row.run_id} (${row.name}), ${row.where}` : `${row.run_id}, ${row.where}`;
    setText(cells.why, row.why ?? "");
    cells.why.title = row.why ?? "";
    cells.why.hidden = !row.why;
    cells.why.className = `why ${row.state}`;
    setText(cells.steps, row.max_steps ? `${count(row.step)} / ${count(row.max_steps)}` : count(row.step));
    cells.bar.style.width = row.max_steps ? `${Math.min(100, (100 * row.step) / row.max_steps)}%` : "0";
    cells.track.className = `bar ${row.state}`;
    for (const column of CHOSEN) {
      if (!column.text) continue;
      const text = column.text(row);
      setText(cells[column.id], text);
      if (column.isText) cells[column.id].title = text;
      cells[column.id].classList.toggle("none", text === "–" || (column.id === "restarts" && text === "0"));
    }
  }

  tick() {
    for (const [key, cells] of this.cells) if (cells.isVisible && this.rows.has(key)) this.fill(cells, this.rows.get(key));
  }

  // Small curves are read for rows on screen only.
  seen(entries) {
    for (const entry of entries) {
      const key = entry.target.dataset.key, cells = this.cells.get(key);
      if (!cells) continue;
      cells.isVisible = entry.isIntersecting;
      if (entry.isIntersecting && !this.sparks.has(key)) this.wanted.add(key);
      if (!entry.isIntersecting) this.wanted.delete(key);
    }
    this.loadSparks();
  }

  async loadSparks() {
    if (this.isLoading) return;
    this.isLoading = true;
    while (this.wanted.size && !this.isClosed) {
      const keys = [...this.wanted].slice(0, 10);
      for (const key of keys) this.wanted.delete(key);
      try {
        const found = await get("/api/sparks", { key: keys });
        for (const [key, curve] of Object.entries(found)) {
          this.sparks.set(key, curve);
          this.cells.get(key)?.spark.replaceChildren(sparkline(curve));
        }
      } catch {
        break;  // the stream shows that the server is away
      }
    }
    this.isLoading = false;
  }

  showPicked() {
    this.compare.disabled = saved.picked.size < 2;
    this.compare.textContent = saved.picked.size ? `Compare ${plural(saved.picked.size, "run")}` : "Compare";
  }

  close() {
    this.isClosed = true;
    clearInterval(this.clock);
    this.columns.close();
    this.groups.close();
    this.stream.close();
    this.visible.disconnect();
    this.end.disconnect();
  }
}
