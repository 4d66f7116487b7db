// One run: facts, why it is not healthy, and tabs.

import { get, notice, Stream, session } from "./api.js";
import { actionButtons } from "./actions.js";
import { card, command, copyButton, h, setText, tiles } from "./dom.js";
import { CurvesPanel } from "./curves.js";
import { LogPanel } from "./logs.js";
import { RanksPanel, table } from "./ranks.js";
import { SamplesPanel } from "./samples.js";
import { runLink, stateBadge } from "./state.js";
import { ago, beside, bytes, clock, compact, count, duration, left, loss, money, percent, precise } from "./format.js";

const TASK_TILES = 4;
const TABS = { curves: "Curves", ranks: "Ranks and pods", logs: "Logs", samples: "Samples", tasks: "Tasks", config: "Config", files: "Checkpoints and commands" };
const QUIET = ["running", "finished", "not started", "starting", "pending"];
const WHY_SEC = 20;

export class RunView {
  constructor(parent, key, tab) {
    this.key = key;
    this.rank = 0;
    this.parent = parent;
    this.badge = h("span");
    this.actions = h("span", { class: "toolbar" });
    this.facts = h("div", { class: "facts" });
    this.sources = h("div");
    this.why = h("div");
    this.tabs = h("nav", { class: "tabs", "aria-label": "Parts of the run" });
    this.body = h("div");
    const runId = key.slice(key.indexOf("/") + 1);
    parent.append(h("div", { class: "title" }, h("h1", null, runId), this.badge, this.actions), this.facts, this.why, this.sources, this.tabs, this.body);
    document.title = `${runId} · llmtrain`;
    this.start(tab);
    this.clock = setInterval(() => this.row && this.showFacts(), 5000);
    this.whyClock = setInterval(() => this.loadWhy(), WHY_SEC * 1000);
  }

  async start(tab) {
    try {
      const { row, details, actions } = await get("/api/run", { key: this.key });
      this.setRow(row);
      this.details = details;
      this.showFacts();
      this.setActions(actions);
    } catch (problem) {
      notice("view", problem);
      this.body.replaceChildren(h("p", { class: "empty" }, h("a", { href: "#/" }, "All runs")));
      return;
    }
    if (!this.isClosed) this.setTab(this.wanted ?? tab);
  }

  setTab(tab) {
    this.wanted = tab;
    if (!this.details) return;  // `start` shows it
    this.tab = TABS[tab] ? tab : "curves";
    const names = Object.keys(TABS).filter((name) => this.hasContent(name));
    this.tabs.replaceChildren(...names.map((name) => h("a", { href: runLink(this.key, name), "aria-current": name === this.tab ? "page" : null }, name === "ranks" && this.row.where === "local" ? "Ranks" : TABS[name])));
    this.panel?.close?.();
    this.panel = null;
    this.body.replaceChildren();
    this[`show_${this.tab}`]();
  }

  hasContent(tab) {
    if (tab === "tasks") return Boolean(this.details.task_scores?.length);
    return tab !== "samples" || this.details.samples.length || this.details.has_end_sample;
  }

  // The stream sends what the tab shows, from where its data ends.
  follow(query = {}, position = "") {
    this.stream?.close();
    if (this.isClosed) return;
    this.stream = new Stream({ view: "run", key: this.key, ...query }, {
      row: (row) => {
        this.setRow(row);
        this.panel?.setRow?.(row);
      },
      details: (details) => {
        this.details = details;
        this.panel?.setDetails?.(details);
        if (this.tab === "curves") this.panel?.setMarks(this.key, details);
        if (this.tab === "logs") this.panel?.setRanks(details.logs);
      },
      rows: (rows) => this.tab === "curves" && this.panel?.append(rows.key, rows),
      reset: ({ key }) => this.tab === "curves" && this.panel?.reset(key),
      ranks: (ranks) => this.tab === "ranks" && this.panel?.setRanks(ranks),
      log: (chunk) => this.tab === "logs" && this.panel?.append(chunk),
      "log-problem": (problem) => this.tab === "logs" && this.panel?.problem(problem),
      problem: (problem) => notice("view", problem),
    }, position);
  }

  async show_curves() {
    const panel = (this.panel = new CurvesPanel(this.body, [this.key], [this.row.run_id]));
    await panel.load();
    panel.setMarks(this.key, this.details);
    if (this.panel === panel) this.follow({}, panel.position);
  }

  show_ranks() {
    this.panel = new RanksPanel(this.body, (rank) => {
      this.rank = rank;
      location.hash = runLink(this.key, "logs");
    });
    this.panel.setRow(this.row);
    this.panel.setDetails(this.details);
    this.follow({ ranks: "1" });
  }

