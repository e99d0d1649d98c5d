// A conversation to read: messages with their calls and answers, an outline beside them, and no tokens.
"use strict";

const Reading = (() => {
  const { el, seconds } = Dom;
  const FAULT = { model: "the model's fault", tool: "the tool's fault", infrastructure: "the infrastructure's fault" };
  const SHORT = 60; // characters of a message in the outline
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  const cssRole = (role) => (["system", "user", "assistant", "tool"].includes(role) ? role : "other");

  // The calls of each turn of the model, and the call that each answer belongs to: both are in order.
  function matched(details) {
    const byTurn = new Map();
    for (const call of details.calls) byTurn.set(call.turn, [...(byTurn.get(call.turn) ?? []), call]);
    return { byTurn, answered: details.calls.filter((call) => call.result !== null) };
  }

  // {node, failed: the messages with a failed call in order}
  function render(details, openTokens) {
    const { byTurn, answered } = matched(details);
    const failed = [];
    let turn = 0;
    let answers = 0;
    const entries = details.messages.map((message, k) => {
      const given = k < details.prompt_messages;
      const own = !given && message.role === "assistant";
      turn += own ? 1 : 0;
      const calls = own ? byTurn.get(turn) ?? [] : [];
      byTurn.delete(own ? turn : undefined);
      const answer = !given && message.role === "tool" ? answered[answers++] : null;
      const bad = [...calls, ...(answer ? [answer] : [])].some((call) => call.failure);
      const entry = { ...entryOf(message, { given, own, turn, calls, answer, bad }), bad };
      if (calls.some((call) => call.failure)) failed.push(entry.node);
      return entry;
    });
    const rest = [...byTurn.values()].flat();
    if (rest.some((call) => call.failure)) failed.push(...rest.filter((call) => call.failure).map((call) => callView(call)));
    const outline = Dom.details(`Outline: ${Dom.count(entries.length, "message")}`, innerWidth > 900, el("ol", {}, entries.map((entry) =>
      el("li", {}, el("button", { class: `plain${entry.bad ? " failing" : ""}`, onclick: () => go(entry.node) }, entry.title,
        el("span", { class: "quiet" }, ` ${entry.short}`))))));
    outline.classList.add("card", "outline");
    const list = el("div", { class: "reading", role: "group", "aria-label": "Messages" }, entries.map((entry) => entry.node),
      rest.length > 0 && el("section", {}, el("h3", {}, "Calls of no message"), rest.map((call) => callView(call))));
    return el("div", { class: "reader" }, outline, el("div", {}, bar(list, failed, openTokens), list));
  }

  function entryOf(message, { given, own, turn, calls, answer, bad }) {
    const title = own ? `assistant · turn ${turn}` : [message.role, message.name].filter(Boolean).join(" · ");
    const words = message.text || calls.map((call) => call.name).join(", ");
    const short = words.replace(/\s+/g, " ").slice(0, SHORT);
    const node = el("details", { class: `block role-${cssRole(message.role)}${own ? " own" : ""}`, open: message.role !== "system" },
      el("summary", {}, el("strong", {}, title), given && el("span", { class: "quiet" }, " prompt"),
        answer && el("span", { class: "quiet" }, ` ${seconds(answer.seconds)}`),
        bad && el("span", { class: "badge" }, "failed call"), el("span", { class: "quiet first" }, ` ${short}`)),
      message.text ? el("pre", {}, message.text) : !calls.length && el("p", { class: "quiet" }, "(no text)"),
      calls.map((call) => callView(call)));
    return { node, title, short };
  }

  function callView(call) {
    return el("div", { class: `call${call.failure ? " failed" : ""}`, tabindex: -1 },
      el("h5", {}, call.name || "(no name)", el("span", { class: "quiet" }, ` ${seconds(call.seconds)}`),
        call.failure && el("span", { class: "badge" }, FAULT[call.failure] ?? call.failure)),
      el("pre", {}, call.arguments === undefined ? `could not be read:\n${call.written ?? ""}` : shown(call.arguments)),
      call.result === null && el("p", { class: "quiet" }, "(the model never saw an answer)"));
  }

  function go(node) {
    node.open = true;
    node.scrollIntoView({ block: "start" });
    node.querySelector("summary")?.focus({ preventScroll: true });
    for (const other of document.querySelectorAll(".reading .here")) other.classList.remove("here");
    node.classList.add("here");
  }

  function bar(list, failed, openTokens) {
    const fold = (open) => {
      for (const node of list.querySelectorAll("details.block")) node.open = open;
    };
    let at = -1;
    const next = failed.length > 0 && el("button", { onclick: () => {
      at = (at + 1) % failed.length;
      next.textContent = `Next failed call (${at + 1} of ${failed.length})`;
      go(failed[at]);
    } }, `Next failed call (${failed.length})`);
    return el("p", { class: "controls reading-bar" }, el("button", { onclick: () => fold(false) }, "Fold all"),
      el("button", { onclick: () => fold(true) }, "Unfold all"), next,
      el("button", { class: "plain", onclick: openTokens }, "First trained token"));
  }

  return { render };
})();
