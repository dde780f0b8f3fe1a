// Prompt explorer: tokens or hashes in, who holds how much out.

import { h, s, n, positionOf, legend, field, remember } from "./dom.js";

// numbers finds the numbers in a text, as text: hashes don't fit in a float64.
const numbers = (text) => text.match(/-?\d+/g) ?? [];

export function show(main, server, signal) {
  const model = h("input", { list: "models", required: true, placeholder: "model" });
  const models = h("datalist", { id: "models" });
  const group = h("input", { placeholder: "default" });
  const lora = h("input", { placeholder: "none" });
  const salt = h("input", { placeholder: "none" });
  const kind = h("select", {}, h("option", { value: "token_ids" }, "token ids"), h("option", { value: "block_hashes" }, "local block hashes"));
  const content = h("textarea", { placeholder: "1, 2, 3, 4, …", required: true, spellcheck: "false" });
  const wrong = h("p", { class: "error", role: "alert" });
  const answer = h("div", { "aria-live": "polite" });
  const form = h("form", {},
    h("div", { class: "fields" }, field("model", "Model", model), field("group", "Routing group", group), field("kind", "Given as", kind),
      field("lora", "LoRA", lora), field("salt", "Cache salt", salt)),
    models, field("content", "Prompt", content), h("p", {}, h("button", {}, "Who holds it?")));
  main.append(h("section", {}, form, wrong), answer);

  const sizes = new Map(); // block size by model and group
  server.read("/workers", { signal }).then((workers) => {
    for (const w of workers) sizes.set(w.model_name + "\n" + w.routing_group, w.block_size);
    const names = [...new Set(workers.map((w) => w.model_name))];
    models.append(...names.map((name) => h("option", { value: name })));
    if (!model.value && names.length) { model.value = names[0]; remember("model", names[0]); }
  }).catch((error) => { if (!signal.aborted) wrong.textContent = error.message; });

  form.addEventListener("submit", async (e) => {
    e.preventDefault();
    wrong.textContent = "";
    const given = numbers(content.value);
    const byHash = kind.value === "block_hashes";
    const where = { model_name: model.value, routing_group: group.value || "default" };
    if (!byHash && lora.value) where.lora_name = lora.value;
    if (!byHash && salt.value) where.cache_salt = salt.value;
    // The numbers are put in as they stand.
    const body = JSON.stringify(where).slice(0, -1) + `,"${kind.value}":[${given.join(",")}]}`;
    try {
      const a = await server.read(byHash ? "/query_by_hash" : "/query", { method: "POST", body, signal, headers: { "Content-Type": "application/json" } });
      const size = sizes.get(where.model_name + "\n" + where.routing_group) ?? 1;
      answer.replaceChildren(bars(a, byHash ? given.length * size : given.length));
    } catch (error) {
      answer.replaceChildren();
      if (!signal.aborted) wrong.textContent = error.message;
    }
  });
}

// bars draws what each instance holds of a prompt of so many tokens.
function bars(a, length) {
  const holders = Object.entries(a.instances).sort(([x, p], [y, q]) => q.longest_matched - p.longest_matched || q.gpu - p.gpu || (x < y ? -1 : 1));
  const whole = Math.max(1, length, ...holders.map(([, i]) => i.longest_matched));
  const out = h("section", { id: "holders" }, h("h2", {}, `${n(holders.length)} of the workers hold something of ${n(length)} tokens, at log sequence ${positionOf(a)}`));
  if (!holders.length) return out;
  out.append(legend(["device", "host", "disk"]));
  for (const [name, i] of holders) {
    // The tiers continue one another; each number counts from the beginning.
    const parts = [["device", 0, i.gpu], ["host", i.gpu, Math.max(i.gpu, i.cpu)], ["disk", Math.max(i.gpu, i.cpu), i.longest_matched]];
    out.append(h("div", { class: "holder" },
      h("p", {}, h("b", {}, name), h("span", { class: "soft" }, `${n(i.longest_matched)} tokens, ${Math.round(i.longest_matched / whole * 100)} %`)),
      s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" }, s("rect", { class: "rest", width: 1000, height: 10 }),
        parts.filter(([, from, to]) => to > from).map(([tier, from, to]) => s("rect", { class: tier, x: from / whole * 1000, width: (to - from) / whole * 1000, height: 10 }))),
      h("p", { class: "soft" }, "ranks: " + (Object.entries(i.dp).map(([rank, tokens]) => `${rank} has ${n(tokens)} on the device`).join(", ") || "none on the device"))));
  }
  return out;
}
