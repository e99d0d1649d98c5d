// The data behind the page. Blocks are opened when they are needed: from this file itself, or, with --serve, from the
// server that wrote it.
"use strict";

const Store = (() => {
  const state = { runs: [], rollouts: [], sweep: null, served: false };
  const opened = new Map(); // blob id -> promise of its decoded value
  const turns = new Map(); // blob id -> promise of the spans and replicas of its rollouts
  const byId = new Map(); // "run/key of the rollout" -> number of the rollout
  let texts = []; // per rollout, lower-cased text for the search; filled by the first one
  let prompts = null; // key -> {key, question, truth, rollouts}; made when it is first asked for

  async function bytesOf(id) {
    const inline = document.getElementById(`b-${id}`);
    if (inline) return Codec.gunzip(Codec.fromBase64(inline.textContent.trim()));
    const answer = await fetch(`blob/${id}`);
    if (!answer.ok) throw new Error(`block ${id}: the server answered ${answer.status}`);
    return Codec.gunzip(new Uint8Array(await answer.arrayBuffer()));
  }

  function open(id, decode) {
    if (!opened.has(id)) opened.set(id, bytesOf(id).then(decode));
    return opened.get(id);
  }

  const json = (id) => open(id, (bytes) => JSON.parse(Codec.text(bytes)));

  // Take a manifest: the first one, or a newer one of a run that is being written. Returns whether anything is new.
  async function load(manifest) {
    if (manifest.sweep) return loadSweep(manifest.sweep);
    const known = new Set(state.runs.flatMap((run) => run.parts.map((part) => part.lines)));
    const before = state.runs.map((run) => run.metricsBlob).join() + known.size;
    const runs = await Promise.all(manifest.runs.map(async (run, number) => {
      const [metrics, critical, texts] = await Promise.all([json(run.metrics), json(run.critical), json(run.texts)]);
      const lines = await Promise.all(run.parts.map((part) => json(part.lines)));
      return { ...run, number, metricsBlob: run.metrics, metrics, critical, texts, lines };
    }));
    state.runs = runs;
    state.rollouts = [];
    byId.clear();
    texts = [];
    prompts = null;
    for (const run of runs) run.parts.forEach((part, p) => addLines(run, part, run.lines[p]));
    const parts = runs.flatMap((run) => run.parts);
    return before !== runs.map((run) => run.metricsBlob).join() + parts.length;
  }

  // Of a sweep a setting stands where a run does: its seeds are the metrics of the jobs that count.
  async function loadSweep(sweep) {
    const before = JSON.stringify(state.sweep?.manifest);
    const jobs = await Promise.all(sweep.jobs.map(async (job) => ({ ...job, metrics: await json(job.metrics) })));
    state.sweep = { ...sweep, jobs, manifest: sweep };
    state.runs = sweep.settings.map((setting, number) => {
      const own = jobs.filter((job) => job.setting === number && !job.same_as);
      return { ...setting, number, jobs: own, seeds: own.map((job) => job.metrics).filter((metrics) => metrics.length) };
    });
    return before !== JSON.stringify(sweep);
  }

  function addLines(run, part, columns) {
    const names = Object.keys(columns);
    for (let at = 0; at < part.count; at++) {
      const row = { number: state.rollouts.length, run: run.number, part, at, split: part.split, step: part.step };
      for (const name of names) row[name] = columns[name][at];
      row.faults = (row.errors || 0) + (row.model_errors || 0); // of its tool calls
      row.key = row.id; // what its link names it by; an id that comes twice is numbered
      for (let again = 2; byId.has(`${run.number}/${row.key}`); again++) row.key = `${row.id}~${again}`;
      byId.set(`${run.number}/${row.key}`, row.number);
      state.rollouts.push(row);
    }
  }

  const details = async (rollout) => (await json(rollout.part.details))[rollout.at];

  // When a rollout did what, and which replica of the engine sampled each turn. For steps that nobody has opened: what
  // was said in them is not kept decoded.
  async function spans(rollout) {
    const id = rollout.part.details;
    const times = ({ spans, replicas }) => ({ spans, replicas: replicas ?? [] });
    if (!turns.has(id)) turns.set(id, bytesOf(id).then((bytes) => JSON.parse(Codec.text(bytes)).map(times)));
    return (await turns.get(id))[rollout.at];
  }

  // The tokens of one rollout, record by record: {id, text, sampled, trained, sampler, trainer, ratio, ...}.
  async function tokens(rollout) {
    const all = await json(rollout.part.details);
    const columns = await open(rollout.part.tokens, Codec.tokens);
    if (!rollout.part.offsets) {
      let edge = 0;
      rollout.part.offsets = all.map((one) => {
        const start = edge;
        for (const record of one.records) edge += record.length;
        return start;
      });
    }
    const texts = state.runs[rollout.run].texts;
    let at = rollout.part.offsets[rollout.at];
    return all[rollout.at].records.map((record) => {
      const found = [];
      for (let t = 0; t < record.length; t++, at++) found.push(token(columns, at, t, texts));
      return found;
    });
  }

  function token(columns, at, position, texts) {
    const id = columns.ids[at];
    const place = columns.place[at];
    const known = (column) => (place < 0 || Number.isNaN(column[place]) ? null : column[place]);
    const sampler = known(columns.sampler);
    const drift = known(columns.drift);
    const own = (texts[id] === undefined);
    return {
      position, id, text: own ? `⟨${id}⟩` : texts[id], unknown: own,
      sampled: Boolean(columns.flags[at] & 1), trained: Boolean(columns.flags[at] & 2),
      sampler, trainer: drift === null ? null : drift + (sampler ?? 0),
      ratio: drift === null || sampler === null ? null : Math.exp(drift),
      advantage: known(columns.advantage),
      version: place < 0 || columns.version[place] < 0 ? null : columns.version[place],
      clip: place < 0 ? 0 : columns.clip[place],
    };
  }

  // The numbers of the rollouts in whose text `wanted` occurs (case does not matter). `progress(share)` is called now
  // and then; a search that a newer one has replaced (`stale()`) gives null.
  async function search(wanted, progress, stale) {
    const needle = wanted.toLowerCase();
    const found = new Set();
    const parts = state.runs.flatMap((run) => run.parts);
    const starts = [];
    parts.reduce((edge, part) => (starts.push(edge), edge + part.count), 0);
    for (let p = 0; p < parts.length; p++) {
      if (texts[starts[p]] === undefined) {
        // Not kept decoded: ten thousand parsed conversations would be.
        const all = JSON.parse(Codec.text(await bytesOf(parts[p].details)));
        all.forEach((one, at) => { texts[starts[p] + at] = searchable(one); });
      }
      if (stale()) return null;
      for (let at = 0; at < parts[p].count; at++) if (texts[starts[p] + at].includes(needle)) found.add(starts[p] + at);
      if (p % 8 === 7) progress((p + 1) / parts.length);
    }
    return found;
  }

  function searchable(one) {
    const said = one.messages.flatMap((m) => [m.text, m.reasoning, m.calls ? JSON.stringify(m.calls) : ""]);
    return [one.trajectory_id, ...said, one.truth, one.error, JSON.stringify(one.info ?? "")].join("\n").toLowerCase();
  }

  // The rollouts of each prompt, through all steps and runs. Rows that ask the same in one run are one prompt only where
  // the same is right: games that all begin alike, or one question about many pictures, differ in their rows alone.
  function byPrompt() {
    if (prompts) return prompts;
    const alike = new Map();
    for (const r of state.rollouts) {
      if (!alike.has(r.prompt)) alike.set(r.prompt, []);
      alike.get(r.prompt).push(r);
    }
    prompts = new Map();
    for (const [digest, all] of alike) {
      const rows = state.runs.map((run) => new Set(all.filter((r) => r.run === run.number).map((r) => `${r.entry}.${r.row}`)));
      const truths = new Set(all.map((r) => r.truth));
      const apart = rows.some((own) => own.size > 1) && (truths.size > 1 || truths.has(null));
      for (const r of all) {
        r.promptKey = apart ? `${digest}.${r.entry}.${r.row}` : digest;
        if (!prompts.has(r.promptKey)) prompts.set(r.promptKey, { key: r.promptKey, question: r.question, truth: r.truth, rollouts: [] });
        const one = prompts.get(r.promptKey);
        one.truth ??= r.truth; // of two runs, one may be too old to say
        one.rollouts.push(r);
      }
    }
    return prompts;
  }

  function promptOf(rollout) {
    const all = byPrompt();
    return all.get(rollout.promptKey);
  }

  const find = (run, key) => byId.get(`${run}/${key}`);
  const group = (rollout) => state.rollouts.filter(
    (other) => other.run === rollout.run && other.step === rollout.step && other.split === rollout.split
      && other.group === rollout.group);

  // The lowest reward of a run's last training step; of several the one that moves the weights most.
  function worst(run) {
    const of = (split) => state.rollouts.filter((r) => r.run === run && (!split || r.split === split) && r.reward !== null);
    const scored = of("train").length ? of("train") : of(null);
    const last = scored.reduce((step, r) => Math.max(step, r.step), -1);
    return scored.filter((r) => r.step === last).sort(
      (a, b) => a.reward - b.reward || (a.advantage ?? 0) - (b.advantage ?? 0) || b.trained - a.trained)[0];
  }

  return { state, load, details, spans, tokens, search, find, group, worst, json, byPrompt, promptOf };
})();