  async show_logs() {
    const panel = (this.panel = new LogPanel(this.body, this.key, this.rank, (rank) => {
      this.rank = rank;
      this.setTab("logs");
    }));
    panel.setRanks(this.details.logs);
    const end = await panel.load();
    if (this.panel === panel) this.follow({ log: String(this.rank) }, end === null ? "" : `;${end}`);
  }

  show_samples() {
    this.panel = new SamplesPanel(this.body, this.key, this.details);
    this.follow();
  }

  show_tasks() {
    const place = h("div");
    this.body.append(place);
    const draw = (details) => {
      place.replaceChildren(scoresCard(details) ?? "");
    };
    draw(this.details);
    this.panel = { setDetails: draw };
    this.follow();
  }

  async show_config() {
    const other = h("select", { "aria-label": "Compare with" }, h("option", { value: "" }, "Compare with another run"));
    const place = h("div");
    this.body.append(h("div", { class: "toolbar" }, other), card("Config", place));
    this.follow();
    try {
      const [{ config }, list] = await Promise.all([get("/api/config", { key: this.key }), get("/api/runs")]);
      other.append(...list.rows.filter((row) => row.key !== this.key).map((row) => h("option", { value: row.key }, `${row.run_id} (${row.where})`)));
      const show = async () => {
        const second = other.value ? (await get("/api/config", { key: other.value })).config : null;
        place.replaceChildren(configTable(config, second, this.key, other.value));
      };
      other.addEventListener("change", () => show().catch((problem) => notice("view", problem)));
      await show();
    } catch (problem) {
      notice("view", problem);
    }
  }

  show_files() {
    const place = h("div");
    this.body.append(place);
    const draw = (details) => {
      const rows = details.checkpoints.map((each) => [each.name, [each.is_latest && "latest", each.is_best && "best"].filter(Boolean).join(", "), bytes(each.bytes), clock(each.time)]);
      const facts = [["Directory", details.path], ...Object.entries(details.machine), ["git commit", details.git], ["parameters", details.parameters && count(details.parameters)]].filter(([, value]) => value);
      place.replaceChildren(
        card("Commands", ...details.commands.flatMap((each) => [h("span", { class: "muted" }, each.what), command(each.command)])),
        card("Checkpoints", rows.length ? table(["Checkpoint", "", "Size", "Saved"], rows.reverse()) : h("p", { class: "empty" }, "No checkpoint yet")),
        card("Run", table(["", ""], facts)),
      );
    };
    draw(this.details);
    this.panel = { setDetails: draw };
    this.follow();
  }

  setRow(row) {
    const isNewState = this.row?.state !== row.state || this.row?.why !== row.why;
    this.row = row;
    if (isNewState) {
      this.badge.replaceChildren(stateBadge(row.state));
      this.loadWhy();
      if (session.csrf && this.details) this.loadActions();
    }
    notice("view", row.problem ? { what: row.problem } : null);
    this.showFacts();
  }

  showFacts() {
    const row = this.row, isLocal = row.where === "local";
    const all = [
      ["Step", row.max_steps ? `${count(row.step)} / ${count(row.max_steps)}` : count(row.step)],
      ["ETA", left(row)], ["Training loss", loss(row.loss)], ["Validation loss", loss(row.val_loss)],
      ["Best validation loss", loss(row.best_val_loss)], ...scoreFacts(this.details),
      ["Tokens/s, last", compact(row.tokens_per_second)], ["MFU", percent(row.mfu)], ["Parameters", compact(row.parameters)],
      isLocal ? ["Processes", count(row.processes)] : ["Pods × processes", `${row.pods} × ${row.processes}`],
      ["Restarts", row.restarts ? count(row.restarts) : "–"],
      ["GPU-hours", row.gpu_hours === null ? "–" : compact(row.gpu_hours)],
      ["Cost", money(row.cost, row.currency)], ["Cost at the end", money(row.cost_projected, row.currency)],
      ["Peak memory", beside(row.peak_memory_bytes, row.predicted_memory_bytes, bytes)],
      ["Duration", duration(row.seconds)],
      ["Duration at the end", beside(row.state === "running" ? row.total_seconds : null, row.predicted_seconds, duration)],
      ["Predicted duration", row.state === "running" ? "–" : duration(row.predicted_seconds)], ["Started", row.started ? `${ago(row.started)} ago` : "–"],
      ["Updated", row.updated && row.state !== "finished" ? `${ago(row.updated)} ago` : "–"],
      isLocal ? ["Directory", this.details?.path ?? "–"] : ["Namespace", row.where],
    ];
    const facts = all.filter(([, text]) => text !== "–");  // a CPU has no MFU, a finished run no ETA
    const names = facts.map(([name]) => name).join();
    if (this.factNames !== names) tiles(this.facts, facts);
    this.factNames = names;
    facts.forEach(([, text], index) => setText(this.facts.children[index].lastChild, text));
    const sources = JSON.stringify(row.sources ?? []);
    if (this.shownSources !== sources) this.sources.replaceChildren(sourcesCard(row.sources) ?? "");
    this.shownSources = sources;
  }

