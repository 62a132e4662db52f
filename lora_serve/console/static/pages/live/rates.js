/** @file Tokens per second and latencies over the last minutes, beside their targets. */

import { Chart } from "../../components/chart.js";
import { clock, ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useMemo } from "../../vendor/preact.js";

/** @typedef {import("./history.js").History} History @typedef {import("./types.js").Frame} Frame */

const WORDS = TEXTS.live.rates;
const HEIGHT = 128;

/**
 * Three small charts up to a time, drawn anew once a second.
 * @param {{history: History, time: number}} props
 */
export function Rates({ history, time }) {
  const second = Math.floor(time);
  const { x, columns } = useMemo(() => seriesOf(history, second + 1), [history, second]);
  const targets = history.hello?.targets;
  const last = (/** @type {(number | null)[]} */ values) => values.at(-1) ?? null;
  return html`<div class="live-rates">
    <${Rate}
      title=${WORDS.tokens}
      x=${x}
      format=${number}
      lines=${[
        { label: WORDS.output, values: columns.output, colour: "var(--accent)", isFilled: true },
        { label: WORDS.prompt, values: columns.prompt, colour: "var(--muted)", isDashed: true },
      ]}
      now=${number(last(columns.output))}
      of=${WORDS.output}
    />
    <${Rate} title=${WORDS.firstToken} x=${x} format=${ms} now=${ms(last(columns.first95))} of=${WORDS.p95}
      lines=${latencyLines(x, columns.first50, columns.first95, targets?.first_token_ms ?? null)} />
    <${Rate} title=${WORDS.interToken} x=${x} format=${ms} now=${ms(last(columns.inter95))} of=${WORDS.p95}
      lines=${latencyLines(x, columns.inter50, columns.inter95, targets?.inter_token_ms ?? null)} />
  </div>`;
}

/**
 * @param {{title: string, x: number[], lines: any[], format: (value: any) => string, now: string,
 *   of: string}} props `of`: which line `now` is the end of
 */
function Rate({ title, x, lines, format, now, of }) {
  return html`<section class="panel live-rate" aria-label=${title}>
    <h2>${title}</h2>
    <div class="live-rate-head">
      <p class="live-rate-now">${now}<span class="muted"> ${of}</span></p>
      <ul class="live-key">
        ${lines.map((line) => html`<li key=${line.label}><i class=${line.isDashed ? "line dashed" : "line"} style=${{ color: line.colour }}></i>${line.label}</li>`)}
      </ul>
    </div>
    <${Chart} label=${title} x=${x} series=${lines} height=${HEIGHT} format=${format} formatX=${minuteOf} />
  </section>`;
}

/** @param {number[]} x @param {(number | null)[]} p50 @param {(number | null)[]} p95 @param {number | null} target */
function latencyLines(x, p50, p95, target) {
  const lines = [
    { label: WORDS.p50, values: p50, colour: "var(--accent)", isFilled: true },
    { label: WORDS.p95, values: p95, colour: "var(--text)" },
  ];
  if (target !== null) lines.push({ label: WORDS.target, values: x.map(() => target), colour: "var(--warn)", ...{ isDashed: true } });
  return lines;
}

/**
 * Minute and second of a time: "44:40".
 * @param {number} time
 */
function minuteOf(time) {
  return clock(time).slice(3);
}

/**
 * The frames' figures up to a time, one point a second.
 * @param {History} history @param {number} until
 */
function seriesOf(history, until) {
  const x = /** @type {number[]} */ ([]);
  const names = /** @type {const} */ (["output", "prompt", "first50", "first95", "inter50", "inter95"]);
  const columns = /** @type {Record<typeof names[number], (number | null)[]>} */ ({
    output: [],
    prompt: [],
    first50: [],
    first95: [],
    inter50: [],
    inter95: [],
  });
  for (const frame of history.frames) {
    const second = Math.floor(frame.time);
    if (frame.time > until || x.at(-1) === second) continue;
    x.push(second);
    const values = figuresOf(frame);
    for (const name of names) columns[name].push(values[name]);
  }
  return { x, columns };
}

/** @param {Frame} frame */
function figuresOf({ tokens_per_second: tokens, latency }) {
  return {
    output: tokens?.output ?? null,
    prompt: tokens?.prompt ?? null,
    first50: latency?.first_token_ms.p50 ?? null,
    first95: latency?.first_token_ms.p95 ?? null,
    inter50: latency?.inter_token_ms.p50 ?? null,
    inter95: latency?.inter_token_ms.p95 ?? null,
  };
}
