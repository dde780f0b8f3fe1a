// Tiers and blocks, rate and lag, over the last hour.

import { h, n, rate, tile, tiers, legend } from "./dom.js";
import { stacked, line } from "./chart.js";
import { poll } from "./poll.js";

export function show(main, server, signal) {
  const tiles = h("div", { class: "tiles" });
  const wrong = h("p", { class: "error" });
  const charts = h("div", {});
  main.append(tiles, wrong, charts);
  let samples = [];
  poll(signal, 2000, async () => {
    const last = samples.at(-1)?.t ?? 0;
    const more = await server.read("/ui/data/history?after=" + last, { signal });
    samples = samples.concat(more.samples).slice(-1800);
    if (!samples.length) return;
    const now = samples.at(-1);
    tiles.replaceChildren(...tiers.map((t, i) => tile(n(now.blocks[i]), t)), tile(n(now.sources), "sources"), tile(n(now.gaps), "gaps", now.gaps && "bad"));
    if (samples.length < 2) {
      charts.replaceChildren(h("section", {}, h("p", { class: "soft" }, "Charts begin with the second look at the index.")));
      return;
    }
    const rates = samples.slice(1).map((p, i) => ({ t: p.t, v: Math.max(0, (p.batches - samples[i].batches) / (p.t - samples[i].t) * 1000) }));
    charts.replaceChildren(
      h("section", {}, h("h2", {}, "Blocks by tier"), stacked(samples, tiers, (p) => p.blocks), legend(tiers)),
      rates.length > 1 ? h("section", {}, h("h2", {}, "Engine batches"), line(rates, (p) => p.v, rate)) : "",
      h("section", {}, h("h2", {}, "Records of the log not read yet"), line(samples, (p) => p.lag)),
    );
  }, (text) => { wrong.textContent = text; });
}
