// The same prompt through the steps and in several runs: a table of all prompts, and two samples of one beside each other.
"use strict";

const Prompts = (() => {
  const { el, number } = Dom;
  const PAGE = 100;
  const view = { split: null, text: "", sort: "change", down: false, page: 0, runs: [0, 1], all: false };
  let node = null;
  let shown = []; // what passes, in order

  const mean = (values) => (values.length ? values.reduce((sum, v) => sum + v, 0) / values.length : null);
  const rewards = (rollouts) => rollouts.map((r) => r.reward).filter((v) => v !== null && v !== undefined);
  const several = () => Store.state.runs.length > 1;
  const splits = () => [...new Set(Store.state.rollouts.map((r) => r.split))].sort();

  // Of one pass and one run: the mean reward at the first and the last step that had the prompt, or over all.
  function times(rollouts) {
    const steps = [...new Set(rollouts.map((r) => r.step))].sort((a, b) => a - b);
    const at = (step) => mean(rewards(rollouts.filter((r) => r.step === step)));
    return { steps: steps.length, first: at(steps[0]), last: at(steps.at(-1)), all: mean(rewards(rollouts)) };
  }

  // What the table says of a prompt: `before` and `after` are the first and the last time of one run, or two runs.
  function describe(prompt) {
    const own = prompt.rollouts.filter((r) => r.split === view.split);
    if (several()) {
      const [a, b] = view.runs.map((run) => own.filter((r) => r.run === run));
      const of = (some) => (some.length ? times(some)[view.all ? "all" : "last"] : null);
      return line(prompt, [...a, ...b], Math.max(...[a, b].map((some) => times(some).steps)), of(a), of(b));
    }
    const { steps, first, last } = times(own);
    return line(prompt, own, steps, steps > 1 ? first : null, last);
  }

  function line(prompt, rollouts, steps, before, after) {
    const change = before === null || after === null ? null : after - before;
    return { prompt, question: prompt.question, truth: prompt.truth, count: rollouts.length, steps, before, after, change };
  }

  function columns() {
    const truth = shown.some((one) => one.truth !== null);
    const names = several() ? view.runs.map((run) => Store.state.runs[run].label) : ["first time", "last time"];
    return [["question", "question", "text long"], truth && ["truth", "truth", "text long"], ["steps", "steps", "num wide"],
      ["count", "rollouts", "num wide"], ["before", names[0], "num"], ["after", names[1], "num"], ["change", "change", "num"]].filter(Boolean);
  }

  function refresh() {
    const wanted = view.text.trim().toLowerCase();
    shown = [...Store.byPrompt().values()].map(describe).filter((one) => one.count
      && (!wanted || `${one.question}\n${one.truth ?? ""}`.toLowerCase().includes(wanted)));
    shown.sort((a, b) => {
      const [x, y] = [a[view.sort], b[view.sort]];
      if (x === null || y === null) return (x === null) - (y === null);
      const less = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
      return view.down ? -less : less;
    });
    view.page = Math.min(view.page, Math.max(0, Math.ceil(shown.length / PAGE) - 1));
    draw();
  }

  const signed = (value) => (value > 0 ? `+${number(value)}` : number(value).replace("-", "−"));

  function draw() {
    const heads = columns();
    Dom.replace(node.querySelector("thead"), el("tr", { role: "row" }, heads.map(([key, title, kind]) =>
      el("th", { role: "columnheader", scope: "col", class: `${kind} c-${key}`,
        "aria-sort": key === view.sort ? (view.down ? "descending" : "ascending") : "none" },
      el("button", { dataset: { sort: key }, onclick: () => sortBy(key, kind) }, title)))));
    Dom.replace(node.querySelector("tbody"), shown.slice(view.page * PAGE, (view.page + 1) * PAGE).map((one) => {
      const link = linkOf(one);
      return el("tr", { role: "row", onclick: (event) => { if (!event.target.closest("a")) location.hash = link; } },
        heads.map(([key, title, kind]) => el("td", { role: "cell", class: `${kind} c-${key}`, dataset: { title },
          title: kind.includes("long") && one[key] },
        key === "question" ? el("a", { href: link }, one.question || "(no text)")
          : key === "change" ? (one.change === null ? "–" : signed(one.change))
            : typeof one[key] === "string" ? one[key] : number(one[key]))));
    }));
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    Dom.replace(node.querySelector(".words"), words());
    node.querySelector(".pages").textContent = `page ${view.page + 1} of ${pages}`;
    node.querySelector(".back").disabled = view.page === 0;
    node.querySelector(".forth").disabled = view.page >= pages - 1;
    node.querySelector(".empty").hidden = shown.length > 0;
  }

  function sortBy(key, kind) {
    view.down = view.sort === key ? !view.down : kind.startsWith("num") && key !== "change";
    view.sort = key;
    refresh();
    node.querySelector(`[data-sort="${key}"]`).focus();
  }

  // How many got better and worse; with the standard error of the mean change over prompts, the luck in it.
  function words() {
    const both = shown.filter((one) => one.change !== null);
    const [a, b] = several() ? view.runs.map((run) => Store.state.runs[run].label) : [];
    const what = several() ? `in both ${a} and ${b}` : "in more than one step";
    if (!both.length) return `${Dom.count(shown.length, "prompt")}, none of them ${what}.`;
    const changes = both.map((one) => one.change);
    const middle = mean(changes);
    const error = both.length > 1 ? Math.sqrt(mean(changes.map((c) => (c - middle) ** 2)) / (both.length - 1)) : null;
    const count = (test) => changes.filter(test).length;
    return [el("strong", {}, `${number(mean(both.map((o) => o.before)))} → ${number(mean(both.map((o) => o.after)))}`),
      ` (${signed(middle)}${error === null ? "" : `, standard error ${number(error, 2)}`}) over the ${Dom.count(both.length, "prompt")} ${what}: `,
      `${count((c) => c > 0)} better${several() ? ` in ${b}` : ""}, ${count((c) => c < 0)} worse, ${count((c) => c === 0)} the same.`,
      shown.length > both.length && ` ${shown.length - both.length} more are not.`];
  }

  // Which two samples to open: first against last step of one run, or the two runs; of a single time, worst against best.
  function linkOf(one) {
    const own = one.prompt.rollouts.filter((r) => r.split === view.split && (!several() || view.runs.includes(r.run)));
    const [left, right] = pair(own);
    return App.promptLink(right, { left, right });
  }

  function pair(rollouts, right = null) {
    const last = (some) => some.filter((r) => r.step === Math.max(...some.map((o) => o.step)))[0];
    const runs = [...new Set(rollouts.map((r) => r.run))];
    if (!right && runs.length > 1) return runs.slice(0, 2).map((run) => last(rollouts.filter((r) => r.run === run)));
    right ??= last(rollouts);
    const others = rollouts.filter((r) => r.run === right.run && r.split === right.split && r !== right);
    const first = others.find((r) => r.step === Math.min(...others.map((o) => o.step)));
    if (first && first.step < right.step) return [first, right];
    const distance = (r) => Math.abs((r.reward ?? 0) - (right.reward ?? 0));
    return [others.sort((a, b) => distance(b) - distance(a))[0] ?? right, right];
  }

  function controls() {
    const { runs } = Store.state;
    const chooseRun = (place, label) => [el("label", { for: `p-run-${place}` }, label),
      el("select", { id: `p-run-${place}`, onchange: (event) => {
        view.runs[place] = Number(event.target.value);
        refresh();
      } }, runs.map((run) => el("option", { value: run.number, selected: run.number === view.runs[place] }, run.label)))];
    return el("div", { class: "controls" },
      el("label", { for: "p-split" }, "Pass"),
      el("select", { id: "p-split", onchange: (event) => { view.split = event.target.value; refresh(); } },
        splits().map((split) => el("option", { value: split, selected: split === view.split }, split))),
      several() && [chooseRun(0, "Compare"), chooseRun(1, "with"), el("label", { for: "p-of" }, "by the reward of"),
        el("select", { id: "p-of", onchange: (event) => { view.all = event.target.value === "all"; refresh(); } },
          [["last", "its last step with the prompt"], ["all", "all steps with it"]].map(([value, text]) =>
            el("option", { value, selected: view.all === (value === "all") }, text)))],
      el("span", { class: "steps" }, el("label", { for: "p-text" }, "Search"),
        el("input", { type: "search", id: "p-text", value: view.text, placeholder: "text in question or truth",
          oninput: (event) => { view.text = event.target.value; view.page = 0; refresh(); } })));
  }

  // The table of all prompts.
  function render(target) {
    node = target;
    const known = splits();
    if (!known.length) {
      Dom.replace(node, el("h2", {}, "Prompts"), el("p", { class: "quiet" }, "There are no rollouts."));
      return;
    }
    if (!known.includes(view.split)) view.split = ["val", "val_greedy"].find((split) => known.includes(split)) ?? known[0];
    view.runs = view.runs.map((run, place) => (run < Store.state.runs.length ? run : place));
    const turn = (by) => () => { view.page += by; draw(); node.querySelector("table").scrollIntoView({ block: "nearest" }); };
    Dom.replace(node, el("h2", {}, "Prompts"), controls(), el("p", { class: "note words", role: "status" }),
      el("div", { class: "pager" }, el("span", { class: "quiet" }, "Mean rewards. A row opens two samples side by side."),
        el("span", { class: "steps" }, el("button", { class: "back", onclick: turn(-1) }, "Previous"),
          el("span", { class: "pages" }), el("button", { class: "forth", onclick: turn(1) }, "Next"))),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of prompts" },
        el("table", { class: "rollouts prompts", role: "table" }, el("caption", { class: "hidden" }, "Prompts; column headings sort"),
          el("thead", { role: "rowgroup" }), el("tbody", { role: "rowgroup" }))),
      el("p", { class: "empty quiet", hidden: true }, "No prompt passes."));
    refresh();
  }

  // ---- one prompt

  const given = (text) => {
    const [run, ...key] = (text ?? "").split("/");
    return Store.state.rollouts[Store.find(Number(run), key.join("/"))] ?? null;
  };

  async function one(target, key, query) {
    const prompt = Store.byPrompt().get(key);
    if (!prompt) {
      Dom.replace(target, el("p", { class: "note bad" }, "This report has no such prompt."));
      return;
    }
    let [left, right] = [given(query.get("left")), given(query.get("right"))];
    if (!left || !right) [left, right] = pair(prompt.rollouts, right);
    const go = (l, r) => { location.hash = App.promptLink(r, { left: l, right: r }); };
    const [a, b] = await Promise.all([Store.details(left), Store.details(right)]);
    const own = (side, r) => (left.run === right.run ? side : `${side}, ${Store.state.runs[r.run].label}`);
    const names = [own("left", left), own("right", right)];
    const opening = (d) => d.messages.slice(0, d.prompt_messages);
    const same = JSON.stringify(opening(a)) === JSON.stringify(opening(b));
    const question = opening(b).filter((m) => m.role === "user").at(-1)?.text ?? prompt.question;
    Dom.replace(target,
      el("div", { class: "titlebar" }, el("h2", {}, "One prompt"), el("span", { class: "steps" }, el("a", { class: "button", href: "#/prompts" }, "All prompts"))),
      el("section", { class: "card asked two", "aria-label": "The prompt" },
        el("div", {}, el("h3", {}, "Asked"), el("div", { class: "box", tabindex: 0, role: "group", "aria-label": "Asked" }, question)),
        el("div", {}, el("h3", {}, "Truth"), el("div", { class: "box", tabindex: 0, role: "group", "aria-label": "Truth" },
          b.truth ?? a.truth ?? el("span", { class: "quiet" }, "(the row does not say)")))),
      Dom.details(`Through the steps: ${Dom.count(prompt.rollouts.length, "rollout")}`, prompt.rollouts.length <= 60, history(prompt, left, right)),
      el("h3", {}, "Two samples"),
      el("div", { class: "sides choose" }, choose(left, "left", (r) => go(r, right)), choose(right, "right", (r) => go(left, r))),
      el("p", { class: "actions" }, el("button", { onclick: () => go(right, left) }, "Swap left and right"),
        el("span", { class: "quiet" }, "Marked: ", el("del", {}, "only left"), " ", el("ins", {}, "only right"))),
      el("div", { class: "scroll" }, Diff.facts(compared(left, right, a, b), names)),
      same ? el("p", { class: "quiet" }, "Both saw the same prompt.")
        : [el("h3", {}, "The prompts differ"), Diff.conversations(opening(a), opening(b), names)],
      el("h3", {}, "What followed"),
      Diff.conversations(a.messages.slice(a.prompt_messages), b.messages.slice(b.prompt_messages), names));
  }

  function compared(left, right, a, b) {
    const link = (r) => el("a", { href: App.linkTo(r) }, r.id);
    const run = (r) => Store.state.runs[r.run].label;
    const parts = [...new Set([...Object.keys(left.parts), ...Object.keys(right.parts)])];
    return [["rollout", link(left), link(right)], several() && ["run", run(left), run(right)], ["pass", left.split, right.split],
      ["step", left.step, right.step], ["reward", left.reward, right.reward],
      ...parts.map((name) => [name, left.parts[name] ?? null, right.parts[name] ?? null]),
      a.truth !== b.truth && ["truth", a.truth ?? "–", b.truth ?? "–"],
      ["stop reason", left.stop.replaceAll("_", " "), right.stop.replaceAll("_", " ")], ["turns", left.turns, right.turns],
      ["sampled tokens", left.sampled, right.sampled], ["failed calls", left.faults, right.faults]].filter(Boolean);
  }

  // One line per run, pass and step, in order: [{run, split, step, rollouts}].
  function occasions(prompt) {
    const found = new Map();
    for (const r of prompt.rollouts) {
      const key = `${r.run}/${r.split}/${r.step}`;
      if (!found.has(key)) found.set(key, { run: r.run, split: r.split, step: r.step, rollouts: [] });
      found.get(key).rollouts.push(r);
    }
    return [...found.values()].sort((a, b) => a.run - b.run || a.split.localeCompare(b.split) || a.step - b.step);
  }

  // The left sample is framed, the right one filled.
  function history(prompt, left, right) {
    const most = Math.max(...rewards(prompt.rollouts).map(Math.abs), 1e-9);
    return el("div", { class: "scroll" }, el("table", { class: "history" }, el("caption", { class: "hidden" }, "Rewards of this prompt through the steps"),
      el("thead", {}, el("tr", {}, [several() && "run", "pass", "step", "mean", "samples"].filter(Boolean).map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", {}, occasions(prompt).map((time) => {
        const average = mean(rewards(time.rollouts));
        return el("tr", {}, several() && el("td", {}, Store.state.runs[time.run].label), el("td", {}, time.split), el("td", { class: "num" }, time.step),
          el("td", {}, el("div", { class: "mean" }, el("span", {}, number(average)), el("span", { class: `bar${average < 0 ? " negative" : ""}`, style: { width: `${Math.round((60 * Math.abs(average ?? 0)) / most)}px` } }))),
          el("td", { class: "samples" }, time.rollouts.map((r) => el("a", { class: `sample${r === left ? " left" : ""}`, href: App.promptLink(r, { left, right: r }),
            "aria-current": r === right ? "true" : null, title: `${r.id}: put it on the right` }, number(r.reward)))));
      }))));
  }

  function choose(chosen, side, go) {
    const all = occasions(Store.promptOf(chosen)); // in a group of several roles, each has a prompt of its own
    const at = all.findIndex((time) => time.rollouts.includes(chosen));
    const place = all[at].rollouts.indexOf(chosen);
    const name = (time) => `${several() ? `${Store.state.runs[time.run].label}, ` : ""}${time.split}, step ${time.step}`;
    const step = (by, text) => {
      const time = all[at + by];
      const fits = time && time.run === chosen.run && time.split === chosen.split;
      return el("button", { disabled: !fits, "aria-label": `${side}: ${text}`, onclick: () => go(time.rollouts[Math.min(place, time.rollouts.length - 1)]) }, text);
    };
    return el("div", { class: "side-cell" }, el("label", { for: `side-${side}` }, side === "left" ? "Left" : "Right"),
      el("select", { id: `side-${side}`, onchange: (event) => go(Store.state.rollouts[Number(event.target.value)]) },
        all.map((time) => el("optgroup", { label: name(time) }, time.rollouts.map((r, k) =>
          el("option", { value: r.number, selected: r === chosen }, `${name(time)}, sample ${k + 1} of ${time.rollouts.length}: reward ${number(r.reward)}`))))),
      el("span", { class: "steps" }, step(-1, "Earlier step"), step(1, "Later step")));
  }

  return { render, one };
})();
