// The table of rollouts: filter, search, sort, a page at a time.
"use strict";

const Table = (() => {
  const { el, number, seconds } = Dom;
  const PAGE = 100;
  const COLUMNS = [
    // key, heading, how a cell reads, class ("wide" goes first on narrow screens)
    ["run", "run", (r) => Store.state.runs[r.run].label, "text"],
    ["step", "step", (r) => number(r.step), "num"],
    ["split", "pass", (r) => r.split, "text wide"],
    ["id", "rollout", (r) => r.id, "text id"],
    ["question", "question", (r) => r.question, "text long"],
    ["answer", "answer", (r) => r.answer, "text long"],
    ["truth", "truth", (r) => r.truth ?? "–", "text long"],
    ["reward", "reward", (r) => number(r.reward), "num"],
    ["part", "part", (r) => number(partOf(r)), "num"],
    ["stop", "stop reason", (r) => r.stop.replaceAll("_", " "), "text wide"],
    ["turns", "turns", (r) => number(r.turns), "num wide"],
    ["calls", "calls", (r) => number(r.calls), "num wide"],
    ["faults", "errors", (r) => number(r.faults), "num wide"],
    ["tokens", "tokens", (r) => number(r.tokens), "num wide"],
    ["trained", "trained", (r) => number(r.trained), "num wide"],
    ["advantage", "advantage", (r) => number(r.advantage), "num wide"],
    ["ratio", "max ratio", (r) => number(r.ratio, 4), "num wide"],
    ["edge_ratio", "at a tool", (r) => number(r.edge_ratio, 4), "num wide"],
    ["mismatch", "mismatch", (r) => r.mismatch.join(", ").replaceAll("_", " "), "text wide"],
    ["seconds", "time", (r) => seconds(r.seconds), "num wide"],
    ["data", "data", (r) => r.data, "text wide"],
    ["row", "row", (r) => (r.row < 0 ? "–" : number(r.row)), "num wide"],
  ];
  const TRUNCATED = (r) => r.status === "truncated";
  const FLAGS = {
    truncated: ["cut off by a limit", TRUNCATED],
    failed: ["failed or aborted", (r) => r.status === "failed" || r.status === "aborted"],
    edge: ["ratio > 2 at a tool boundary", (r) => r.edge_ratio > 2],
    ratio: ["ratio > 2 anywhere", (r) => r.ratio > 2],
    mismatch: ["tokenization mismatch", (r) => r.mismatch.length > 0],
    faults: ["a tool call failed", (r) => r.faults > 0],
    untrained: ["no trained token", (r) => r.trained === 0],
  };
  const view = { sort: "step", down: true, page: 0, filters: {}, hits: null, asked: 0 };
  let rows = []; // the rollouts that pass, in order
  let node = null;
  let headed; // the part of the reward that the shown header names

  const partOf = (r) => r.parts[view.filters.part]; // the number of the reward that the filters name

  // What passes all filters but the search.
  function passes(r, f) {
    if (f.run !== undefined && f.run !== "" && r.run !== Number(f.run)) return false;
    if (f.split && r.split !== f.split) return false;
    if (f.from && r.step < Number(f.from)) return false;
    if (f.to && r.step > Number(f.to)) return false;
    if (f.low && !(r.reward >= Number(f.low))) return false;
    if (f.high && !(r.reward !== null && r.reward <= Number(f.high))) return false;
    if (f.part && partOf(r) === undefined) return false;
    if (f.part && ((f.partlow && partOf(r) < Number(f.partlow)) || (f.parthigh && partOf(r) > Number(f.parthigh)))) return false;
    if (f.data && r.data !== f.data) return false;
    if (f.entry && r.entry !== f.entry) return false;
    if (f.row && r.row !== Number(f.row)) return false;
    if (f.stop && r.stop !== f.stop) return false;
    if (f.tool && !(f.tool === "(none)" ? r.tools.length === 0 : r.tools.includes(f.tool))) return false;
    if (f.cause && !r.mismatch.includes(f.cause)) return false;
    if (f.group && r.group !== f.group) return false;
    return !f.flag || FLAGS[f.flag][1](r);
  }

  const count = (flag) => Store.state.rollouts.filter(FLAGS[flag][1]).length;

  function order(a, b) {
    const [x, y] = view.sort === "part" ? [partOf(a), partOf(b)] : [a[view.sort], b[view.sort]];
    const missing = (v) => v === null || v === undefined;
    if (missing(x) || missing(y)) return missing(x) - missing(y) || a.number - b.number; // always at the end
    const less = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return (view.down ? -less : less) || a.number - b.number;
  }

  function refresh() {
    rows = Store.state.rollouts.filter((r) => (!view.hits || view.hits.has(r.number)) && passes(r, view.filters));
    rows.sort(order);
    view.page = Math.min(view.page, Math.max(0, Math.ceil(rows.length / PAGE) - 1));
    draw();
  }

  async function search(text, status) {
    const asked = ++view.asked;
    view.filters.text = text;
    view.page = 0;
    if (!text.trim()) {
      view.hits = null;
      status.textContent = "";
      refresh();
      return;
    }
    status.textContent = "searching…";
    const hits = await Store.search(text.trim(), (share) => {
      if (asked === view.asked) status.textContent = `searching… ${Math.round(100 * share)} %`;
    }, () => asked !== view.asked);
    if (hits === null) return;
    view.hits = hits;
    status.textContent = `${hits.size} with this text`;
    refresh();
  }

  function draw() {
    if (headed !== view.filters.part) Dom.replace(node.querySelector("thead"), header());
    const body = node.querySelector("tbody");
    const shown = rows.slice(view.page * PAGE, (view.page + 1) * PAGE);
    Dom.replace(body, shown.map(line));
    for (const head of node.querySelectorAll("th")) {
      const on = head.dataset.key === view.sort;
      head.setAttribute("aria-sort", on ? (view.down ? "descending" : "ascending") : "none");
    }
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    node.querySelector(".count").textContent = `${rows.length} of ${Store.state.rollouts.length} rollouts`;
    node.querySelector(".pages").textContent = `page ${view.page + 1} of ${pages}`;
    node.querySelector(".back").disabled = view.page === 0;
    node.querySelector(".forth").disabled = view.page >= pages - 1;
    node.querySelector(".empty").hidden = rows.length > 0;
  }

  // Roles are written out: on narrow screens the table is laid out as cards, and a browser then forgets them.
  function line(r) {
    return el("tr", { role: "row", onclick: (event) => { if (!event.target.closest("a")) location.hash = App.linkTo(r); } },
      columns.map(([key, title, read, kind]) => el("td", { role: "cell", class: `${kind} c-${key}`,
        title: kind.includes("long") && read(r), dataset: { title } }, key === "id" ? el("a", { href: App.linkTo(r) }, read(r)) : read(r))));
  }

  // Columns that would say nothing are left out.
  const HIDDEN = {
    run: () => Store.state.runs.length < 2,
    part: () => !view.filters.part,
    truth: () => Store.state.rollouts.every((r) => r.truth === null),
    data: () => distinct((r) => r.data).length < 2,
  };
  let columns = []; // the shown ones

  function header() {
    columns = COLUMNS.filter(([key]) => !HIDDEN[key]?.());
    headed = view.filters.part;
    return el("tr", { role: "row" }, columns.map(([key, title, , kind]) =>
      el("th", { role: "columnheader", scope: "col", class: `${kind} c-${key}`, dataset: { key } },
        el("button", { onclick: () => {
          view.down = view.sort === key ? !view.down : kind.startsWith("num");
          view.sort = key;
          refresh();
        } }, key === "part" ? view.filters.part : title))));
  }

  const options = (values, none) => [el("option", { value: "" }, none), values.map((v) => el("option", { value: v }, v))];
  const distinct = (of) => [...new Set(Store.state.rollouts.flatMap(of))].filter((v) => v !== "").sort();

  function filters() {
    const bind = (name, control, id = `f-${name}`) => {
      control.id = id;
      control.value = view.filters[name] ?? "";
      control.addEventListener("input", () => {
        view.filters[name] = control.value;
        view.page = 0;
        refresh();
      });
      return control;
    };
    const field = (name, label, control) => el("div", { class: "field" },
      el("label", { for: `f-${name}` }, label), bind(name, control));
    const range = (low, high, label, step) => el("div", { class: "field", role: "group", "aria-label": label },
      el("label", { for: `f-${low}` }, label),
      el("span", { class: "range" },
        bind(low, el("input", { type: "number", step, placeholder: "from", "aria-label": `${label} from` })),
        bind(high, el("input", { type: "number", step, placeholder: "to", "aria-label": `${label} to` }))));
    const runs = Store.state.runs;
    const parts = distinct((r) => Object.keys(r.parts));
    return el("div", { class: "filters" },
      field("flag", "Show", el("select", {}, el("option", { value: "" }, "all rollouts"),
        Object.keys(FLAGS).map((f) => el("option", { value: f }, `${FLAGS[f][0]} (${count(f)})`)))),
      runs.length > 1 && field("run", "Run", el("select", {}, el("option", { value: "" }, "all runs"),
        runs.map((run) => el("option", { value: run.number }, run.label)))),
      field("split", "Pass", el("select", {}, options(distinct((r) => r.split), "training and validation"))),
      range("from", "to", "Step", 1),
      range("low", "high", "Reward", "any"),
      parts.length > 0 && [field("part", "Reward part", el("select", {}, options(parts, "any"))), range("partlow", "parthigh", "Value of the part", "any")],
      field("data", "Data source", el("select", {}, options(distinct((r) => r.data), "any"))),
      distinct((r) => r.entry).length > 1 && field("entry", "Data file", el("select", {}, options(distinct((r) => r.entry), "any"))),
      field("row", "Data row", el("input", { type: "number", step: 1, min: 0, class: "short" })),
      field("stop", "Stop reason", el("select", {}, options(distinct((r) => r.stop), "any"))),
      field("tool", "Tool used", el("select", {}, options([...distinct((r) => r.tools), "(none)"], "any"))),
      field("cause", "Mismatch cause", el("select", {}, options(distinct((r) => r.mismatch), "any"))));
  }

  function searchBox() {
    const status = el("span", { class: "quiet", role: "status", id: "search-status" });
    let waiting = 0;
    const box = el("input", { type: "search", id: "search", value: view.filters.text ?? "",
      placeholder: "text in any message, call, answer, truth or id", oninput: (event) => {
        clearTimeout(waiting);
        waiting = setTimeout(() => search(event.target.value, status), 250);
      } });
    return el("div", { class: "searchbox" }, el("label", { for: "search" }, "Search"), box, status,
      el("button", { class: "plain", onclick: () => show({}) }, "Clear all"));
  }

  function page(by) {
    view.page += by;
    draw();
    node.querySelector("table").scrollIntoView({ block: "nearest" });
  }

  // Show the table with these filters (from a link), or as it was left.
  function show(given) {
    if (given) {
      const { sort, up, ...chosen } = given;
      Object.assign(view, { filters: chosen, hits: null, page: 0, asked: view.asked + 1 });
      if (sort) Object.assign(view, { sort, down: up === undefined });
    }
    render(node);
  }

  function render(target) {
    node = target;
    Dom.replace(node, el("h2", {}, "Rollouts"), searchBox(),
      Dom.details("Filters", matchMedia("(min-width: 700px)").matches || Object.keys(view.filters).length > 0, filters()),
      el("div", { class: "pager" }, el("span", { class: "count", role: "status" }),
        el("span", { class: "steps" }, el("button", { class: "back", onclick: () => page(-1) }, "Previous"),
          el("span", { class: "pages" }), el("button", { class: "forth", onclick: () => page(1) }, "Next"))),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of rollouts" },
        el("table", { class: "rollouts", role: "table" }, el("caption", { class: "hidden" }, "Rollouts; column headings sort"),
          el("thead", { role: "rowgroup" }, header()), el("tbody", { role: "rowgroup" }))),
      el("p", { class: "empty quiet", hidden: true }, "No rollout passes these filters."));
    refresh();
  }

  return { render, show, count, FLAGS, current: () => rows };
})();
