/** @file What colours and forms mean. */

import { colourOf } from "../../lib/colour.js";
import { link } from "../../lib/router.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { BASE } from "./track.js";

/** @typedef {import("./history.js").History} History */

const WORDS = TEXTS.live.legend;
const MAX_ADAPTERS = 24;
const MAX_ON_PHONES = 8;

/**
 * The adapters of the lanes between two times, those with most lanes first.
 * @param {{history: History, from: number, to: number}} props
 */
export function Legend({ history, from, to }) {
  const [isWhole, setWhole] = useState(false);
  const found = adaptersBetween(history, from, to);
  if (!found.length) return null;
  const most = matchMedia("(max-width: 720px)").matches ? MAX_ON_PHONES : MAX_ADAPTERS;
  const hidden = isWhole ? 0 : found.length - most;
  return html`<ul class="live-legend" aria-label=${WORDS.adapters}>
    ${found.slice(0, isWhole ? found.length : most).map(
      ({ digest, name, label }) => html`<li key=${`${digest} ${name}`} data-digest=${digest} data-adapter=${name}>
        <span class="live-swatch" style=${{ color: colourOf(digest) }}></span>
        ${digest === BASE ? name : html`<a href=${link("adapters", name)}>${label}</a>`}
      </li>`,
    )}
    ${hidden > 0 && html`<li><button type="button" class="live-more" onClick=${() => setWhole(true)}>${WORDS.more(hidden)}</button></li>`}
  </ul>`;
}

/**
 * Name and digest of every adapter in sight, by name. Versions of one adapter, which differ in colour, show their numbers.
 * @param {History} history @param {number} from @param {number} to
 */
function adaptersBetween(history, from, to) {
  const found = /** @type {Map<string, {digest: string, name: string, version: number}>} */ (new Map());
  for (const track of history.tracks.values()) {
    if (track.start > to || track.end < from || !track.info) continue;
    if (!track.info.adapters.length) found.set(BASE, { digest: BASE, name: TEXTS.live.base, version: 0 });
    for (const { digest, name, version } of track.info.adapters) found.set(`${digest} ${name}`, { digest, name, version });
  }
  const all = [...found.values()].sort((one, other) => one.name.localeCompare(other.name) || one.version - other.version);
  const isAlone = (/** @type {string} */ name) => all.filter((one) => one.name === name).length === 1;
  return all.map((one) => ({ ...one, label: isAlone(one.name) ? one.name : `${one.name}@${one.version}` }));
}

/** The forms of cells and lanes. */
export function Forms() {
  const forms = /** @type {const} */ (["prefill", "decode", "draft", "waiting", "loading", "compiling", "preempted"]);
  return html`<ul class="live-forms" aria-label=${WORDS.forms}>
    ${forms.map(
      (form) => html`<li key=${form}><span class="live-form" data-form=${form} aria-hidden="true"></span>${WORDS[form]}</li>`,
    )}
  </ul>`;
}
