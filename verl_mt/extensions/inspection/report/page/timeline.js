// The timeline of one step: what each conversation did when, and the chain that held the step; of a run that samples
// ahead, what the trainer and each engine did meanwhile, for this step and for others.
"use strict";

const Timeline = (() => {
  const { el, svg, seconds, number } = Dom;
  const PHASES = ["queue", "prefill", "decode", "tool", "interaction", "reward"];
  const ROW = 12;
  const TRAINER = ["rollout", "ref", "advantages", "update", "weights"];
  const WAITS = ["rollout", "validation"]; // while others sample
  const VALIDATION = "a validation";
  const view = { order: "end" };

  const stepsOf = (run) => [...new Set(Store.state.rollouts.filter((r) => r.run === run && r.split === "train").map((r) => r.step))];

  async function render(node, runNumber, stepNumber) {
    const run = Store.state.runs[runNumber] ?? Store.state.runs[0];
    const steps = stepsOf(run.number);
    if (!steps.length) {
      Dom.replace(node, el("h2", {}, "Timeline"), el("p", { class: "quiet" }, "There are no training rollouts."));
      return;
    }
    const step = steps.includes(stepNumber) ? stepNumber : steps.at(-1);
    const asked = location.hash;
    Dom.replace(node, el("p", { class: "quiet" }, "opening…"));
    const rollouts = Store.state.rollouts.filter((r) => r.run === run.number && r.split === "train" && r.step === step);
    const all = await Promise.all(rollouts.map((r) => Store.details(r)));
    const lanes = rollouts.map((r, k) => ({ rollout: r, spans: all[k].spans })).filter((lane) => lane.spans.length);
    const engines = lanes.length ? await sampled(run, step) : new Map();
    if (location.hash !== asked) return; // the reader has gone on
    const critical = run.critical[step] ?? null;
    const measured = run.metrics.find((m) => m.step === step) ?? {};
    Dom.replace(node, el("h2", {}, "Timeline"), controls(run, steps, step),
      lanes.length ? [words(critical, measured), beside(run, measured, engines, unknown(run, steps, step)), phases(run, engines),
        chart(lanes, critical, run, step, engines)]
        : el("p", { class: "quiet" }, "The rows of this step hold no time spans."));
  }

  function controls(run, steps, step) {
    const go = (r, s) => { location.hash = `#/timeline/${r}/${s}`; };
    const at = steps.indexOf(step);
    return el("div", { class: "controls" },
      Store.state.runs.length > 1 && [el("label", { for: "t-run" }, "Run "),
        el("select", { id: "t-run", onchange: (e) => go(e.target.value, step) },
          Store.state.runs.map((r) => el("option", { value: r.number, selected: r === run }, r.label)))],
      el("label", { for: "t-step" }, "Step "),
      el("select", { id: "t-step", onchange: (e) => go(run.number, e.target.value) },
        steps.map((s) => el("option", { value: s, selected: s === step }, s))),
      el("button", { disabled: at === 0, onclick: () => go(run.number, steps[at - 1]) }, "Previous"),
      el("button", { disabled: at === steps.length - 1, onclick: () => go(run.number, steps[at + 1]) }, "Next"),
      el("label", { for: "t-order" }, "Order "),
      el("select", { id: "t-order", onchange: (e) => { view.order = e.target.value; App.route(); } },
        [["end", "who ended last first"], ["prompt", "by prompt"]].map(([v, t]) =>
          el("option", { value: v, selected: v === view.order }, t))));
  }

  function words(critical, measured) {
    if (!critical) return null;
    const share = Object.entries(critical.phase_share ?? {}).filter(([, s]) => s >= 0.005).sort((a, b) => b[1] - a[1])
      .map(([phase, s]) => `${phase} ${number(100 * s, 2)} %`).join(", ");
    return el("div", { class: "note" }, el("p", {}, el("strong", {}, "What held this rollout: "), critical.words),
      Number.isFinite(measured["critical_path/without_s"]) && el("p", {},
        `The whole step, update and all, took ${seconds(measured["time/step_s"])}. Without it: ${seconds(measured["critical_path/without_s"])}.`),
      share && el("p", { class: "quiet" }, `Time of all conversations: ${share}.`));
  }

  // Steps that were sampled while earlier ones were trained say when they began, on the conversations' clock.
  const timed = (run) => run.metrics.filter((m) => Number.isFinite(m["time/begun_s"]));

  // How many steps are sampled ahead; 0 where nobody says.
  const ahead = (run) => (timed(run).length && Number(run.max_staleness)) || 0;

  // The rollouts that engines may have sampled beside a step's: of as many steps before and behind it as are sampled
  // ahead, and of the validations since its first one could begin.
  function near(run, step) {
    const k = ahead(run);
    return Store.state.rollouts.filter((r) => r.run === run.number
      && (r.split === "train" ? Math.abs(r.step - step) <= k : r.step >= step - k - 1 && r.step < step));
  }

  // The steps among them whose rollouts are not here: not trained yet, or left out of the report.
  function unknown(run, steps, step) {
    const last = run.finished ? run.metrics.at(-1)?.step : Number(run.total_steps) || Infinity;
    const found = [];
    for (let s = Math.max(1, step - ahead(run)); s <= Math.min(step + ahead(run), last); s++) if (!steps.includes(s)) found.push(s);
    return found;
  }

  // What each engine sampled: name ("" where there is one) -> [from, to, step] of every turn.
  async function sampled(run, step) {
    const engines = new Map();
    if (!ahead(run)) return engines;
    for (const r of near(run, step)) {
      const { spans, replicas } = await Store.spans(r);
      for (const [phase, from, to, turn] of spans) {
        if (phase !== "prefill" && phase !== "decode") continue;
        const name = replicas.length ? replicas[turn - 1] : "";
        if (name === undefined) continue; // a turn of another part of the conversation, whose row knows who sampled it
        if (!engines.has(name)) engines.set(name, []);
        engines.get(name).push([from, to, r.split === "train" ? r.step : VALIDATION]);
      }
    }
    return new Map([...engines].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })));
  }

  // One engine's turns as pieces that do not overlap: when it sampled for the same steps, in [start, end].
  function pieces(turns, step, start, end) {
    const edges = turns.filter(([from, to]) => from < end && to > start)
      .flatMap(([from, to, s]) => [[Math.max(from, start), 1, s], [Math.min(to, end), -1, s]]).sort((a, b) => a[0] - b[0]);
    const running = new Map(); // step -> how many of its turns
    const found = [];
    let since = start;
    for (const [at, change, s] of edges) {
      if (at > since && running.size) {
        const own = running.has(step);
        if (found.at(-1)?.to !== since || found.at(-1).own !== own) found.push({ from: since, own, steps: new Set() });
        found.at(-1).to = at;
        for (const one of running.keys()) found.at(-1).steps.add(one);
      }
      running.set(s, (running.get(s) ?? 0) + change);
      if (!running.get(s)) running.delete(s);
      since = at;
    }
    return found;
  }

  const nameOf = (engine, engines) => engine || (engines.size === 1 ? "engine" : "an engine without a name");
  const listed = (words) => [words.slice(0, -1).join(", "), ...words.slice(-1)].filter((part) => part !== "").join(" and ");
  const stepWords = (numbers) => `${numbers.length === 1 ? "step" : "steps"} ${listed(numbers)}`;

  function whose(steps, own) {
    const others = [...steps].filter((s) => s !== own && s !== VALIDATION).sort((a, b) => a - b);
    return [steps.has(own) && "this step", others.length && stepWords(others), steps.has(VALIDATION) && VALIDATION].filter(Boolean).join(" and ");
  }

  function rowsAbove(engines) {
    if (!engines.size) return "The uppermost row is the trainer.";
    const names = [...engines.keys()].map((engine) => nameOf(engine, engines));
    const several = `below it are the ${names.length} engines${names.length > 4 ? "" : ` (${listed(names)})`}`;
    const below = names.length === 1 ? "the one below it the engine" : several;
    return `The uppermost row is the trainer, ${below}. Where an engine's row is blank, it sampled nothing that came to these rows.`;
  }

  function beside(run, measured, engines, missing) {
    if (!timed(run).length) return null;
    return el("div", { class: "note" }, el("p", {}, el("strong", {}, "Sampled while earlier steps were trained. "),
      `For this step the trainer waited ${seconds(measured["staleness/trainer_wait_s"])} of ${seconds(measured["time/step_s"])}; `
      + `its tokens are ${number(measured["staleness/mean"], 2)} updates old on average, ${number(measured["staleness/max"], 2)} at most. `
      + rowsAbove(engines)),
      engines.size > 0 && missing.length > 0 && el("p", {}, `What engines sampled for ${stepWords(missing)} is missing there: this report has no rollouts of ${missing.length === 1 ? "it" : "them"}.`));
  }

  function phases(run, engines) {
    const sign = (swatch, text) => el("span", { class: "sign" }, el("span", { class: `swatch ${swatch}` }), text);
    const trainer = timed(run).length && [sign("trainer-works", "trainer works"), sign("trainer-waits", "trainer waits"),
      engines.size > 0 && [sign("engine-own", "engine samples for this step"), sign("engine-others", "engine samples for others only")]];
    return el("div", { class: "legend" }, PHASES.map((p) => sign(`phase-${p}`, p)), trainer || sign("path", "critical path"));
  }

  // What the trainer did meanwhile, for this step and for others: [step, what, from, to].
  function trainer(run, start, end) {
    const found = [];
    const lines = timed(run);
    for (const [k, m] of lines.entries()) {
      let at = m["time/begun_s"];
      const spend = (name, took) => {
        if (took > 0 && at < end && at + took > start) found.push([m.step, name, Math.max(at, start), Math.min(at + took, end)]);
        if (took > 0) at += took;
      };
      for (const name of TRAINER) spend(name, m[`time/${name}_s`]);
      spend("the rest", m["time/begun_s"] + m["time/step_s"] - at);
      spend("validation", m["time/validate_s"]);
      // It is written when the step's line is, too: its time is in the next one.
      if (lines[k + 1]?.step === m.step + 1) spend("checkpoint", lines[k + 1]["time/checkpoint_s"]);
    }
    return found;
  }

  const bar = (cls, scale, from, to, y, height, about) => svg("rect",
    { x: scale(from), y, width: Math.max(scale(to) - scale(from), 0.8), height, class: cls, "data-about": about });

  // The rows above the conversations: the trainer's, and one per engine.
  function above(busy, engines, step, scale, start, end) {
    const span = (from, to) => `${seconds(to - from)}, from ${seconds(from - start)} on`;
    const trainer = busy.map(([of, name, from, to]) => bar(WAITS.includes(name) ? "trainer-waits" : "trainer-works", scale, from, to, 2, ROW + 4,
      `trainer, step ${of}: ${WAITS.includes(name) ? `waits for its ${name}` : name}, ${span(from, to)}`));
    return [...trainer, ...[...engines].map(([engine, turns], k) => {
      const [name, y] = [nameOf(engine, engines), (2 + k) * ROW];
      return svg("g", { class: "engine" }, bar("engine-back", scale, start, end, y, ROW, `${name}: nothing that came to these rows`),
        pieces(turns, step, start, end).map((p) => bar(`engine-${p.own ? "own" : "others"}`, scale, p.from, p.to, y + 1, ROW - 2,
          `${name}: samples for ${whose(p.steps, step)}, ${span(p.from, p.to)}`)));
    })];
  }

  function chart(lanes, critical, run, step, engines) {
    const start = Math.min(...lanes.flatMap((lane) => lane.spans.map((s) => s[1])));
    const end = Math.max(...lanes.flatMap((lane) => lane.spans.map((s) => s[2])));
    const on = new Set((critical?.segments ?? []).map((s) => s.trajectory_id));
    const last = (lane) => Math.max(...lane.spans.filter((s) => s[0] !== "reward").map((s) => s[2]), start);
    if (view.order === "end") lanes.sort((a, b) => on.has(b.rollout.id) - on.has(a.rollout.id) || last(b) - last(a));
    const width = 1000;
    const scale = (t) => (width * (t - start)) / Math.max(end - start, 1e-9);
    const busy = trainer(run, start, end);
    const top = timed(run).length ? (2.5 + engines.size) * ROW : 0;
    const height = lanes.length * ROW + top + 24;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "timeline",
      style: `height:${height}px`, role: "img",
      "aria-label": `${lanes.length} conversations over ${seconds(end - start)}. ${critical?.words ?? ""}` });
    const about = el("p", { class: "quiet about", role: "status" }, "Point at a bar to read it; click to open the rollout.");
    for (let k = 0; k <= 4; k++) {
      drawing.append(svg("line", { x1: (width * k) / 4, x2: (width * k) / 4, y1: 0, y2: height - 20, class: "grid" }));
    }
    drawing.append(...above(busy, engines, step, scale, start, end));
    lanes.forEach((lane, k) => {
      const row = svg("g", { class: "lane", "data-n": lane.rollout.number });
      row.append(svg("rect", { x: 0, y: top + k * ROW, width, height: ROW, class: "lane-back" }));
      for (const [phase, a, b, turn, name] of lane.spans) {
        row.append(bar(`phase-${phase}`, scale, a, b, top + k * ROW + 2, ROW - 4,
          `${lane.rollout.id}: ${phase}${name ? ` ${name}` : ""}, turn ${turn}, ${seconds(b - a)}, from ${seconds(a - start)} on`));
      }
      row.addEventListener("click", () => { location.hash = App.linkTo(lane.rollout); });
      drawing.append(row);
    });
    drawing.append(...path(lanes, critical, scale, start));
    drawing.addEventListener("pointerover", (event) => {
      if (event.target.dataset.about) about.textContent = event.target.dataset.about;
    });
    const marks = el("div", { class: "ticks quiet" }, [0, 1, 2, 3, 4].map((k) => el("span", {}, seconds(((end - start) * k) / 4))));
    return [el("div", { class: "card" }, about, el("div", { class: "scroll lanes" }, drawing, marks)), chain(critical, lanes)];
  }

  // The critical path as a line from bar to bar.
  function path(lanes, critical, scale, start) {
    const place = new Map(lanes.map((lane, k) => [lane.rollout.id, k]));
    const found = [];
    let before = null;
    for (const s of critical?.segments ?? []) {
      if (!place.has(s.trajectory_id)) continue;
      const y = place.get(s.trajectory_id) * ROW + ROW / 2;
      const [x1, x2] = [scale(start + s.start_s), scale(start + s.end_s)];
      if (before !== null && before !== y) found.push(svg("line", { x1, x2: x1, y1: before, y2: y, class: "path" }));
      found.push(svg("line", { x1, x2, y1: y, y2: y, class: "path" }));
      before = y;
    }
    return found;
  }

  // The same in words, a row per piece.
  function chain(critical, lanes) {
    if (!critical?.segments?.length) return null;
    const known = new Map(lanes.map((lane) => [lane.rollout.id, lane.rollout]));
    return el("section", {}, el("h3", {}, "The critical path"), el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["from", "took", "phase", "turn", "rollout"].map((h) =>
        el("th", { scope: "col", class: ["phase", "rollout"].includes(h) ? "" : "num" }, h)))),
      el("tbody", {}, critical.segments.map((s) => el("tr", {},
        el("td", { class: "num" }, seconds(s.start_s)), el("td", { class: "num" }, seconds(s.end_s - s.start_s)),
        el("td", {}, `${s.phase} ${s.name ?? ""}`), el("td", { class: "num" }, s.turn),
        el("td", {}, known.has(s.trajectory_id) ? el("a", { href: App.linkTo(known.get(s.trajectory_id)) }, s.trajectory_id) : s.trajectory_id)))))));
  }

  return { render };
})();
