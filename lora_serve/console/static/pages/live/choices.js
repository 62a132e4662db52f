/** @file Where a choice goes: from a click to the step under it, to the next step, to the next lane. Knows no page. */

import { trackIn } from "./layout.js";
import { middleOf, neighbour } from "./moment.js";
import { choosing } from "./view.js";

/** @typedef {import("./history.js").History} History @typedef {import("./moment.js").Chosen} Chosen */
/** @typedef {import("./layout.js").Stack} Stack @typedef {import("./layout.js").LaneBox} LaneBox */
/** @typedef {import("./track.js").Track} Track @typedef {import("./view.js").View} View */

const NEAR_SECONDS = 0.25; // a click so far from a step means that step

/**
 * A place in the lanes, moved to the middle of the step there; in the queue, and far from any step, as it is.
 * @param {History} history @param {Chosen} chosen @returns {Chosen}
 */
export function snapped(history, chosen) {
  const steps = history.steps.get(chosen.replica);
  const mark = steps?.marks[steps.nearest(chosen.time)];
  const isNear = mark && Math.abs(middleOf(mark) - chosen.time) <= NEAR_SECONDS + mark.ms / 2000;
  return isNear ? { ...chosen, time: middleOf(mark) } : chosen;
}

/**
 * The place of a request: its cell nearest to a time, else that time.
 * @param {Track} track @param {number} time @returns {Chosen}
 */
export function placeOf(track, time) {
  const { cells } = track;
  if (!cells.length) return { time, replica: track.replica, id: track.id };
  const at = Math.min(cells.firstFrom(time), cells.length - 1);
  const middle = /** @type {number} */ (cells.ends[at]) - /** @type {number} */ (cells.ms[at]) / 2000;
  return { time: middle, replica: track.replica, id: track.id };
}

/**
 * The view with the step after (1) or before (-1) the chosen one chosen; the newest in sight if none is.
 * @param {View} view @param {History} history @param {1 | -1} direction @param {number} shown
 * @returns {View}
 */
export function stepped(view, history, direction, shown) {
  const { chosen } = view;
  if (!chosen) return choosing(view, history, snapped(history, firstChoice(view, history, shown)), shown);
  return choosing(view, history, { ...chosen, time: neighbour(history, chosen.replica, chosen.time, direction) }, shown);
}

/** @param {View} view @param {History} history @param {number} shown @returns {Chosen} */
function firstChoice(view, history, shown) {
  return { time: view.end ?? shown, replica: history.replicas[0] ?? "", id: null };
}

/**
 * The view with the request in the next lane (1: below, -1: above) that holds one at the chosen moment.
 * @param {View} view @param {History} history @param {Stack} stack @param {1 | -1} direction @param {number} shown
 * @returns {View}
 */
export function otherLane(view, history, stack, direction, shown) {
  const chosen = view.chosen ?? snapped(history, firstChoice(view, history, shown));
  const held = stack.boxes.map((box) => trackIn(history, box, chosen.time)).filter((track) => track !== null);
  const at = held.findIndex((track) => track.id === chosen.id);
  const next = at < 0 ? held.at(direction > 0 ? 0 : -1) : held[at + direction];
  const found = next ? { time: chosen.time, replica: next.replica, id: next.id } : chosen;
  return choosing(view, history, found, shown);
}
