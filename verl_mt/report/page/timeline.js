// The timeline of one step: what each conversation did when, and the chain that held the step.
"use strict";

const Timeline = (() => {
  const { el, svg, seconds, number } = Dom;
  const PHASES = ["queue", "prefill", "decode", "tool", "interaction", "reward"];
  const ROW = 12;
  const TRAINER = ["rollout", "ref", "advantages", "update", "weights"];
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
    Dom.replace(node, el("p", { class: "quiet" }, "opening…"));
    const rollouts = Store.state.rollouts.filter((r) => r.run === run.number && r.split === "train" && r.step === step);
    const all = await Promise.all(rollouts.map((r) => Store.details(r)));
    const lanes = rollouts.map((r, k) => ({ rollout: r, spans: all[k].spans })).filter((lane) => lane.spans.length);
    const critical = run.critical[step] ?? null;
    const measured = run.metrics.find((m) => m.step === step) ?? {};
    Dom.replace(node, el("h2", {}, "Timeline"), controls(run, steps, step),
      lanes.length ? [words(critical, measured), beside(run, measured), phases(run), chart(lanes, critical, run)]
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
        `The whole step, update and all, took ${seconds(measured["time/step_s"])}; without it, ${seconds(measured["critical_path/without_s"])}.`),
      share && el("p", { class: "quiet" }, `Time of all conversations: ${share}.`));
  }

  // Steps that were sampled while earlier ones were trained say when they began, on the conversations' clock.
  const timed = (run) => run.metrics.filter((m) => Number.isFinite(m["time/begun_s"]));

  function beside(run, measured) {
    if (!timed(run).length) return null;
    return el("div", { class: "note" }, el("p", {}, el("strong", {}, "Sampled while earlier steps were trained. "),
      `For this step the trainer waited ${seconds(measured["staleness/trainer_wait_s"])} of ${seconds(measured["time/step_s"])}; `
      + `its tokens are ${number(measured["staleness/mean"], 2)} updates old on average, ${number(measured["staleness/max"], 2)} at most. `
      + "The uppermost row is the trainer."));
  }

  function phases(run) {
    const trainer = timed(run).length && ["works", "waits"].map((what) =>
      el("span", { class: "sign" }, el("span", { class: `swatch trainer-${what}` }), `trainer ${what}`));
    return el("div", { class: "legend" }, PHASES.map((p) =>
      el("span", { class: "sign" }, el("span", { class: `swatch phase-${p}` }), p)),
      trainer || el("span", { class: "sign" }, el("span", { class: "swatch path" }), "critical path"));
  }

  // What the trainer did meanwhile, for this step and for others: [step, what, from, to].
  function trainer(run, start, end) {
    const found = [];
    for (const m of timed(run)) {
      let at = m["time/begun_s"];
      for (const name of TRAINER) {
        const took = m[`time/${name}_s`] ?? 0;
        if (took > 0 && at < end && at + took > start) found.push([m.step, name, Math.max(at, start), Math.min(at + took, end)]);
        at += took;
      }
      const rest = m["time/begun_s"] + m["time/step_s"];
      if (rest > at && at < end && rest > start) found.push([m.step, "the rest", Math.max(at, start), Math.min(rest, end)]);
    }
    return found;
  }

  function chart(lanes, critical, run) {
    const start = Math.min(...lanes.flatMap((lane) => lane.spans.map((s) => s[1])));
    const end = Math.max(...lanes.flatMap((lane) => lane.spans.map((s) => s[2])));
    const on = new Set((critical?.segments ?? []).map((s) => s.trajectory_id));
    const last = (lane) => Math.max(...lane.spans.filter((s) => s[0] !== "reward").map((s) => s[2]), start);
    if (view.order === "end") lanes.sort((a, b) => on.has(b.rollout.id) - on.has(a.rollout.id) || last(b) - last(a));
    const width = 1000;
    const scale = (t) => (width * (t - start)) / Math.max(end - start, 1e-9);
    const busy = trainer(run, start, end);
    const top = busy.length ? 2 * ROW : 0;
    const height = lanes.length * ROW + top + 24;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "timeline",
      style: `height:${height}px`, role: "img",
      "aria-label": `${lanes.length} conversations over ${seconds(end - start)}. ${critical?.words ?? ""}` });
    const about = el("p", { class: "quiet about", role: "status" }, "Point at a bar to read it; click to open the rollout.");
    for (let k = 0; k <= 4; k++) {
      drawing.append(svg("line", { x1: (width * k) / 4, x2: (width * k) / 4, y1: 0, y2: height - 20, class: "grid" }));
    }
    for (const [step, name, a, b] of busy) {
      const what = name === "rollout" ? "waits for its rollout" : name;
      drawing.append(svg("rect", { x: scale(a), y: 2, width: Math.max(scale(b) - scale(a), 0.8), height: ROW + 4,
        class: `trainer-${name === "rollout" ? "waits" : "works"}`, "data-about": `trainer, step ${step}: ${what}, ${seconds(b - a)}, from ${seconds(a - start)} on` }));
    }
    lanes.forEach((lane, k) => {
      const row = svg("g", { class: "lane", "data-n": lane.rollout.number });
      row.append(svg("rect", { x: 0, y: top + k * ROW, width, height: ROW, class: "lane-back" }));
      for (const [phase, a, b, turn, name] of lane.spans) {
        row.append(svg("rect", { x: scale(a), y: top + k * ROW + 2, width: Math.max(scale(b) - scale(a), 0.8), height: ROW - 4,
          class: `phase-${phase}`, "data-about": `${lane.rollout.id}: ${phase}${name ? ` ${name}` : ""}, turn ${turn}, ${seconds(b - a)}, from ${seconds(a - start)} on` }));
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
      el("thead", {}, el("tr", {}, ["from", "took", "phase", "turn", "rollout"].map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", {}, critical.segments.map((s) => el("tr", {},
        el("td", { class: "num" }, seconds(s.start_s)), el("td", { class: "num" }, seconds(s.end_s - s.start_s)),
        el("td", {}, `${s.phase} ${s.name ?? ""}`), el("td", { class: "num" }, s.turn),
        el("td", {}, known.has(s.trajectory_id) ? el("a", { href: App.linkTo(known.get(s.trajectory_id)) }, s.trajectory_id) : s.trajectory_id)))))));
  }

  return { render };
})();
