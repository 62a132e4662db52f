/** @file The lanes' names, a row of the page beside each lane of the canvas. */

import { colourOf } from "../../lib/colour.js";
import { number, percent, plural } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { trackIn } from "./layout.js";

/** @typedef {import("./history.js").History} History @typedef {import("./layout.js").Stack} Stack */
/** @typedef {import("./layout.js").LaneBox} LaneBox @typedef {import("./track.js").Track} Track */

const WORDS = TEXTS.live;
const SHORT_ID = 6;

/**
 * The rows beside the lanes.
 * @param {{history: History, stack: Stack, time: number, chosenId: string | null, onPick: (track: Track) => void}} props
 */
export function LaneList({ history, stack, time, chosenId, onPick }) {
  return html`<ul class="live-list" aria-label=${WORDS.lanes.list} style=${{ height: `${stack.height}px` }}>
    ${stack.boxes.map((box) => {
      const track = trackIn(history, box, time);
      const place = { top: `${box.top}px`, height: `${box.height}px` };
      const key = `${box.kind}${box.replica}/${box.index}`;
      return html`<li key=${key} class="live-lane" data-kind=${box.kind} style=${place}>
        ${track && html`<${LaneName} track=${track} time=${time} isChosen=${track.id === chosenId} onPick=${onPick} />`}
      </li>`;
    })}
  </ul>`;
}

/**
 * Who is in a lane.
 * @param {{track: Track, time: number, isChosen: boolean, onPick: (track: Track) => void}} props
 */
function LaneName({ track, time, isChosen, onPick }) {
  const state = track.stateAt(time) ?? "finished";
  const name = nameOf(track);
  return html`<button
    type="button"
    class="live-name"
    data-request=${track.id}
    data-adapter=${name}
    data-digest=${track.digest}
    data-state=${state}
    aria-pressed=${isChosen}
    title=${WORDS.lanes.title(name, track.id, WORDS.states[state])}
    onClick=${() => onPick(track)}
  >
    <span class="live-swatch" style=${{ color: colourOf(track.digest) }}></span>
    <span class="live-adapter">${name}</span>
    <span class="live-id">${shortId(track.id)}</span>
    <span class="live-tenant">${track.info?.tenant}</span>
    <span class="live-state">${state === "running" ? html`<${Progress} track=${track} />` : WORDS.states[state]}</span>
  </button>`;
}

/**
 * How far a running request is: its prompt's part, then its tokens.
 * @param {{track: Track}} props
 */
function Progress({ track }) {
  const { num_output: outputs = 0, num_prompt: prompt = 0, num_computed: computed = 0 } = track.info ?? {};
  const words = outputs || !prompt ? WORDS.lanes.outputs(number(outputs)) : WORDS.lanes.prompt(percent(Math.min(1, computed / prompt)));
  return html`<span class="hidden">${WORDS.states.running}, </span>${words}`;
}

/**
 * The headings of the lanes' groups, over list and canvas.
 * @param {{stack: Stack, present: import("./present.js").Present}} props
 */
export function LaneHeads({ stack, present }) {
  return stack.heads.map(({ kind, replica, top }) => {
    const words =
      kind === "queue"
        ? WORDS.lanes.queue(present.waiting)
        : `${WORDS.lanes.replica(replica)} · ${plural(present.rows[replica] ?? 0, ...WORDS.lanes.rows)}`;
    return html`<h3 key=${kind + replica} class="live-group" data-replica=${replica} style=${{ top: `${top}px` }}>
      ${words}
    </h3>`;
  });
}

/**
 * The names of a request's adapters; the base model's word where it has none.
 * @param {Track} track
 */
export function nameOf(track) {
  const names = track.info?.adapters.map((one) => one.name) ?? [];
  return names.length ? names.join(" + ") : WORDS.base;
}

/**
 * The end of a request's id: what tells it from its neighbours.
 * @param {string} id
 */
export function shortId(id) {
  const known = id.replace(/-0$/, ""); // the first choice, and mostly the only one
  return known.length > SHORT_ID + 2 ? `…${known.slice(-SHORT_ID)}` : known;
}
