/** @file The figures of a moment, large. */

import { ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** @typedef {import("./history.js").History} History @typedef {import("./types.js").Frame} Frame */
/** @typedef {import("./present.js").Present} Present */

const WORDS = TEXTS.live.figures;

/**
 * Rows, queue, adapters, tokens and steps of a moment.
 * @param {{history: History, frame: Frame, present: Present, time: number}} props
 */
export function Figures({ history, frame, present, time }) {
  const steps = paceAt(history, time);
  const most = (frame.limits?.max_num_seqs ?? history.hello?.max_num_seqs ?? 0) * Math.max(1, history.replicas.length);
  const tokens = frame.tokens_per_second;
  return html`<dl class="live-figures" aria-label=${WORDS.label}>
    <${Figure} name=${WORDS.running} value=${number(present.running)} more=${most ? WORDS.ofRows(most) : ""} data="running" />
    <${Figure} name=${WORDS.waiting} value=${number(present.waiting)} more=${frame.preemptions ? WORDS.preemptions(number(frame.preemptions)) : ""} data="waiting" />
    <${Figure} name=${WORDS.adapters} value=${number(present.adapters)} data="adapters" />
    ${tokens && html`<${Figure} name=${WORDS.output} value=${number(Math.round(tokens.output))} data="output" />`}
    ${tokens && html`<${Figure} name=${WORDS.prompt} value=${number(Math.round(tokens.prompt))} data="prompt" />`}
    <${Figure} name=${WORDS.steps} value=${number(Math.round(steps.perSecond))} more=${steps.ms === null ? "" : WORDS.perStep(ms(steps.ms))} data="steps" />
  </dl>`;
}

/** @param {{name: string, value: string, more?: string, data: string}} props */
function Figure({ name, value, more = "", data }) {
  return html`<div data-figure=${data}>
    <dt>${name}</dt>
    <dd><span class="figure-number">${value}</span> <span class="muted">${more}</span></dd>
  </div>`;
}

/**
 * Steps in the last second, and the mean time of each.
 * @param {History} history @param {number} time @returns {{perSecond: number, ms: number | null}}
 */
function paceAt(history, time) {
  let count = 0;
  let sum = 0;
  for (const steps of history.steps.values()) {
    for (let at = steps.firstFrom(time - 1); at < steps.marks.length; at++) {
      const mark = steps.marks[at];
      if (!mark || mark.end > time) break;
      count++;
      sum += mark.ms;
    }
  }
  return { perSecond: count, ms: count ? sum / count : null };
}
