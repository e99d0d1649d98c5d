// Small helpers to make elements. Text from a run enters the page here and only as text: nothing in this report ever
// assigns innerHTML, so markup in a tool's answer is shown and never run.
"use strict";

const Dom = (() => {
  // el("button", {class: "x", onclick: f}, "text", child, [more]) -> an element. Keys that begin with "on" are
  // listeners, `dataset` is an object, null and false are left out.
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key === "dataset") Object.assign(node.dataset, value);
      else if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
      else if (value === true) node.setAttribute(key, "");
      else node.setAttribute(key, String(value));
    }
    append(node, children);
    return node;
  }

  function append(node, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : String(child));
    }
    return node;
  }

  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, String(value));
    return append(node, children);
  }

  function replace(node, ...children) {
    node.replaceChildren();
    return append(node, children);
  }

  // A number with as many digits as a person wants; "–" where there is none.
  function number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(digits)));
  }

  const count = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;

  function seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value < 1e-3) return `${number(value * 1e6)} µs`;
    if (value < 1) return `${number(value * 1e3)} ms`;
    return `${number(value)} s`;
  }

  function percent(part, whole) {
    return whole ? `${number((100 * part) / whole, 2)} %` : "–";
  }

  // Text with its line breaks and control characters visible.
  function visible(text) {
    return JSON.stringify(text).slice(1, -1).replace(/\\"/g, '"');
  }

  function details(summary, open, ...children) {
    return el("details", { open }, el("summary", {}, summary), ...children);
  }

  return { el, svg, replace, append, number, count, seconds, percent, visible, details };
})();
