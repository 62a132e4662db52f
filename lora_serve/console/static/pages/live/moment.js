/** @file One moment of the history: a step, its rows, and the request that was chosen. Knows no page. */

import { KINDS } from "./types.js";

/** @typedef {import("./history.js").History} History @typedef {import("./track.js").Track} Track */
/** @typedef {import("./types.js").Kind} Kind @typedef {import("./steps.js").StepMark} StepMark */

/**
 * @typedef {{time: number, replica: string, id: string | null}} Chosen a place in the lanes
 * @typedef {{track: Track, kind: Kind, tokens: number}} StepRow
 * @typedef {{step: StepMark | null, rows: StepRow[], track: Track | null}} Moment
 */

/**
 * What happened at a place: the step nearest to it with all of its rows, the largest first.
 * @param {History} history @param {Chosen} chosen @returns {Moment}
 */
export function momentAt(history, chosen) {
  const steps = history.steps.get(chosen.replica);
  const step = steps?.marks[steps.nearest(chosen.time)] ?? null;
  const track = (chosen.id !== null && history.tracks.get(chosen.id)) || null;
  return { step, rows: step ? rowsOf(history, chosen.replica, step) : [], track };
}

/**
 * The rows of a step, the largest first.
 * @param {History} history @param {string} replica @param {StepMark} step @returns {StepRow[]}
 */
function rowsOf(history, replica, step) {
  const rows = /** @type {StepRow[]} */ ([]);
  for (const track of history.tracks.values()) {
    const { cells } = track;
    const at = cells.firstFrom(step.end);
    if (track.replica !== replica || cells.steps[at] !== step.number || at >= cells.length) continue;
    rows.push({ track, kind: KINDS[cells.kinds[at] ?? 1] ?? "decode", tokens: cells.tokens[at] ?? 0 });
  }
  return rows.sort((one, other) => other.tokens - one.tokens || one.track.lane - other.track.lane);
}

/**
 * The time of the step after (1) or before (-1) the one at `time`, of the replica; `time` where there is none.
 * @param {History} history @param {string} replica @param {number} time @param {1 | -1} direction
 */
export function neighbour(history, replica, time, direction) {
  const steps = history.steps.get(replica);
  const mark = steps?.marks[steps.nearest(time) + direction];
  return mark ? middleOf(mark) : time;
}

/**
 * The middle of a step, in seconds: where it is chosen.
 * @param {StepMark} mark
 */
export function middleOf(mark) {
  return mark.end - mark.ms / 2000;
}

/**
 * The times of one request, in ms; null where it has not come so far, or where nobody watched its beginning.
 * @param {Track} track
 */
export function timingsOf(track) {
  const { info, cells } = track;
  const started = track.isWhole && Number.isFinite(cells.firstStart) ? cells.firstStart : null;
  const waited = info && started !== null ? Math.max(0, started - info.arrived) * 1000 : null;
  const ran = started !== null ? (cells.lastEnd - started) * 1000 : null;
  const first = info?.first_token_ms ?? null;
  const outputs = info?.num_output ?? 0;
  const decoding = info && first !== null ? (cells.lastEnd - info.arrived) * 1000 - first : null;
  const between = decoding !== null && outputs > 1 && decoding > 0 ? decoding / (outputs - 1) : null;
  return { waited, first, ran, between };
}
