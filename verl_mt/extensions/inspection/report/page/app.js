// The frame: which view is open (the address after #), the first screen, and, with --serve, fresh data.
"use strict";

const App = (() => {
  const { el, number } = Dom;
  const REFRESH_MS = 5000;
  const VIEWS = [["", "Overview"], ["rollouts", "Rollouts"], ["prompts", "Prompts"], ["timeline", "Timeline"], ["about", "About"]];
  const main = document.querySelector("main");

  const linkTo = (r) => `#/rollout/${r.run}/${encodeURIComponent(r.key)}`;
  const idOf = (r) => `${r.run}/${r.key}`;
  const promptLink = (r, sides = {}) => {
    Store.byPrompt();
    const query = new URLSearchParams(Object.entries(sides).map(([side, other]) => [side, idOf(other)])).toString();
    return `#/prompt/${encodeURIComponent(r.promptKey)}${query && `?${query}`}`;
  };
  const stepLink = (r) => `#/timeline/${r.run}/${r.step}`;
  const tableLink = (filters) => `#/rollouts?${new URLSearchParams(filters)}`;

  function overview(node) {
    const runs = Store.state.runs;
    Dom.replace(node, el("div", { class: "runs" }, runs.map((run) => runCard(run))),
      runs.length > 1 && el("p", { class: "actions" },
        el("a", { class: "button primary", href: "#/prompts" }, "Compare the runs prompt by prompt"),
        el("a", { class: "button", href: "#/about" }, "Compare their configurations")), el("h2", {}, "Curves"), el("div", { id: "curves" }));
    Charts.render(node.querySelector("#curves"));
  }

  // What a stranger wants first: how it went, and the rollouts worth opening.
  function runCard(run) {
    const { runs } = Store.state;
    const of = (name) => run.metrics.map((m) => m[name]).filter(Number.isFinite);
    const { k, text } = Charts.change(of("reward/mean"));
    const own = Store.state.rollouts.filter((r) => r.run === run.number);
    const facts = [[k > 1 ? `reward, first ${k} → last ${k}` : "reward", text],
      ["validation", Charts.change(of("val/accuracy"), 1).text], // each is a mean over many prompts
      ["steps", `${run.metrics.at(-1)?.step ?? 0}${run.total_steps ? ` of ${run.total_steps}` : ""}`],
      ["rollouts shown", number(own.length)], ["model", run.model || "–"]];
    const worst = Store.worst(run.number);
    const shortcuts = Object.keys(Table.FLAGS).map((flag) => [flag, own.filter(Table.FLAGS[flag][1]).length])
      .filter(([, n]) => n).map(([flag, n]) => el("a", { class: "button",
        href: tableLink({ flag, ...(runs.length > 1 ? { run: run.number } : {}) }) }, `${Table.FLAGS[flag][0]} (${n})`));
    return el("section", { class: "card run" },
      el("h2", {}, el("span", { class: "dot", style: { background: Charts.colour(run.number) } }), run.label,
        el("span", { class: "badge calm" }, run.finished ? "finished" : "not over")),
      run.problems.length > 0 && el("ul", { class: "note warn" }, run.problems.map((p) => el("li", {}, p))),
      guardNote(run),
      el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      worst && el("p", { class: "actions" },
        el("a", { class: "button primary", href: linkTo(worst) }, `Open the worst rollout of step ${worst.step}`), shortcuts,
        runs.length < 2 && el("a", { class: "button", href: "#/prompts" }, "Prompts through the steps")));
  }

  // What the collapse guard saw, and where: its signs are metrics.
  function guardNote(run) {
    const signs = new Map();
    for (const metrics of run.metrics) {
      for (const name of Object.keys(metrics)) {
        const sign = name.match(/^collapse\/(?!signs$|rolled_back_to$|words$)(.+)$/);
        if (sign && metrics[name]) signs.set(sign[1], [...(signs.get(sign[1]) ?? []), metrics.step]);
      }
    }
    if (!signs.size) return null;
    const words = [...signs].map(([sign, steps]) =>
      `${sign.replaceAll("_", " ")} (${steps.length > 1 ? `${steps.length} steps, first ${steps[0]}, last ${steps.at(-1)}` : `step ${steps[0]}`})`);
    return el("p", { class: "note bad" }, el("strong", {}, "The collapse guard saw: "), `${words.join(", ")}.`,
      run.metrics.filter((m) => m["collapse/words"]).map((m) => el("div", {}, `Step ${m.step}: ${m["collapse/words"]}`)));
  }

  // The keys in which the configurations of the runs differ.
  function differences() {
    const { runs } = Store.state;
    if (runs.length < 2) return null;
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings ?? {})))]
      .filter((key) => new Set(runs.map((run) => run.settings?.[key])).size > 1);
    const shown = (value) => (value === undefined ? el("span", { class: "quiet" }, "not set") : value.startsWith('"') ? JSON.parse(value) : value);
    return el("section", { class: "settings" }, el("h2", {}, "Keys that differ"), keys.length
      ? el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Keys that differ" }, el("table", { class: "both" },
        el("thead", {}, el("tr", {}, el("th", {}, "key"), runs.map((run) => el("th", {}, run.label)))),
        el("tbody", {}, keys.map((key) => el("tr", {}, el("th", {}, key), runs.map((run) => el("td", {}, shown(run.settings?.[key]))))))))
      : el("p", {}, "The configurations are the same."));
  }

  function about(node) {
    Dom.replace(node, differences(), Store.state.runs.map((run) => el("section", {}, el("h2", {}, run.label),
      el("p", { class: "quiet" }, run.path),
      run.problems.length ? el("ul", {}, run.problems.map((p) => el("li", {}, p))) : el("p", {}, "Nothing is missing."),
      Dom.details("config.yaml", Store.state.runs.length < 2, el("pre", {}, run.config || "(there is none)")))));
  }

  async function route() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const [view, ...rest] = path.split("/");
    for (const link of document.querySelectorAll("nav a")) {
      const on = link.dataset.view === ({ rollout: "rollouts", prompt: "prompts" }[view] ?? view);
      if (on) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.body.classList.remove("heated");
    if (Store.state.sweep) Sweep.render(main);
    else if (view === "rollouts") {
      Table.render(main);
      if (query !== undefined) Table.show(Object.fromEntries(new URLSearchParams(query)));
    } else if (view === "rollout") {
      const number = Store.find(Number(rest[0]), decodeURIComponent(rest[1] ?? ""));
      if (number === undefined) Dom.replace(main, el("p", { class: "note bad" }, "This report has no such rollout."));
      else await Conversation.render(main, Store.state.rollouts[number], new URLSearchParams(query).get("view"));
    } else if (view === "prompts") Prompts.render(main);
    else if (view === "prompt") await Prompts.one(main, decodeURIComponent(rest[0] ?? ""), new URLSearchParams(query));
    else if (view === "timeline") await Timeline.render(main, Number(rest[0] ?? 0), rest[1] === undefined ? null : Number(rest[1]));
    else if (view === "about") about(main);
    else overview(main);
  }

  async function open() {
    scrollTo(0, 0);
    try {
      await route();
    } catch (error) {
      Dom.replace(main, el("p", { class: "note bad" }, `This part of the report cannot be shown: ${error.message}`));
    }
    main.dataset.ready = location.hash || "#";
  }

  async function refresh() {
    try {
      const manifest = await (await fetch("manifest.json")).json();
      const fresh = await Store.load(manifest);
      const status = document.getElementById("live");
      status.textContent = Store.state.sweep ? "live" : `live, ${Store.state.rollouts.length} rollouts`;
      // A reader in the middle of a conversation or of a filter is not disturbed.
      if (fresh && !/^#\/(rollout\/|prompt\/|timeline)/.test(location.hash)) await open();
    } catch (error) {
      document.getElementById("live").textContent = `the server does not answer (${error.message})`;
    }
  }

  async function start() {
    if (typeof DecompressionStream === "undefined") {
      Dom.replace(main, el("p", { class: "note bad" }, "This browser cannot unpack the report (it lacks DecompressionStream); use one of 2023 or newer."));
      return;
    }
    const inline = document.getElementById("manifest");
    Store.state.served = inline === null;
    await Store.load(inline ? JSON.parse(inline.textContent) : await (await fetch("manifest.json")).json());
    const views = Store.state.sweep ? [] : VIEWS;
    Dom.replace(document.querySelector("nav"), views.map(([view, title]) => el("a", { href: `#/${view}`, dataset: { view } }, title)));
    addEventListener("hashchange", open);
    await open();
    document.documentElement.dataset.opened = Math.round(performance.now());
    if (Store.state.served) setInterval(refresh, REFRESH_MS);
  }

  start().catch((error) => Dom.replace(main, el("p", { class: "note bad" }, `The report cannot be opened: ${error.message}`)));
  return { linkTo, promptLink, stepLink, tableLink, route: open };
})();
