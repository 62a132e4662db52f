import { Bar } from "../../components/bar.js";
import { Chart } from "../../components/chart.js";
import { NOTHING, bytes, ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useMemo } from "../../vendor/preact.js";

const PARTS = /** @type {const} */ (["weights", "kv", "adapters", "activations"]);
const COLOURS = { weights: "var(--muted)", kv: "var(--accent)", adapters: "var(--good)", activations: "var(--warn)" };

/** Who is let in: the queue with its limits, blocks, memory, and the last steps. @param {{engine: any, health: any}} props */
export function Admission({ engine, health }) {
  const words = TEXTS.engine.admission;
  const { queue } = health;
  const most = (/** @type {number|null} */ value) => (value === null ? TEXTS.engine.limits.none : number(value));
  const used = engine.num_blocks - engine.num_free_blocks;
  const count = (/** @type {number} */ value) => number(value);
  return html`<section class="panel stack" aria-labelledby="engine-admission">
    <h2 id="engine-admission">${words.title}</h2>
    <dl class="facts">
      <dt>${words.running}</dt>
      <dd>${words.of(number(engine.num_running), most(engine.batcher?.in_force.max_num_seqs ?? null))}</dd>
      <dt>${words.waiting}</dt>
      <dd>${words.of(number(queue.num_requests), most(queue.max_requests))}</dd>
      <dt>${words.waitingTokens}</dt>
      <dd>${words.of(number(queue.num_tokens), most(queue.max_tokens))}</dd>
      <dt>${words.preemptions}</dt>
      <dd>${words.preempted(engine.swap.num_swapped, engine.swap.num_recomputed)}</dd>
      <dt>${words.outOfMemory}</dt>
      <dd>${number(engine.memory.num_out_of_memory)}</dd>
    </dl>
    <${Bar} label=${words.blocks} whole=${engine.num_blocks} format=${count} segments=${[{ label: words.used, value: used, colour: "var(--accent)" }]} />
    <${Bar}
      label=${words.memory}
      whole=${engine.memory.limit}
      format=${bytes}
      segments=${PARTS.map((name) => ({ label: words.parts[name], value: engine.memory[name], colour: COLOURS[name] }))}
    />
    <${Steps} batches=${engine.recent_batches} />
  </section>`;
}

/** The last steps as they were: their length, and their rows. @param {{batches: any[]}} props */
function Steps({ batches }) {
  const words = TEXTS.engine.admission;
  const key = JSON.stringify(batches);
  const { x, seconds, rows } = useMemo(
    () => ({
      x: batches.map((_, at) => at - batches.length + 1),
      seconds: batches.map((one) => 1000 * one.seconds),
      rows: batches.map((one) => one.num_rows),
    }),
    [key],
  );
  if (batches.length < 2) return html`<p class="hint">${words.noBatches}</p>`;
  return html`<h3>${words.batches}</h3>
    <${Chart}
      label=${words.batches}
      x=${x}
      isTime=${false}
      height=${120}
      formatX=${(/** @type {number} */ value) => (Number.isInteger(value) ? number(value) : "")}
      labelX=${words.stepsFromNow}
      format=${(/** @type {number} */ value) => (value === null ? NOTHING : ms(value))}
      series=${[{ label: words.batchMs, values: seconds, colour: "var(--accent)", isBars: true }]}
    />
    <${Chart}
      label=${words.batchRows}
      x=${x}
      isTime=${false}
      height=${120}
      formatX=${(/** @type {number} */ value) => (Number.isInteger(value) ? number(value) : "")}
      labelX=${words.stepsFromNow}
      format=${number}
      series=${[{ label: words.batchRows, values: rows, colour: "var(--good)", isBars: true }]}
    />`;
}
