/** @file Pause, the span of the lanes, and the way back through the last two minutes. */

import { Button } from "../../components/button.js";
import { clock, span as spanWords } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { KEPT_SECONDS } from "./history.js";
import { SPANS } from "./layout.js";

/** @typedef {import("./view.js").View} View @typedef {import("./history.js").History} History */

const WORDS = TEXTS.live.controls;

/**
 * The buttons above the lanes.
 * @param {{view: View, onToggle: () => void, onSpan: (span: number) => void}} props
 */
export function Controls({ view, onToggle, onSpan }) {
  const isPaused = view.end !== null;
  return html`<div class="live-controls">
    <div class="live-spans" role="group" aria-label=${WORDS.span}>
      ${SPANS.map(
        (seconds) => html`<button key=${seconds} type="button" aria-pressed=${String(seconds === view.span)} onClick=${() => onSpan(seconds)}>
          ${WORDS.spans(seconds)}
        </button>`,
      )}
    </div>
    <${Button} kind=${isPaused ? "primary" : "plain"} onClick=${onToggle}>
      <span class=${isPaused ? "live-icon play" : "live-icon pause"} aria-hidden="true"></span>${isPaused ? WORDS.resume : WORDS.pause}
    <//>
  </div>`;
}

/**
 * The slider back through what is kept.
 * @param {{history: History, view: View, onMove: (end: number) => void}} props
 */
export function Scrub({ history, view, onMove }) {
  const { now } = history;
  const kept = Math.max(1, Math.min(KEPT_SECONDS, now - (history.frames[0]?.time ?? now)));
  const back = Math.max(0, now - (view.end ?? now));
  const isNow = view.end === null;
  return html`<div class="live-scrub">
    <span class="muted" aria-hidden="true">−${spanWords(Math.round(kept))}</span>
    <input
      type="range"
      min=${-Math.round(kept * 10)}
      max="0"
      value=${-Math.round(back * 10)}
      aria-label=${WORDS.scrub}
      aria-valuetext=${isNow ? WORDS.now : WORDS.ago(spanWords(back))}
      onInput=${(/** @type {any} */ event) => onMove(now + Number(event.currentTarget.value) / 10)}
    />
    <span class="live-when">${isNow ? WORDS.now : clock(view.end)}</span>
  </div>`;
}

/**
 * The scale under the lanes: how long before their right edge.
 * @param {{span: number, isPaused: boolean}} props
 */
export function Axis({ span, isPaused }) {
  const parts = [1, 0.8, 0.6, 0.4, 0.2, 0];
  return html`<div class="live-axis" aria-hidden="true">
    ${parts.map((part) => {
      const words = part ? `−${Number((part * span).toFixed(1))} s` : isPaused ? "0" : WORDS.now;
      return html`<span key=${part} style=${{ left: `${100 * (1 - part)}%` }}>${words}</span>`;
    })}
  </div>`;
}
