// Curves of the metrics, one small chart per question, all runs (or settings of a sweep) in each. The charting library is unpacked when the
// first chart comes into view.
"use strict";

const Charts = (() => {
  const { el, number } = Dom;
  const COLOURS = ["#2f6fde", "#d2691e", "#2a9d6f", "#b5479b", "#8a7a00", "#00899e", "#c23b3b", "#6a5acd"];
  // Colours that differ from their neighbours go on for ever.
  const colour = (number) => COLOURS[number] ?? `hsl(${Math.round(number * 137.5) % 360} 60% 48%)`;
  const hidden = new Set(); // labels of runs
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

  // title, what it says, and the metrics: a name, or a function of one step's metrics.
  const share = (ending) => (m) => {
    const calls = sum(m, /^tools\/[^/]+\/calls$/);
    return calls ? sum(m, new RegExp(`^tools/[^/]+/${ending}$`)) / calls : undefined;
  };
  const per = (name) => (m) => (m["rollout/trajectories"] ? sum(m, name) / m["rollout/trajectories"] : undefined);
  const PANELS = [
    ["Reward", "mean over the step's rollouts", { "reward/mean": "mean" }],
    ["Validation", "share solved", { "val/accuracy": "sampled", "val/accuracy_greedy": "greedy" }],
    ["Loss", "supervised, nats per trained token", { loss: "training", "val/loss": "validation" }],
    ["Entropy", "nats per token", { "rollout/entropy": "all sampled", "actor/entropy": "trained" }],
    ["KL to the sampler", "sampler against trainer, nats per token", { "rollout/sampler_kl": "KL" }],
    ["KL to the reference", "as in the loss, nats", { "actor/kl_loss": "KL" }],
    ["Length", "tokens per rollout", {
      "response/tokens_mean": "response", "response/sampled_tokens_mean": "sampled", "prompt/tokens_mean": "prompt" }],
    ["Turns", "assistant turns per rollout", { "turns/mean": "mean", "turns/max": "most" }],
    ["Tool use", "share of the rollouts in which a tool ran", { "tools/use_rate": "share" }],
    ["Tool calls", "per rollout", { calls: per(/^tools\/[^/]+\/calls$/) }],
    ["Tool errors", "share of the calls", { "model's fault": share("model_errors"), "tool's fault": share("errors") }],
    ["Cut off", "share of the rollouts", {
      "by a length limit": per(/^stop\/(max_tokens_per_turn|response_length|max_model_len|context_full|time_limit|truncated)$/),
      failed: per(/^rollout\/(failed|aborted)$/) }],
    ["Groups without signal", "share of groups with equal rewards", { "group/zero_variance": "equal rewards" }],
    ["Throughput", "sampled tokens per second of rollout", { "rollout/tokens_per_s": "tokens/s" }],
    ["Time per phase", "seconds of each step", {
      "time/rollout_s": "rollout", "time/update_s": "update", "time/ref_s": "reference",
      "time/weights_s": "weights", "time/validate_s": "validation" }],
    ["Where conversations spend their time", "share of all their time", Object.fromEntries(
      ["queue", "prefill", "decode", "tool", "interaction", "reward"].map((p) => [`critical_path/share_${p}`, p]))],
    ["Held by the straggler", "seconds that the step would save without it", { "critical_path/saving_s": "saving" }],
    ["Prefix cache", "share of the input tokens", { "rollout/prefix_cache_hit_rate": "found in the cache" }],
    ["Gradient norm", "before clipping", { "actor/grad_norm": "norm" }],
    ["Clipped", "share of trained tokens", { "actor/clipfrac": "upper or lower", "actor/clipfrac_lower": "dual clip" }],
    ["Largest log-prob difference", "sampler against trainer, nats", { "rollout/logprob_diff_max": "largest" }],
    ["Tokenization mismatches", "share of the rollouts", { "sanity/mismatch_rate": "training", "val/mismatch_rate": "validation" }],
  ];

  // Panels of the names that a run brings itself: title, what it says, and which metrics; the first group is the line's name, or
  // with `apart` the panel's, and the second the line's.
  const OWN = [
    { title: "Parts of the reward", about: "mean of each number that the reward returns", of: /^reward\/(?!(?:mean|std|min|max)$)(.+)$/ },
    { title: "Accuracy per data source", about: "share solved, sampled", of: /^val\/(.+)\/accuracy$/ },
    { title: "Accuracy per data source, greedy", about: "share solved", of: /^val\/(.+)\/accuracy_greedy$/ },
    { title: "Tool", about: "its own metrics, mean per call", apart: true,
      of: /^tools\/([^/]+)\/(?!(?:calls|errors|timeouts|loop_blocked|model_errors|over_budget|truncated|retries|media_dropped|latency_s)$)([^/]+)$/ },
    { title: "Time per tool call", about: "seconds, waiting included", of: /^tools\/([^/]+)\/latency_s$/ },
  ];
  const MOST_LINES = 12; // of a panel of own metrics
  const MOST_FOUND = 60; // charts of a search
  const view = { smooth: 1, search: "" };

  // Panels of the metrics that only this run has.
  function ownPanels(names) {
    return OWN.flatMap(({ title, about, of, apart }) => {
      const groups = new Map();
      for (const name of names) {
        const found = name.match(of);
        if (!found) continue;
        const key = apart ? `${title} ${found[1]}` : title;
        groups.set(key, { ...groups.get(key), [name]: found[apart ? 2 : 1] });
      }
      return [...groups].map(([key, metrics]) => [key, about, Object.fromEntries(Object.entries(metrics).slice(0, MOST_LINES))]);
    });
  }

  // The mean of the last `window` numbers at each step.
  function smoothed(values, window) {
    let total = 0;
    return values.map((value, at) => {
      total += value - (at >= window ? values[at - window] : 0);
      return total / Math.min(window, at + 1);
    });
  }

  function sum(metrics, pattern) {
    let total = 0;
    for (const [name, value] of Object.entries(metrics)) if (pattern.test(name)) total += value;
    return total;
  }

  const mean = (values) => values.reduce((total, v) => total + v, 0) / values.length;

  // Of one number per seed: the mean and how far to trust it. `number` is how many seeds there are: from three on the
  // interval is the standard error of the mean, of two it is their range, one has none.
  function interval(values, number) {
    const middle = mean(values);
    if (number === 2 && values.length === 2) return { mean: middle, low: Math.min(...values), high: Math.max(...values) };
    if (number < 3 || values.length < 3) return { mean: middle };
    const error = Math.sqrt(values.reduce((total, v) => total + (v - middle) ** 2, 0) / (values.length - 1) / values.length);
    return { mean: middle, error, low: middle - error, high: middle + error };
  }

  // The metrics of each seed of a setting; a run is one seed.
  const seedsOf = (run) => run.seeds ?? [run.metrics];

  // {step, values} in order, the values of all seeds that have the step.
  function bySteps(seeds, of) {
    const found = new Map();
    for (const metrics of seeds) {
      for (const m of metrics) {
        const value = of(m);
        if (Number.isFinite(value)) found.set(m.step, [...(found.get(m.step) ?? []), value]);
      }
    }
    return [...found].sort((a, b) => a[0] - b[0]);
  }

  // [{run, label, place, steps, values, intervals, counts}] of one panel.
  function series(panel) {
    const found = [];
    for (const run of Store.state.runs.filter((one) => !hidden.has(one.label))) {
      Object.entries(panel[2]).forEach(([key, what], place) => {
        const of = typeof what === "function" ? what : (m) => m[key];
        const label = typeof what === "function" ? key : what;
        const points = bySteps(seedsOf(run), of);
        const number = points.reduce((most, p) => Math.max(most, p[1].length), 0);
        const intervals = points.map((p) => interval(p[1], number));
        if (points.length) found.push({ run, label, place, most: panel[0] === "Validation" ? 1 : 10, steps: points.map((p) => p[0]),
          values: intervals.map((i) => i.mean), intervals, counts: points.map((p) => p[1].length) });
      });
    }
    return found;
  }

  let library = null; // promise of Plotly
  function plotly() {
    if (!library) {
      library = (async () => {
        const code = Codec.text(await Codec.gunzip(Codec.fromBase64(document.getElementById("plotly").textContent.trim())));
        const script = document.createElement("script");
        script.src = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
        await new Promise((done, failed) => {
          script.onload = done;
          script.onerror = () => failed(new Error("the charting library could not be started"));
          document.head.append(script);
        });
        return window.Plotly;
      })();
    }
    return library;
  }

  // Plotly reads a few tags in names; what a run calls its metrics is text here too.
  const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Ticks at whole steps only, also where there are few of them.
  function wholeSteps(found) {
    const steps = found.flatMap((s) => [s.steps[0], s.steps.at(-1)]);
    const [low, high] = [Math.min(...steps), Math.max(...steps)];
    return high - low < 6 ? { tick0: 0, dtick: 1, range: [low - 0.5, high + 0.5] } : { tickformat: "d", nticks: 6 };
  }

  // Of several runs the colour says which run, the dash which line; of one run the colour says which line.
  const colourOf = (s) => colour(Store.state.runs.length > 1 ? s.run.number : s.place);

  // What the lines of a chart are, once for all runs.
  function legend(found) {
    const labels = [...new Map(found.map((s) => [s.label, s])).values()];
    if (labels.length < 2) return null;
    const many = Store.state.runs.length > 1;
    const dash = { solid: "", dash: "8 5", dot: "2 4", dashdot: "8 4 2 4", longdash: "14 5" };
    return el("span", { class: "lines" }, labels.map((s) => el("span", { class: "sign" },
      Dom.svg("svg", { width: 30, height: 8, "aria-hidden": "true" }, Dom.svg("line", { x1: 0, x2: 30, y1: 4, y2: 4,
        "stroke-width": 2, stroke: many ? "currentColor" : colourOf(s),
        "stroke-dasharray": many ? dash[DASHES[s.place % DASHES.length]] : "" })), s.label)));
  }

  // Which colour is which run; unticked ones are left out of the charts.
  function runLegend(node) {
    if (Store.state.runs.length < 2) return null;
    return el("p", { class: "controls", id: "run-legend" }, Store.state.runs.map((run) => el("label", { class: "sign" },
      el("input", { type: "checkbox", checked: !hidden.has(run.label), onchange: (event) => {
        if (event.target.checked) hidden.delete(run.label);
        else hidden.add(run.label);
        render(node);
      } }), el("span", { class: "dot", style: { background: colour(run.number) } }), run.label)));
  }

  // How far to trust a mean, as it is written behind the number.
  const trust = (i) => (i.error !== undefined ? ` ± ${number(i.error, 2)}` : i.low !== undefined ? ` (${number(i.low)} to ${number(i.high)})` : "");

  // The interval around a line, as an area; none where no step has one.
  function band(s) {
    const at = s.intervals.map((i, k) => k).filter((k) => s.intervals[k].low !== undefined);
    if (at.length < 2) return [];
    const back = [...at].reverse();
    return [{ x: [...at, ...back].map((k) => s.steps[k]), mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: colourOf(s),
      opacity: 0.18, y: [...at.map((k) => s.intervals[k].low), ...back.map((k) => s.intervals[k].high)], hoverinfo: "skip" }];
  }

  async function draw(node, found) {
    const Plotly = await plotly();
    const several = new Set(found.map((s) => s.label)).size > 1;
    const manyRuns = Store.state.runs.length > 1;
    const raw = (s) => (view.smooth < 2 ? [] : [{ x: s.steps, y: s.values, mode: "lines", opacity: 0.3, hoverinfo: "skip",
      line: { color: colourOf(s), width: 1 } }]);
    const traces = found.flatMap((s) => [...band(s), ...raw(s), {
      x: s.steps, y: view.smooth < 2 ? s.values : smoothed(s.values, view.smooth), mode: s.steps.length < 40 ? "lines+markers" : "lines",
      name: plain(manyRuns && several ? `${s.run.label}: ${s.label}` : manyRuns ? s.run.label : s.label),
      line: { color: colourOf(s), width: 2, dash: manyRuns ? DASHES[s.place % DASHES.length] : "solid" },
      marker: { size: 5 }, hovertemplate: `step %{x}: %{y:.4g}${s.run.seeds ? "%{text}" : ""}<extra>%{fullData.name}</extra>`,
      text: s.run.seeds && s.intervals.map((i, at) => `${trust(i)}, ${Dom.count(s.counts[at], "seed")}`),
    }]);
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), color: style("--quiet"), automargin: true };
    const layout = {
      margin: { l: 44, r: 8, t: 6, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: style("--text") },
      xaxis: { ...axis, ...wholeSteps(found) }, yaxis: { ...axis, nticks: 5, exponentformat: "e" },
      showlegend: false, hovermode: "x unified",
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--text") } },
    };
    await Plotly.react(node, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  // One step is luck: the mean of the first k numbers against that of the last k, a quarter of them and at most `most`,
  // as the closing box of the run has it.
  function change(values, most = 10) {
    const k = Math.max(1, Math.min(most, Math.floor(values.length / 4)));
    const [first, last] = [mean(values.slice(0, k)), mean(values.slice(-k))];
    return { k, first, last, text: values.length > 1 ? `${number(first)} → ${number(last)}` : number(values[0]) };
  }

  // How each line began and ended, in words.
  function summary(found) {
    const several = new Set(found.map((s) => s.label)).size > 1;
    const changes = found.map((s) => change(s.values, s.most));
    const k = Math.max(1, ...changes.map((c) => c.k));
    return found.map((s, at) => {
      const name = Store.state.runs.length < 2 ? s.label : several ? `${s.run.label} ${s.label}` : s.run.label;
      // The first and the last mean would be of different seeds.
      if (new Set(s.counts).size > 1) return `${name}: not every seed has every step`;
      return `${name}: ${changes[at].text}${changes[at].k === k ? "" : ` (of ${changes[at].k})`}`;
    }).join(", ") + (k > 1 ? ` (means of ${k} steps)` : "");
  }

  const drawn = new Map(); // plot element -> its series
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !drawn.has(entry.target)) continue;
      watcher.unobserve(entry.target);
      draw(entry.target, drawn.get(entry.target)).catch((error) => Dom.replace(entry.target, error.message));
    }
  }, { rootMargin: "200px" });

  function card(title, about, found) {
    const plot = el("div", { class: "plot", role: "img", "aria-label": `${title}. ${summary(found)}` });
    drawn.set(plot, found);
    watcher.observe(plot);
    return el("figure", { class: "card chart" }, el("figcaption", {},
      el("h3", {}, title), el("span", { class: "quiet" }, about),
      found.length <= 3 && el("span", { class: "ends" }, summary(found)), legend(found)), plot);
  }

  // All panels that have data, and a box to draw any other metric.
  function render(node) {
    drawn.clear();
    watcher.disconnect();
    const names = [...new Set(Store.state.runs.flatMap((run) => seedsOf(run).flat().flatMap(
      (m) => Object.keys(m).filter((name) => Number.isFinite(m[name])))))].filter((name) => name !== "step").sort();
    const cards = [...PANELS, ...ownPanels(names)].map((panel) => [panel, series(panel)]).filter(([, found]) => found.length)
      .map(([panel, found]) => card(panel[0], panel[1], found));
    if (!cards.length) {
      Dom.replace(node, runLegend(node), el("p", { class: "quiet" }, "There are no metrics to draw."));
      return;
    }
    const own = el("div", { class: "own" });
    const choose = el("select", { id: "any-metric", onchange: (event) => {
      const name = event.target.value;
      Dom.replace(own, name ? card(name, "", series([name, "", { [name]: name }])) : null);
    } }, el("option", { value: "" }, "choose…"), names.map((name) => el("option", { value: name }, name)));
    const found = el("div", { class: "charts found" });
    const status = el("span", { class: "quiet", role: "status" });
    const search = () => {
      const fit = view.search ? names.filter((name) => name.toLowerCase().includes(view.search.toLowerCase())) : [];
      status.textContent = !view.search ? "" : fit.length > MOST_FOUND ? `the first ${MOST_FOUND} of ${fit.length}` : Dom.count(fit.length, "metric");
      Dom.replace(found, fit.slice(0, MOST_FOUND).map((name) => card(name, "", series([name, "", { [name]: name }]))));
    };
    const smooth = el("select", { id: "smooth", onchange: (event) => {
      view.smooth = Number(event.target.value);
      render(node);
    } }, [1, 3, 5, 10, 20, 50].map((n) => el("option", { value: n, selected: n === view.smooth }, n === 1 ? "none" : `mean of ${n} steps`)));
    Dom.replace(node, runLegend(node), el("p", { class: "controls" }, el("label", { for: "smooth" }, "Smoothing "), smooth),
      el("div", { class: "charts" }, cards), el("h2", {}, "Every metric"),
      el("p", { class: "controls" }, el("label", { for: "any-metric" }, "Any other metric "), choose,
        el("label", { for: "metrics-with" }, "All whose name contains "),
        el("input", { id: "metrics-with", type: "search", placeholder: "tools/", value: view.search, oninput: (event) => {
          view.search = event.target.value.trim();
          search();
        } }), status), own, found);
    search();
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [node, found] of drawn) if (node.firstChild) draw(node, found);
  });

  return { render, change, colour, interval, trust };
})();
