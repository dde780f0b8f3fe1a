// What all views build pages with. Text goes in as text only, never as HTML: names of
// workers and errors come from others.

export function h(name, attributes, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return e;
}

export function s(name, attributes, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes ?? {})) e.setAttribute(key, value);
  e.append(...children.flat());
  return e;
}

export const tiers = ["device", "host", "disk", "external"];

const whole = new Intl.NumberFormat("en");
export const n = (x) => whole.format(Math.round(x));
// position writes a log sequence, or one for each shard of the log.
export const position = (x) => (Array.isArray(x) ? x.map(n).join(" · ") : n(x));
export const positionOf = (v) => position(v.log_seqs ?? v.log_seq);
export const rate = (x) => (x < 10 ? x.toFixed(1) : n(x)) + "/s";
export const clock = (t) => new Date(t).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const tile = (value, name, className) => h("div", { class: "tile" }, h("b", { class: className }, value), h("span", {}, name));
export const badge = (text) => h("span", { class: "badge " + text }, text.replace("_", " "));

// table makes a table of rows of cells; on narrow screens each row is a card.
// Columns are {name, number, wide}.
export function table(columns, rows) {
  return h("table", { class: "cards" },
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: c.number && "n" }, c.name)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) =>
      h("td", { class: [columns[i].number && "n", columns[i].wide && "wide"].filter(Boolean).join(" "), "data-name": columns[i].name }, cell))))));
}

export const legend = (names) => h("div", { class: "legend" }, names.map((t) => h("span", {}, h("span", { class: "key " + t }), t)));

// listen keeps the value of a form's field over redraws and visits.
const kept = new Map();
export function field(name, label, element) {
  if (kept.has(name)) element.value = kept.get(name);
  element.name = name;
  element.id = "field-" + name;
  element.addEventListener("input", () => kept.set(name, element.value));
  return h("label", { for: element.id }, label, element);
}
export function remember(name, value) { kept.set(name, value); }
