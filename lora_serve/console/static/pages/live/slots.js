/** @file The device's slots: which adapter is in each, and how many rows use it. */

import { colourOf } from "../../lib/colour.js";
import { bytes, plural } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** @typedef {import("./types.js").Frame} Frame @typedef {import("./types.js").Slot} Slot */

const WORDS = TEXTS.live.slots;
const MOST_PIPS = 8;

/**
 * The slots of every replica.
 * @param {{frame: Frame, isScoped: boolean}} props `isScoped`: the frame holds one tenant's slots only
 */
export function Slots({ frame, isScoped }) {
  const replicas = [...new Set(frame.slots.map((slot) => slot.replica))].sort();
  const all = frame.max_loras;
  const words = isScoped || !all ? plural(frame.slots.length, "slot", "slots") : WORDS.used(frame.slots.length, all * Math.max(1, replicas.length));
  return html`<section class="panel live-slots" aria-label=${WORDS.heading}>
    <header class="live-panel-head"><h2>${WORDS.heading}</h2><span class="muted">${words}</span></header>
    ${(replicas.length ? replicas : [""]).map((replica) => {
      const slots = frame.slots.filter((slot) => slot.replica === replica).sort((one, other) => one.index - other.index);
      const free = isScoped || !all ? 0 : all - slots.length;
      return html`${replicas.length > 1 && html`<h3 class="live-replica">${TEXTS.live.lanes.replica(replica)}</h3>`}
        <ul class="live-slot-list" key=${replica}>
          ${slots.map((slot) => html`<${SlotCard} key=${slot.index} slot=${slot} />`)}
          ${free > 0 && html`<li key="free" class="live-slot free">${WORDS.free(free)}</li>`}
        </ul>`;
    })}
  </section>`;
}

/** @param {{slot: Slot}} props */
function SlotCard({ slot }) {
  const rows = slot.num_rows ? plural(slot.num_rows, ...WORDS.rows) : WORDS.idle;
  const names = [`${slot.name}@${slot.version}`, ...slot.also];
  return html`<li
    class="live-slot"
    data-slot=${slot.index}
    data-adapter=${slot.name}
    data-digest=${slot.digest}
    data-replica=${slot.replica}
    data-busy=${slot.num_rows > 0}
    title=${`${names.join(", ")} · ${bytes(slot.bytes)} · ${rows}${slot.pinned ? ` · ${WORDS.pinned}` : ""}`}
    style=${{ "--colour": colourOf(slot.digest) }}
  >
    <span class="live-swatch" style=${{ color: colourOf(slot.digest) }}></span>
    <span class="live-adapter">${slot.name}<span class="muted">@${slot.version}</span>${slot.also.length > 0 && html`, <span class="live-also">${slot.also.join(", ")}</span>`}</span>
    ${slot.pinned && html`<span class="live-pin" role="img" aria-label=${WORDS.pinned}></span>`}
    <span class="live-pips" aria-hidden="true">
      ${Array.from({ length: Math.min(slot.num_rows, MOST_PIPS) }, (_, at) => html`<i key=${at}></i>`)}
    </span>
    <span class="live-slot-words">${rows}</span>
  </li>`;
}
