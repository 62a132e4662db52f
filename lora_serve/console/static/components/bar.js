import { bytes, percent } from "../lib/format.js";
import { html } from "../vendor/preact.js";

/**
 * @typedef {{label: string, value: number, colour: string, data?: Record<string, string>}} Segment
 */

/**
 * A stacked bar of parts of a whole: the parts' colours with their names on hover, and the sum in words.
 * @param {{label: string, segments: Segment[], whole?: number|null, format?: (value: number) => string, data?: Record<string, string>}} props
 *   `whole`: a budget; null: the parts' sum.
 */
export function Bar({ label, segments, whole = null, format = bytes, data = {} }) {
  const used = segments.reduce((sum, one) => sum + one.value, 0);
  const all = Math.max(whole ?? used, used);
  const words = whole ? `${format(used)} / ${format(whole)} (${percent(used / whole)})` : format(used);
  return html`<div class="bar-row" ...${data}>
    <span class="bar-label">${label}</span>
    <div class="bar" role="img" aria-label=${`${label}: ${words}`}>
      ${segments.map(
        (one) => html`<span
          key=${one.label}
          class="bar-part"
          title=${`${one.label}: ${format(one.value)}`}
          style=${{ width: `${all ? (100 * one.value) / all : 0}%`, background: one.colour }}
          ...${one.data ?? {}}
        ></span>`,
      )}
    </div>
    <span class="bar-words">${words}</span>
  </div>`;
}
