// One rollout as a conversation: every token, what it was given or trained with, and the group's other samples.
"use strict";

const Conversation = (() => {
  const { el, number, seconds } = Dom;
  const MAX_TOKENS = 1500; // of one block, until "show all" is pressed
  const FOLDED_TOKENS = 60; // of a message of the prompt
  const QUESTION_TOKENS = 600; // of its last one, which is the question
  const OF_TEMPLATE = { tools: "tools, as the template writes them", template: "written by the template" };
  const COLOURINGS = {
    role: ["role and mask", null],
    sampler: ["sampler's log-prob", (t) => (t.sampler === null ? null : Math.min(1, -t.sampler / 5))],
    ratio: ["ratio, away from 1", (t) => (t.ratio === null ? null : Math.min(1, Math.abs(Math.log(t.ratio)) / Math.LN2))],
    advantage: ["advantage", (t, most) => (t.advantage === null || !t.trained ? null : t.advantage / (most || 1))],
    version: ["weight version", (t, most, versions) => (t.version === null ? null
      : versions.length < 2 ? 0 : versions.indexOf(t.version) / (versions.length - 1))],
  };
  const view = { colouring: "role", mode: "messages" };
  let tokens = []; // of the open rollout: [{token, block, node}] in order
  let chosen = -1;
  let panel = null;
  let openTokens = () => {};

  // `mode`: messages or tokens; null = as the last one was looked at.
  async function render(node, rollout, mode = null) {
    Dom.replace(node, el("p", { class: "quiet" }, "opening…"));
    const [details, records] = await Promise.all([Store.details(rollout), Store.tokens(rollout)]);
    const run = Store.state.runs[rollout.run];
    view.mode = mode ?? view.mode;
    const body = el("div", {});
    const side = el("div", { class: "side" });
    const tabs = el("p", { class: "controls tabs", role: "group", "aria-label": "View" });
    const show = (wanted, jumpToTrained = false) => {
      view.mode = wanted;
      const of = { rollout, details, records, run };
      Dom.replace(tabs, [["messages", "Messages"], ["tokens", "Tokens"]].map(([key, title]) =>
        el("button", { "aria-pressed": String(key === wanted), onclick: () => show(key) }, title)));
      if (wanted === "tokens") showTokens(body, side, of);
      else {
        tokens = [];
        panel = null;
        document.body.classList.remove("heated");
        Dom.replace(body, Reading.render(details, () => show("tokens", true)));
        Dom.replace(side, siblings(rollout));
      }
      if (jumpToTrained) body.querySelector(".first-trained")?.click();
    };
    openTokens = () => view.mode === "tokens" || show("tokens");
    Dom.replace(node, heading(rollout, details, run),
      el("div", { class: "columns" },
        el("div", { class: "main" }, asked(details, rollout), notes(details, rollout), tabs, body, extras(details)), side));
    show(view.mode);
  }

  function showTokens(body, side, { rollout, details, records, run }) {
    tokens = [];
    chosen = -1;
    panel = el("aside", { class: "card inspector", "aria-live": "polite", "aria-label": "The chosen token" });
    const marks = mismatchMarks(details);
    const stream = el("div", { class: "stream", role: "group", "aria-label": "Tokens. Arrow keys go from one to the next." },
      records.map((record, k) => recordView(record, details.records[k], k, records.length, marks)));
    stream.addEventListener("keydown", keys);
    stream.addEventListener("click", (event) => {
      const node = event.target.closest("[data-t]");
      if (node && Number(node.dataset.t) === chosen) unpick();
      else pick(node, true);
    });
    stream.addEventListener("pointerover", (event) => { if (chosen < 0) pick(event.target.closest("[data-t]"), false); });
    recolour();
    Dom.replace(body, legend(stream), stream);
    Dom.replace(side, panel, siblings(rollout));
    explain(null, run);
  }

  function heading(rollout, details, run) {
    const facts = [
      ["reward", number(rollout.reward)], ["stop reason", rollout.stop.replaceAll("_", " ")],
      ["turns", number(rollout.turns)], ["tokens", number(rollout.tokens)],
      ["trained tokens", `${rollout.trained} (${Dom.percent(rollout.trained, rollout.tokens)})`],
      ["advantage", number(rollout.advantage)], ["largest ratio", number(rollout.ratio, 5)],
      ["time", seconds(rollout.seconds)],
    ];
    const order = Table.current();
    const at = order.indexOf(rollout);
    const beside = (by, text) => order[at + by] && at >= 0 && el("a", { class: "button", href: App.linkTo(order[at + by]) }, text);
    return el("div", {},
      el("div", { class: "titlebar" },
        el("h2", {}, `${rollout.split === "train" ? "Training" : rollout.split} rollout, step ${rollout.step}`),
        el("span", { class: "steps" }, beside(-1, "Previous"), beside(1, "Next"), promptLink(rollout),
          el("a", { class: "button", href: App.stepLink(rollout) }, "Timeline of the step"))),
      el("p", { class: "quiet" }, Store.state.runs.length > 1 && `${run.label} · `, rollout.id,
        details.source && ` · ${details.source}, row ${details.row_index ?? 0}`),
      el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  }

  function promptLink(rollout) {
    const { rollouts } = Store.promptOf(rollout);
    const again = new Set(rollouts.map((r) => `${r.run} ${r.split} ${r.step}`)).size;
    return el("a", { class: "button", href: App.promptLink(rollout, { right: rollout }) },
      again > 1 ? `This prompt, ${again} times` : "This prompt");
  }

  // What was asked, answered and right, and what the reward made of it: the first thing to read.
  function asked(details, rollout) {
    const said = details.messages.slice(details.prompt_messages).filter((m) => m.role === "assistant").at(-1);
    const box = (title, text, kind) => el("div", { class: kind }, el("h3", {}, title),
      el("div", { class: "box", tabindex: 0, role: "group", "aria-label": title }, text));
    const sum = (values) => values.reduce((total, v) => total + v, 0);
    const parts = [...Object.entries(details.reward_parts ?? {}),
      ...Object.entries(details.tool_rewards ?? {}).filter(([, v]) => sum(v)).map(([name, v]) => [`${name} (tool)`, sum(v)]),
      ...(details.turn_scores ? [["interaction", sum(details.turn_scores)]] : [])];
    const answer = box("Answered", said?.text || (said?.calls ? el("span", { class: "quiet" }, "(a call, no text)") : el("span", { class: "quiet" }, "(nothing)")), "answered");
    requestAnimationFrame(() => answer.lastChild.scrollTo(0, 1e6)); // an answer stands at the end of what was said
    return el("section", { class: "card asked", "aria-label": "What was asked, answered and right" },
      box("Asked", question(details) || el("span", { class: "quiet" }, "(no text)"), "question"), answer,
      box("Truth", details.truth ?? el("span", { class: "quiet" }, "(the row does not say)"), "truth"),
      el("div", { class: "reward" }, el("h3", {}, "Reward ", el("strong", {}, number(rollout.reward))),
        el("dl", {}, parts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, number(value)))))));
  }

  function question(details) {
    const prompt = details.messages.slice(0, details.prompt_messages);
    return (prompt.filter((m) => m.role === "user").at(-1) ?? prompt.at(-1))?.text;
  }

  // What a person should know before reading: errors, what is missing, the sanity check's finding.
  function notes(details, rollout) {
    const found = [];
    for (const line of details.broken ?? []) found.push(el("p", { class: "note bad" }, `Left out, ${line}`));
    if (details.error) found.push(el("div", { class: "note bad" }, el("strong", {}, "This rollout failed. "), el("pre", {}, details.error)));
    if (rollout.trained && rollout.advantage === null) {
      found.push(el("p", { class: "note" }, rollout.split === "train"
        ? "The update computed nothing for this rollout (no advantage in its group, or the step was broken off)."
        : "A validation rollout: marked tokens are what training would train; there are no advantages and no trainer's log-probs."));
    }
    if (details.sanity) found.push(sanity(details.sanity));
    return found;
  }

  function sanity(finding) {
    const spans = finding.spans ?? [finding];
    const meant = finding.counted?.length === 0;
    return el("div", { class: meant ? "note" : "note warn" },
      el("strong", {}, meant ? "No mismatch: " : "Tokenization mismatch: "), (finding.causes ?? [finding.cause]).join(", ").replaceAll("_", " "), ". ",
      el("span", {}, "Tokenizing the whole conversation again would not give these tokens; training uses them as recorded."),
      el("ul", {}, spans.map((span) => el("li", {},
        el("button", { class: "plain", onclick: () => jump(span.record ?? 0, span.start) }, `token ${span.start}`),
        " recorded ", el("code", {}, Dom.visible(span.recorded ?? "")), ", rendered ", el("code", {}, Dom.visible(span.rendered ?? ""))))));
  }

  function mismatchMarks(details) {
    const marks = new Set();
    const counted = details.sanity?.counted;
    for (const span of details.sanity?.spans ?? []) {
      if (counted && !counted.includes(span.cause)) continue;
      for (let t = span.start; t < Math.max(span.end, span.start + 1); t++) marks.add(`${span.record ?? 0}/${t}`);
    }
    return marks;
  }

  function recordView(record, about, k, count, marks) {
    const last = about.blocks.findLast((block) => block.kind === "prompt" && !OF_TEMPLATE[block.role]);
    const blocks = about.blocks.map((block) => blockView(record, { ...block, question: block === last }, k, marks));
    return count > 1 ? el("section", { class: "record" }, el("h3", {}, `Record ${k + 1} of ${count}: history was rewritten before it`), blocks) : blocks;
  }

  function blockView(record, block, k, marks) {
    const own = record.slice(block.start, block.end);
    const trained = own.filter((t) => t.trained).length;
    const role = block.role || "prompt";
    const title = block.kind === "assistant" ? `assistant · turn ${block.turn}` : OF_TEMPLATE[role] ?? [role, block.name].filter(Boolean).join(" · ");
    const text = el("div", { class: "tokens" });
    const fill = (list) => text.append(...list.flatMap((token) => tokenNodes(token, { ...block, role, record: k }, marks)));
    fill(own.slice(0, MAX_TOKENS));
    const rest = own.length - MAX_TOKENS;
    const more = rest > 0 && el("button", { class: "plain", onclick: () => {
      const at = tokens.findIndex((entry) => entry.token === own[MAX_TOKENS - 1]);
      const behind = tokens.splice(at + 1);
      fill(own.slice(MAX_TOKENS));
      tokens.push(...behind);
      tokens.forEach((entry, place) => { entry.node.dataset.t = place; });
      more.remove();
      recolour();
    } }, `show ${rest} more tokens`);
    // A long prompt stands folded, so that what was trained is on the first screen; its question does not.
    const folded = block.kind === "prompt" && own.length > (block.question ? QUESTION_TOKENS : FOLDED_TOKENS);
    const unfold = folded && el("button", { class: "plain unfold", onclick: () => unfoldBlock(text) }, "show all of it");
    return el("section", { class: `block role-${cssRole(role)}${block.kind === "assistant" ? " own" : ""}${folded ? " folded" : ""}${OF_TEMPLATE[role] ? " tight" : ""}` },
      el("h4", {}, title, el("span", { class: "quiet" },
        ` ${Dom.count(own.length, "token")}, ${trained ? `${trained} trained` : block.kind === "assistant" ? "none trained" : "not sampled"}`)),
      text, unfold, more);
  }

  function unfoldBlock(node) {
    const block = node.closest(".folded");
    if (!block) return;
    block.classList.remove("folded");
    block.querySelector(".unfold").remove();
  }

  const cssRole = (role) => (["system", "user", "assistant", "tool"].includes(role) ? role : "other");

  // A line break is shown as a sign and breaks the line; the sign is what is clicked.
  function tokenNodes(token, block, marks) {
    const classes = ["t"];
    if (token.trained) classes.push("trained");
    else if (token.sampled) classes.push("masked");
    if (token.unknown) classes.push("unknown");
    if (marks.has(`${block.record}/${token.position}`)) classes.push("mismatch");
    if (isClipped(token)) classes.push("clipped");
    const broken = token.text.includes("\n");
    const node = el("span", { class: classes.join(" "), dataset: { t: tokens.length }, tabindex: tokens.length ? -1 : 0 },
      broken ? token.text.replaceAll("\n", "↵") : token.text || "∅");
    tokens.push({ token, block, node });
    return broken ? [node, document.createTextNode("\n".repeat(token.text.split("\n").length - 1))] : [node];
  }

  const isClipped = (token) => token.clip === 2;

  function legend(stream) {
    const choose = el("select", { id: "colouring", onchange: (event) => { view.colouring = event.target.value; recolour(); } },
      Object.entries(COLOURINGS).map(([key, [name]]) => el("option", { value: key, selected: key === view.colouring }, name)));
    const sign = (kind, text) => el("span", { class: "sign" }, el("span", { class: `t ${kind}` }, "token"), ` ${text}`);
    const first = stream.querySelector(".trained");
    return el("div", { class: "legend" },
      sign("trained", "trained"), sign("masked", "sampled, not trained"), sign("", "not sampled: prompt, tools, template"),
      tokens.some((t) => isClipped(t.token)) && sign("clipped", "trained, but clipped"),
      tokens.some((t) => t.node.classList.contains("mismatch")) && sign("mismatch", "mismatch"),
      el("span", { class: "sign" }, el("label", { for: "colouring" }, "Colour by "), choose),
      first && el("button", { class: "plain first-trained", onclick: () => {
        pick(first, true);
        first.scrollIntoView({ block: "center" });
      } }, "First trained token"));
  }

  function recolour() {
    const of = COLOURINGS[view.colouring][1];
    if (!of && !document.body.classList.contains("heated")) return;
    const most = Math.max(0, ...tokens.map(({ token }) => Math.abs(token.advantage ?? 0)));
    const versions = [...new Set(tokens.map(({ token }) => token.version).filter((v) => v !== null))].sort((a, b) => a - b);
    for (const { token, node } of tokens) {
      const heat = of ? of(token, most, versions) : null;
      node.classList.toggle("heat", heat !== null);
      if (heat !== null) {
        node.style.setProperty("--heat", `${Math.round(8 + 82 * Math.abs(heat))}%`);
        node.style.setProperty("--heat-colour", heat < 0 ? "var(--cold)" : "var(--hot)");
      }
    }
    document.body.classList.toggle("heated", Boolean(of));
  }

  function keys(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by) {
      event.preventDefault();
      const next = Math.min(tokens.length - 1, Math.max(0, (chosen < 0 ? 0 : chosen) + by));
      pick(tokens[next].node, true);
      tokens[next].node.focus();
    } else if (event.key === "Escape" && chosen >= 0) {
      unpick();
      explain(null);
    }
  }

  function unpick() {
    if (chosen >= 0) tokens[chosen].node.classList.remove("chosen");
    chosen = -1;
  }

  function pick(node, fix) {
    if (!node) return;
    const at = Number(node.dataset.t);
    if (fix) {
      unpick();
      chosen = at;
      unfoldBlock(node);
      node.classList.add("chosen");
      for (const other of document.querySelectorAll('.stream [tabindex="0"]')) other.tabIndex = -1;
      node.tabIndex = 0;
    }
    explain(tokens[at]);
  }

  function jump(record, position) {
    openTokens();
    const entry = tokens.find(({ token, block }) => block.record === record && token.position === position);
    if (!entry) return;
    pick(entry.node, true);
    entry.node.scrollIntoView({ block: "center" });
  }

  function explain(entry) {
    panel.classList.toggle("idle", !entry);
    if (!entry) {
      Dom.replace(panel, el("h3", {}, "Token"), el("p", { class: "quiet" },
        "Point at a token, or click it to hold it; the arrow keys go on from there."));
      return;
    }
    const { token, block } = entry;
    const mask = token.trained ? (token.sampled ? "1: trained" : "1: trained on request, not sampled")
      : token.sampled ? "0: sampled, but not trained" : "0: not sampled, never trained";
    const clip = { 0: null, 1: "no", 2: "yes: its policy loss had no gradient" }[token.clip];
    const lines = [
      ["text", el("code", {}, Dom.visible(token.text))], ["id", token.id], ["position", token.position],
      ["role", [block.role, block.name].filter(Boolean).join(" · ")], ["turn", block.turn], ["loss mask", mask],
      ["sampler's log-prob", withProbability(token.sampler)], ["trainer's log-prob", withProbability(token.trainer)],
      ["ratio trainer / sampler", number(token.ratio, 6)], ["clipped in the update", clip ?? "–"],
      ["advantage", token.trained ? number(token.advantage, 4) : "–"],
      ["weight version", token.version === null ? "–" : token.version],
    ];
    Dom.replace(panel, el("h3", {}, "Token"), el("dl", {}, lines.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  }

  const withProbability = (logProb) => (logProb === null ? "–" : `${number(logProb, 4)} (p = ${number(Math.exp(logProb))})`);

  function extras(details) {
    const rest = Object.fromEntries(["data_source", "source", "row_index", "reward_parts", "tool_rewards", "turn_scores", "counters", "info"]
      .filter((key) => details[key]).map((key) => [key, details[key]]));
    return [
      Dom.details("Rewards, counters and what plug-ins noted", false, el("pre", {}, JSON.stringify(rest, null, 1))),
      Dom.details("Messages as data", false, el("pre", {}, JSON.stringify(details.messages, null, 1))),
    ];
  }

  // The samples that its reward is compared with.
  function siblings(rollout) {
    const group = Store.group(rollout);
    const best = Math.max(...group.map((r) => Math.abs(r.reward ?? 0)), 1e-9);
    const rows = group.map((other) => {
      const last = el("div", {});
      Store.details(other).then((d) => {
        const said = d.messages.filter((m) => m.role === "assistant").at(-1)?.text || "(no text)";
        Dom.replace(last, el("p", { class: "said quiet" }, said.slice(0, 160)), other !== rollout && [
          el("a", { class: "compare", href: App.promptLink(rollout, { left: rollout, right: other }) }, "Compare with this one"), beside(d)]);
      });
      return el("li", { "aria-current": other === rollout ? "true" : null }, el("a", { href: App.linkTo(other) },
        el("span", { class: "bar", style: { width: `${Math.round((100 * Math.abs(other.reward ?? 0)) / best)}%` } }),
        el("span", {}, `reward ${number(other.reward)}, ${Dom.count(other.turns, "turn")}, ${other.trained} trained, ${other.stop.replaceAll("_", " ")}`)), last);
    });
    return el("section", { class: "card group" }, el("h3", {}, `The group: ${Dom.count(group.length, "sample")}`), el("ol", {}, rows));
  }

  // Another sample's conversation in short, behind the prompt that all of the group share.
  function beside(details) {
    return Dom.details("Read it here", false, details.messages.slice(details.prompt_messages).map((message) => el("div", { class: `block role-${cssRole(message.role)}` },
      el("h5", {}, [message.role, message.name].filter(Boolean).join(" · ")),
      el("pre", {}, message.text || JSON.stringify(message.calls ?? "", null, 1)))));
  }

  return { render };
})();