  setActions(actions) {
    this.actions.replaceChildren(...actionButtons(this.row, actions));
  }

  async loadActions() {
    try {
      this.setActions((await get("/api/run", { key: this.key })).actions);
    } catch {
      this.setActions([]);
    }
  }

  async loadWhy() {
    if (document.hidden || this.isClosed) return;
    const isLocal = this.row.where === "local";
    if (!isLocal && QUIET.includes(this.row.state) && !this.row.why) return this.why.replaceChildren();  // asks the cluster
    try {
      const { why } = await get("/api/why", { key: this.key });
      this.why.replaceChildren(why ? whyCard(why, this.row.state) : "");
    } catch (problem) {
      if (!isLocal) notice("cluster", problem);
    }
  }

  redraw() {
    this.panel?.redraw?.();
  }

  close() {
    this.isClosed = true;
    clearInterval(this.clock);
    clearInterval(this.whyClock);
    this.stream?.close();
    this.panel?.close?.();
    document.title = "llmtrain";
  }
}

// The newest scores on tasks, beside the losses.
export function scoreFacts(details) {
  const newest = details?.task_scores?.at(-1)?.values ?? {};
  return Object.entries(newest).slice(0, TASK_TILES).map(([name, value]) => [name, scoreText(value)]);
}

export function scoresCard(details) {
  const scored = details.task_scores ?? [];
  if (!scored.length) return null;
  const names = [...new Set(scored.flatMap((each) => Object.keys(each.values)))].sort();
  const rows = [...scored].reverse().map((each) => [count(each.step), ...names.map((name) => scoreText(each.values[name]))]);
  return card("Scores on tasks", table(["Step", ...names], rows));
}

function scoreText(value) {
  return value === undefined || value === null ? "–" : value.toFixed(4);
}

// What a run on a mixture has used of each source, and how well it knows it.
export function sourcesCard(sources) {
  if (!sources?.length) return null;
  const columns = [
    ["Used", "share", percent], ["Tokens", "tokens", compact], ["Epochs", "epochs", precise],
    ["Validation loss", "val_loss", loss], ["Bits per byte", "bits_per_byte", precise],
    ["Accuracy", "accuracy", percent], ["Margin", "margin", precise],
  ].filter(([, name]) => sources.some((each) => each[name] != null));
  const rows = sources.map((each) => [each.source, ...columns.map(([, name, text]) => text(each[name]))]);
  return card("Sources", table(["Source", ...columns.map(([title]) => title)], rows));
}

export function whyCard(why, state) {
  return h(
    "section", { class: `card whycard ${state === "interrupted" || state === "running" ? "warn" : ""}` },
    h("h2", { class: "wrap" }, why.what || why.cause),
    h("span", { class: "muted" }, `Cause: ${why.cause}`),
    h("ul", null, ...why.evidence.map((line) => h("li", null, line))),
    why.remedy ? h("div", { class: "remedy" }, h("div", null, h("b", null, "Remedy: "), why.remedy), copyButton(why.remedy)) : null,
  );
}

export function configTable(first, second, firstKey, secondKey) {
  const names = [...new Set([...Object.keys(first), ...Object.keys(second ?? {})])].sort();
  const text = (value) => (value === null || value === undefined ? "–" : String(value));
  const rows = names.map((name) => {
    const differs = second !== null && text(first[name]) !== text(second[name]);
    return { name, differs, cells: second === null ? [text(first[name])] : [text(first[name]), text(second[name])] };
  });
  const shown = second === null ? rows : rows.filter((row) => row.differs);
  if (!shown.length) return h("p", { class: "empty" }, second === null ? "The run has no config.yaml" : "The configs are equal");
  if (second === null) return h("dl", { class: "fields mono" }, ...shown.map(({ name, cells: [value] }) => h("div", null, h("dt", null, name), h("dd", null, value))));
  const head = ["Field", firstKey, secondKey];
  return h("div", { class: "scroll" }, h("table", { class: "plain mono" }, h("thead", null, h("tr", null, ...head.map((each) => h("th", null, each)))), h("tbody", null, ...shown.map((row) => h("tr", null, h("td", null, row.name), ...row.cells.map((cell) => h("td", null, cell)))))));
}
