// Charts as SVG. Samples have t in Unix milliseconds.

import { s, n, clock } from "./dom.js";

const height = 208, left = 56, bottom = 18, top = 8;

// room is how wide a chart may be, in pixels: charts are drawn as large as they are shown.
const room = () => Math.max(240, document.getElementById("view").clientWidth - 64);

// nice returns a round number not below x.
function nice(x) {
  if (x <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 2.5, 5, 10].map((f) => f * power).find((v) => v >= x);
}

function frame(samples, most, format) {
  const width = room();
  const t0 = samples[0].t, t1 = Math.max(samples.at(-1).t, t0 + 1);
  const x = (t) => left + (t - t0) / (t1 - t0) * (width - left - 4);
  const y = (v) => height - bottom - v / most * (height - bottom - top);
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const v of [0, most / 2, most]) {
    svg.append(s("line", { class: "grid", x1: left, x2: width, y1: y(v), y2: y(v) }), s("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, format(v)));
  }
  svg.append(s("text", { x: left, y: height - 3 }, clock(t0)), s("text", { x: width - 4, y: height - 3, "text-anchor": "end" }, clock(t1)));
  return { svg, x, y };
}

// stacked draws values that add up: values(sample) is a list, one a name.
export function stacked(samples, names, values) {
  const most = nice(Math.max(1, ...samples.map((p) => values(p).reduce((a, b) => a + b, 0))));
  const { svg, x, y } = frame(samples, most, n);
  const base = samples.map(() => 0);
  names.forEach((name, i) => {
    const lower = samples.map((p, j) => `${x(p.t)},${y(base[j])}`).reverse();
    samples.forEach((p, j) => { base[j] += values(p)[i]; });
    const upper = samples.map((p, j) => `${x(p.t)},${y(base[j])}`);
    svg.append(s("polygon", { class: name, points: upper.concat(lower).join(" ") }));
  });
  return svg;
}

// line draws one value.
export function line(samples, value, format = n) {
  const most = nice(Math.max(1, ...samples.map(value)));
  const { svg, x, y } = frame(samples, most, format);
  svg.append(s("polyline", { class: "line", points: samples.map((p) => `${x(p.t)},${y(value(p))}`).join(" ") }));
  return svg;
}
