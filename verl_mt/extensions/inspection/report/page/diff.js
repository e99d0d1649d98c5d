// Two texts, or two conversations, beside each other: what one has and the other has not.
"use strict";

const Diff = (() => {
  const { el, number } = Dom;
  const MOST_EDITS = 1200; // beyond, two texts have little in common: they are shown as wholly different
  const ALIKE = 0.35; // share of the words that both must have for single words to be marked

  // The shortest way from list a to list b (Myers, "An O(ND) Difference Algorithm and Its Variations", 1986): a list of
  // ["same", i, j], ["gone", i] and ["new", j]; null where it takes more than MOST_EDITS.
  function edits(a, b, equal = (x, y) => x === y) {
    let from = 0;
    while (from < a.length && from < b.length && equal(a[from], b[from])) from++;
    let [endA, endB] = [a.length, b.length];
    while (endA > from && endB > from && equal(a[endA - 1], b[endB - 1])) { endA--; endB--; }
    const middle = between(a, b, from, endA, endB, equal);
    if (!middle) return null;
    const found = [];
    for (let i = 0; i < from; i++) found.push(["same", i, i]);
    found.push(...middle);
    for (let i = 0; endA + i < a.length; i++) found.push(["same", endA + i, endB + i]);
    return found;
  }

  function between(a, b, from, endA, endB, equal) {
    const [n, m] = [endA - from, endB - from];
    const trace = [];
    let reach = new Map([[1, 0]]); // diagonal -> how far down list a
    for (let d = 0; d <= Math.min(n + m, MOST_EDITS); d++) {
      trace.push(new Map(reach));
      for (let k = -d; k <= d; k += 2) {
        const down = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
        let x = down ? reach.get(k + 1) : reach.get(k - 1) + 1;
        while (x < n && x - k < m && x - k >= 0 && equal(a[from + x], b[from + x - k])) x++;
        reach.set(k, x);
        if (x >= n && x - k >= m) return back(trace, n, m, from);
      }
    }
    return null;
  }

  function back(trace, n, m, from) {
    const found = [];
    let [x, y] = [n, m];
    for (let d = trace.length - 1; d >= 0; d--) {
      const reach = trace[d];
      const k = x - y;
      const down = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
      const beforeX = reach.get(down ? k + 1 : k - 1);
      const beforeY = beforeX - (down ? k + 1 : k - 1);
      while (x > beforeX && y > beforeY && x > 0 && y > 0) found.push(["same", from + --x, from + --y]);
      if (d > 0) found.push(down ? ["new", from + --y] : ["gone", from + --x]);
    }
    return found.reverse();
  }

  // Both texts as pieces [{text, changed}]. Blanks between two changes belong to them: a change of several words is one.
  function words(left, right) {
    const cut = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
    const [a, b] = [cut(left), cut(right)];
    const way = edits(a, b);
    const common = way ? way.filter(([kind, i]) => kind === "same" && a[i].trim()).length : 0;
    const most = Math.max(a.filter((w) => w.trim()).length, b.filter((w) => w.trim()).length);
    if (!way || (left !== right && common < ALIKE * most)) return [[{ text: left, changed: true }], [{ text: right, changed: true }]];
    const sides = [[], []];
    const put = (side, text, changed) => {
      const last = sides[side].at(-1);
      if (last && last.changed === changed) last.text += text;
      else sides[side].push({ text, changed });
    };
    way.forEach(([kind, i, j], at) => {
      if (kind !== "same") put(kind === "gone" ? 0 : 1, kind === "gone" ? a[i] : b[i], true);
      else {
        const inside = !a[i].trim() && !a[i].includes("\n") && at > 0 && way[at - 1][0] !== "same" && way[at + 1] && way[at + 1][0] !== "same";
        const before = (side) => inside && sides[side].at(-1)?.changed === true;
        put(0, a[i], before(0));
        put(1, b[j], before(1));
      }
    });
    return sides;
  }

  const marked = (pieces, tag) => pieces.filter((p) => p.text).map((p) => (p.changed ? el(tag, {}, p.text) : p.text));

  // A message as one text.
  function textOf(message) {
    const calls = (Array.isArray(message.calls) ? message.calls : []).map((call) => {
      const { name, arguments: given } = call?.function ?? {};
      return `calls ${name ?? "?"}(${typeof given === "string" ? given : JSON.stringify(given ?? {})})`;
    });
    return [message.reasoning && `(reasoning) ${message.reasoning}`, message.text, ...calls].filter(Boolean).join("\n");
  }

  const kindOf = (message) => [message.role, message.name].filter(Boolean).join(" · ");

  // Two lists of messages, row by row; `names` are what the two sides are called, for those who do not see columns.
  function conversations(left, right, names) {
    const way = edits(left, right, (x, y) => x.role === y.role) ?? [
      ...left.map((_, i) => ["gone", i]), ...right.map((_, j) => ["new", j])];
    return el("div", { class: "sides" }, way.flatMap(([kind, i, j]) => {
      if (kind === "same") {
        const [a, b] = words(textOf(left[i]), textOf(right[j]));
        const alike = textOf(left[i]) === textOf(right[j]);
        return [cell(left[i], marked(a, "del"), names[0], alike), cell(right[j], marked(b, "ins"), names[1], alike)];
      }
      const only = kind === "gone" ? cell(left[i], el("del", {}, textOf(left[i])), names[0]) : cell(right[i], el("ins", {}, textOf(right[i])), names[1]);
      const none = el("div", { class: "side-cell none quiet" }, "(nothing here)");
      return kind === "gone" ? [only, none] : [none, only];
    }));
  }

  function cell(message, content, name, alike) {
    const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
    return el("div", { class: `side-cell block role-${role}` },
      el("h4", {}, kindOf(message), el("span", { class: "quiet" }, ` ${name}${alike ? ", the same" : ""}`)),
      el("pre", {}, content));
  }

  // Facts of both sides; lines that differ stand out.
  function facts(lines, names) {
    return el("table", { class: "both" }, el("caption", { class: "hidden" }, "Both samples"),
      el("thead", {}, el("tr", {}, el("td", {}), names.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, lines.filter(([, a, b]) => a !== undefined || b !== undefined).map(([title, a, b]) => {
        const shown = (v) => (typeof v === "number" || v === null || v === undefined ? number(v) : v);
        return el("tr", { class: shown(a) === shown(b) ? "" : "differs" }, el("th", { scope: "row" }, title), el("td", {}, shown(a)), el("td", {}, shown(b)));
      })));
  }

  return { edits, words, conversations, facts };
})();
