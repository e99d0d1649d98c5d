// The page of a sweep: final metrics per setting, the keys that differ, curves over seeds, and what each job cost.
"use strict";

const Sweep = (() => {
  const { el, number, count } = Dom;
  // heading, metric, and over how many steps at most a run's last number is the mean: one step is luck, validations are
  // means over many prompts already.
  const FINAL = [["reward", "reward/mean", 10], ["validation", "val/accuracy", 1], ["validation, greedy", "val/accuracy_greedy", 1],
    ["loss", "loss", 10], ["validation loss", "val/loss", 1], ["response tokens", "response/tokens_mean", 10], ["turns", "turns/mean", 10]];

  const MANY = 4; // settings side by side

  const sum = (values) => values.reduce((total, v) => total + v, 0);
  const finite = (values) => values.filter(Number.isFinite);
  const isDone = (job) => job.state === "finished";

  // Seconds, tokens and steps of one job; null where its metrics do not say.
  function cost(job) {
    const seconds = finite(job.metrics.flatMap((m) => [m["time/step_s"] ?? m.time_s, m["time/validate_s"], m["time/checkpoint_s"]]));
    const tokens = finite(job.metrics.map((m) => m["rollout/tokens_per_s"] * m["time/rollout_s"]));
    return { steps: job.metrics.at(-1)?.step ?? 0, seconds: seconds.length ? sum(seconds) : null,
      tokens: tokens.length ? Math.round(sum(tokens)) : null };
  }

  function duration(seconds) {
    if (seconds === null || seconds < 120) return Dom.seconds(seconds);
    return seconds < 7200 ? `${number(seconds / 60)} min` : `${number(seconds / 3600)} h`;
  }

  const tokenText = (n) => (n === null ? "–" : n.toLocaleString("en"));
  const dot = (setting) => el("span", { class: "dot", style: { background: Charts.colour(setting.number) } });
  // Names of keys and folders may break behind their signs.
  const breakable = (text) => el("span", {}, text.split(/(?<=[/=,]|\.(?!\d))/).flatMap((part, k) => (k ? [el("wbr"), part] : [part])));
  const sign = (setting) => el("span", { class: "sign" }, dot(setting), breakable(setting.label));
  const named = (setting) => el("th", { scope: "row" }, sign(setting));
  const heads = (names) => el("thead", {}, el("tr", {}, names.map(([name, cls]) => el("th", { scope: "col", class: cls }, name))));
  const table = (head, rows) => el("div", { class: "scroll" }, el("table", { class: "sweep" }, heads(head), el("tbody", {}, rows)));

  function finals(settings) {
    const last = (setting, [, metric, most]) => finite(setting.jobs.filter(isDone).map((job) => {
      const values = finite(job.metrics.map((m) => m[metric]));
      return values.length ? Charts.change(values, most).last : NaN;
    }));
    const columns = FINAL.filter((column) => settings.some((setting) => last(setting, column).length));
    if (!columns.length) return el("p", { class: "quiet" }, "No finished run has a reward, a validation or a loss.");
    const lines = settings.map((setting) => {
      const done = setting.jobs.filter(isDone).length;
      const found = columns.map((column) => last(setting, column)).map((values) => ({ ...(values.length && Charts.interval(values, values.length)), n: values.length }));
      return { setting, done, found };
    });
    const row = ({ setting, done, found }) => el("tr", {}, named(setting),
      el("td", { class: "num" }, done === setting.jobs.length ? done : `${done} of ${setting.jobs.length}`),
      found.map((f) => el("td", { class: "num" }, f.n ? `${number(f.mean)}${Charts.trust(f)}` : "–", f.n > 0 && f.n < done && `, ${count(f.n, "seed")}`)));
    const box = el("div");
    const show = (at, sign) => { // sorted by a column, its heading sorts the other way next
      const sorted = at === null ? lines : [...lines].sort((a, b) => (b.found[at].n > 0) - (a.found[at].n > 0) || sign * (a.found[at].mean - b.found[at].mean));
      const shown = table([["setting"], ["seeds", "num"], ...columns.map(([name], k) =>
        [el("button", { onclick: () => show(k, k === at ? -sign : -1) }, name), "num"])], sorted.map(row));
      if (at !== null) shown.querySelectorAll("th.num")[at + 1].setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      Dom.replace(box, shown);
    };
    show(null);
    return [el("p", { class: "quiet" }, "The mean over the seeds of finished runs. Each run gives its last validation. Of the other numbers "
      + "it gives the mean of the last quarter of its steps, ten at most. With three seeds or more, ± is the standard error of the mean. With two, "
      + "the parentheses hold both values. One seed has no interval."), box];
  }

  function differing(settings, keys) {
    if (!keys.length) return el("p", { class: "quiet" }, "Nothing but seeds, directories and names.");
    const cell = (text) => el("td", { class: "value" }, text);
    if (settings.length > MANY) {
      return table([["setting"], ...keys.map((key) => [breakable(key)])], settings.map((s) => el("tr", {}, named(s), s.values.map(cell))));
    }
    return table([["key"], ...settings.map((setting) => [sign(setting)])],
      keys.map((key, k) => el("tr", {}, el("th", { scope: "row" }, breakable(key)), settings.map((setting) => cell(setting.values[k])))));
  }

  function jobTable(settings, jobs) {
    const costs = jobs.map(cost);
    const total = (name) => (costs.some((c) => c[name] !== null) ? sum(costs.map((c) => c[name] ?? 0)) : null);
    const rows = jobs.map((job, k) => el("tr", {}, el("th", { scope: "row" }, breakable(job.name)), el("td", {}, job.state, job.same_as && `, does not count: same seed as ${job.same_as}`),
      el("td", {}, job.setting !== null && sign(settings[job.setting])), el("td", { class: "num" }, job.seed),
      el("td", { class: "num" }, `${costs[k].steps}${Number.isInteger(job.total_steps) ? ` of ${job.total_steps}` : ""}`),
      el("td", { class: "num" }, duration(costs[k].seconds)), el("td", { class: "num" }, tokenText(costs[k].tokens))));
    rows.push(el("tr", { class: "total" }, el("th", { scope: "row" }, "all jobs"), el("td"), el("td"), el("td"), el("td", { class: "num" }, total("steps")),
      el("td", { class: "num" }, duration(total("seconds"))), el("td", { class: "num" }, tokenText(total("tokens")))));
    return table([["job"], ["state"], ["setting"], ["seed", "num"], ["steps", "num"], ["time", "num"], ["sampled tokens", "num"]], rows);
  }

  // Which jobs did not come to their end, by name.
  function unfinished(jobs) {
    const box = (state, cls, title) => {
      const own = jobs.filter((job) => job.state === state);
      return own.length > 0 && el("div", { class: `note ${cls}` }, el("strong", {}, `${count(own.length, "job")} ${title}`),
        el("ul", {}, own.map((job) => el("li", {}, `${job.name}: ${job.metrics.length ? `after step ${cost(job).steps}` : "before its first step"}`,
          job.error && el("div", {}, el("code", {}, job.error))))));
    };
    return [box("failed", "bad", "failed"), box("broken off", "warn", "broken off: start the sweep again to resume"), box("running", "", "running")];
  }

  function render(node) {
    const { name, jobs, keys, notes } = Store.state.sweep;
    const settings = Store.state.runs;
    const problems = jobs.flatMap((job) => job.problems.map((problem) => `${job.name}: ${problem}`));
    Dom.replace(node, el("h2", {}, name), el("p", {}, `${count(jobs.length, "job")}, ${count(settings.length, "setting")}, ${jobs.filter(isDone).length} finished. `
      + "Runs of one setting differ in seeds, directories and names only."),
    unfinished(jobs), notes.map((note) => el("p", { class: "note warn" }, note)),
    problems.length > 0 && el("ul", { class: "note warn" }, problems.map((problem) => el("li", {}, problem))),
    el("h2", {}, "Final metrics"), finals(settings), el("h2", {}, "Keys that differ"), differing(settings, keys),
    el("h2", {}, "Curves"), el("p", { class: "quiet" }, "A line is the mean over the seeds that have the step. The area around it is the standard error of the mean "
      + "where three seeds or more have the step, and the range if the setting has two seeds. Point at a line to see how many seeds it has there."), el("div", { id: "curves" }),
    el("h2", {}, "Jobs"), el("p", { class: "quiet" }, "Time is the sum of steps, validations and checkpoints, without loading and without steps that were lost."),
    jobTable(settings, jobs));
    Charts.render(node.querySelector("#curves"));
  }

  return { render };
})();
