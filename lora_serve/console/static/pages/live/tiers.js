/** @file Where adapters are kept, by bytes, and what moves between the tiers. */

import { colourOf } from "../../lib/colour.js";
import { ago, bytes, ms, number, percent, shortDigest } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useRef } from "../../vendor/preact.js";

/** @typedef {import("./types.js").Frame} Frame @typedef {import("./types.js").Tier} Tier */
/** @typedef {import("./history.js").History} History */

const WORDS = TEXTS.live.tiers;
const ORDER = ["device", "host", "disk", "redis"];
const MOVES_SHOWN = 4;
const FLIGHT_MS = 700;
const MOST_FLIGHTS = 12; // at once

/**
 * The tiers from the fastest to the slowest, with their moves.
 * @param {{history: History, frame: Frame, time: number, isLive: boolean}} props
 */
export function Tiers({ history, frame, time, isLive }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const { tiers } = frame;
  const moves = history.moves.filter((move) => move.time <= time);
  useFlights(box, history, isLive);
  if (!tiers) return null;
  const names = [...ORDER.filter((name) => tiers[name]), ...Object.keys(tiers).filter((name) => !ORDER.includes(name))];
  return html`<section class="panel live-tiers" aria-label=${WORDS.heading}>
    <header class="live-panel-head"><h2>${WORDS.heading}</h2></header>
    <ul class="live-tier-list" ref=${box}>
      ${names.map((name) => html`<${TierBar} key=${name} name=${name} tier=${/** @type {Tier} */ (tiers[name])} frame=${frame} />`)}
    </ul>
    <h3 class="live-minor">${WORDS.moves}</h3>
    <ul class="live-moves">
      ${moves.length
        ? moves.slice(-MOVES_SHOWN).reverse().map((move) => html`<${MoveLine} key=${`${move.time}${move.digest}${move.from}${move.to}`} move=${move} time=${time} />`)
        : html`<li class="muted">${WORDS.none}</li>`}
    </ul>
  </section>`;
}

/** @param {{name: string, tier: Tier, frame: Frame}} props */
function TierBar({ name, tier, frame }) {
  const words = WORDS.names[name] ?? name;
  const known = tier.bytes === null ? WORDS.unknown : tier.budget ? WORDS.of(bytes(tier.bytes), bytes(tier.budget)) : WORDS.unlimited(bytes(tier.bytes));
  const asked = tier.hits + tier.misses;
  return html`<li class="live-tier" data-tier=${name}>
    <span class="live-tier-name">${words}</span>
    <span class="live-tier-bar" role="img" aria-label=${`${words}: ${known}`}>${segmentsOf(name, tier, frame)}</span>
    <span class="live-tier-words">${known}</span>
    <span class="live-tier-more muted">
      ${tier.items === null ? "" : `${number(tier.items)} ${WORDS.items[tier.items === 1 ? 0 : 1]}`}${asked ? ` · ${WORDS.hits(percent(tier.hits / asked))}` : ""}
    </span>
  </li>`;
}

/**
 * The bar's parts, of the tier's limit: on the device each slot in its colour, elsewhere the sum. Without a limit there
 * is no scale, and so no bar but the device's slots as parts of their sum.
 * @param {string} name @param {Tier} tier @param {Frame} frame
 */
function segmentsOf(name, tier, frame) {
  const used = tier.bytes ?? 0;
  const whole = Math.max(tier.budget, used, 1);
  const slots = name === "device" ? frame.slots : [];
  const listed = slots.reduce((sum, slot) => sum + slot.bytes, 0);
  const rest = Math.max(0, used - listed);
  return html`${slots.map(
      (slot) => html`<i key=${`${slot.replica}${slot.index}`} style=${{ width: `${(100 * slot.bytes) / whole}%`, background: colourOf(slot.digest) }}></i>`,
    )}
    ${rest > 0 && tier.budget > 0 && html`<i class="rest" style=${{ width: `${(100 * rest) / whole}%` }}></i>`}`;
}

/** @param {{move: import("./types.js").Move & {time: number}, time: number}} props */
function MoveLine({ move, time }) {
  const place = (/** @type {string} */ name) => WORDS.names[name] ?? name;
  const way = move.to === "none" ? WORDS.evicted(place(move.from)) : WORDS.move(place(move.from), place(move.to));
  return html`<li data-adapter=${move.name} data-digest=${move.digest}>
    <span class="live-swatch" style=${{ color: colourOf(move.digest) }}></span>
    <span class="live-adapter">${move.name || shortDigest(move.digest)}</span>
    <span class="live-way">${way}</span>
    <span class="muted">${move.to === "none" ? "" : ms(move.ms)}</span>
    <span class="muted live-ago">${ago(move.time, time)}</span>
  </li>`;
}

/**
 * Lets a mote of the adapter's colour fly from tier to tier for each new move.
 * @param {{current: HTMLElement | null}} box @param {History} history @param {boolean} isLive
 */
function useFlights(box, history, isLive) {
  const seen = useRef(history.now);
  useEffect(() => {
    const fresh = history.moves.filter((move) => move.time > seen.current);
    seen.current = history.now;
    if (!isLive || !box.current || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const move of fresh.slice(-MOST_FLIGHTS)) fly(box.current, move);
  }, [history.now]);
}

/** @param {HTMLElement} box @param {import("./types.js").Move} move */
function fly(box, move) {
  const bar = (/** @type {string} */ name) => box.querySelector(`[data-tier="${CSS.escape(name)}"] .live-tier-bar`)?.getBoundingClientRect();
  const bounds = box.getBoundingClientRect();
  const source = bar(move.from) ?? bar(move.to);
  const target = bar(move.to);
  if (!source || (box.querySelectorAll(".live-mote").length >= MOST_FLIGHTS)) return;
  const mote = document.createElement("span");
  mote.className = "live-mote";
  mote.setAttribute("aria-hidden", "true");
  mote.style.color = colourOf(move.digest);
  box.append(mote);
  const x = source.left - bounds.left + source.width * (0.15 + 0.7 * Math.random());
  const from = `translate(${x}px, ${source.top - bounds.top + source.height / 2}px)`;
  const to = target ? `translate(${x}px, ${target.top - bounds.top + target.height / 2}px)` : `${from} scale(3)`;
  const flight = mote.animate(
    [{ transform: from, opacity: 0.2 }, { opacity: 1, offset: 0.2 }, { transform: to, opacity: target ? 1 : 0 }],
    { duration: FLIGHT_MS, easing: "cubic-bezier(0.4, 0, 0.2, 1)" },
  );
  flight.onfinish = flight.oncancel = () => mote.remove();
}
