import { Chart } from "../../components/chart.js";
import { Table } from "../../components/table.js";
import { ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useMemo } from "../../vendor/preact.js";
import { decodeSeconds, promptSeconds } from "./prediction.js";

const POINTS = 32;

/** What the engine has learned about the cost of its steps. @param {{batcher: any, maxLoras: number}} props */
export function Cost({ batcher, maxLoras }) {
  const words = TEXTS.engine.cost;
  const cost = batcher.step_cost_us;
  const rows = Object.entries(cost).map(([name, us]) => ({ name, us }));
  const columns = [
    { key: "name", label: words.one, render: (/** @type {any} */ row) => /** @type {any} */ (words.names)[row.name] ?? row.name },
    { key: "us", label: words.costs, isNumber: true, render: (/** @type {any} */ row) => `${number(row.us)} µs` },
  ];
  const most = batcher.max_num_seqs;
  const key = JSON.stringify([cost, most, batcher.max_num_batched_tokens, maxLoras]);
  const { x, decode, full } = useMemo(() => curves(cost, most, batcher.max_num_batched_tokens, maxLoras), [key]);
  return html`<section class="panel stack" aria-labelledby="engine-cost">
    <h2 id="engine-cost">${words.title}</h2>
    <p class="hint">${words.error(batcher.step_cost_error)}</p>
    <${Chart}
      label=${words.chart}
      x=${x}
      isTime=${false}
      format=${(/** @type {number} */ value) => ms(value)}
      formatX=${(/** @type {number} */ value) => `${number(value)}`}
      labelX=${words.rows}
      series=${[
        { label: words.predicted, values: decode, colour: "var(--accent)", isFilled: true },
        { label: words.prompts, values: full, colour: "var(--warn)", isDashed: true },
      ]}
    />
    <${Table} caption=${words.title} columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => row.name} dataOf=${(/** @type {any} */ row) => ({ "data-cost": row.name })} />
  </section>`;
}

/** @param {Record<string, number>} cost @param {number} most @param {number} tokens @param {number} maxLoras */
function curves(cost, most, tokens, maxLoras) {
  const count = Math.max(2, Math.min(POINTS, most));
  const x = Array.from({ length: count }, (_, at) => Math.round(1 + (at * (most - 1)) / (count - 1)));
  const decode = x.map((rows) => 1000 * decodeSeconds(cost, rows, maxLoras));
  const full = x.map((rows, at) => (decode[at] ?? 0) + 1000 * (promptSeconds(cost, Math.max(0, tokens - rows)) - (cost.step ?? 0) / 1e6));
  return { x, decode, full };
}
