/** @file The blocks of the KV cache. */

import { number, percent } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

const WORDS = TEXTS.live.blocks;

/**
 * The blocks as a bar: in use and free; some of both hold a beginning that other requests may share.
 * @param {{blocks: {total: number, free: number, cached: number | null}}} props
 */
export function Blocks({ blocks: { total, free, cached } }) {
  const used = total - free;
  return html`<section class="panel live-blocks" aria-label=${WORDS.heading}>
    <header class="live-panel-head"><h2>${WORDS.heading}</h2><span class="muted">${percent(used / Math.max(1, total))}</span></header>
    <div class="live-block-bar" role="img" aria-label=${WORDS.of(number(used), number(total))}>
      <i class="used" style=${{ width: `${(100 * used) / Math.max(1, total)}%` }}></i>
    </div>
    <ul class="live-key">
      <li><i class="used"></i>${number(used)} ${WORDS.used}</li>
      <li><i class="free"></i>${number(free)} ${WORDS.free}</li>
      ${cached !== null && html`<li>${number(cached)} ${WORDS.cached}</li>`}
    </ul>
  </section>`;
}
