import { Table } from "../../components/table.js";
import { NOTHING, ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

const ADAPTED = ["max_num_seqs", "max_num_batched_tokens", "batch_wait_ms"];

/** Targets beside what is measured, and what the controller makes of the limits. @param {{batcher: any}} props */
export function Controller({ batcher }) {
  const words = TEXTS.engine.controller;
  const labels = /** @type {Record<string, string>} */ (TEXTS.engine.limits.labels);
  const write = (/** @type {string} */ name, /** @type {number} */ value) => (name.endsWith("_ms") ? ms(value) : number(value));
  const columns = [
    { key: "name", label: words.limit, render: (/** @type {any} */ row) => labels[row.name] },
    { key: "set", label: words.set, isNumber: true },
    { key: "inForce", label: words.inForce, isNumber: true },
  ];
  const rows = ADAPTED.map((name) => ({ name, set: write(name, batcher[name]), inForce: write(name, batcher.in_force[name]) }));
  return html`<section class="panel stack" aria-labelledby="engine-controller">
    <h2 id="engine-controller">${words.title}</h2>
    <p data-reason>${batcher.reason}</p>
    <dl class="facts">
      <dt>${words.first}</dt>
      <dd><${Against} measured=${batcher.measured.ttft_p95_ms} target=${batcher.latency_target_ms} /></dd>
      <dt>${words.between}</dt>
      <dd><${Against} measured=${batcher.measured.inter_token_p95_ms} target=${batcher.inter_token_target_ms} /></dd>
    </dl>
    <${Table} caption=${words.title} columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => row.name} />
  </section>`;
}

/** @param {{measured: number|null, target: number|null}} props */
function Against({ measured, target }) {
  const words = TEXTS.engine.controller;
  if (target === null) return html`${ms(measured)} <span class="muted">(${words.noTarget})</span>`;
  const isKept = measured === null || measured <= target;
  const tag = measured === null ? null : html`<span class=${`tag ${isKept ? "good" : "bad"}`}>${isKept ? words.kept : words.missed}</span>`;
  return html`${words.against(measured === null ? NOTHING : ms(measured), ms(target))} ${tag}`;
}
