/** @file What part of the history is looked at. Knows no page. */

import { KEPT_SECONDS } from "./history.js";

/** @typedef {import("./history.js").History} History @typedef {import("./moment.js").Chosen} Chosen */

/**
 * @typedef {{end: number | null, span: number, chosen: Chosen | null}} View
 * `end`: the time at the right edge, null while it follows the server; `span`: seconds across the lanes.
 */

const EDGE = 0.1; // of the span: how near a chosen moment may come to the view's edge

/** The view of a page that was just opened. */
export const FIRST_VIEW = /** @type {View} */ ({ end: null, span: 5, chosen: null });

/**
 * The view, paused at what it shows now.
 * @param {View} view @param {number} shown the time at its right edge @returns {View}
 */
export function paused(view, shown) {
  return view.end === null ? { ...view, end: shown } : view;
}

/**
 * The view, following the server again.
 * @param {View} view @returns {View}
 */
export function following(view) {
  return { ...view, end: null, chosen: null };
}

/**
 * The view, moved to end at a time that the history holds.
 * @param {View} view @param {History} history @param {number} end @returns {View}
 */
export function movedTo(view, history, end) {
  const first = history.frames[0]?.time ?? end;
  return { ...view, end: Math.min(history.now, Math.max(end, first, history.now - KEPT_SECONDS * 5)) };
}

/**
 * The view with a moment chosen, moved so that it is in sight.
 * @param {View} view @param {History} history @param {Chosen} chosen @param {number} shown @returns {View}
 */
export function choosing(view, history, chosen, shown) {
  const still = { ...paused(view, shown), chosen };
  const end = still.end ?? shown;
  const margin = view.span * EDGE;
  if (chosen.time > end - margin / 2) return movedTo(still, history, chosen.time + margin);
  if (chosen.time < end - view.span + margin / 2) return movedTo(still, history, chosen.time + view.span - margin);
  return still;
}

/**
 * The view with another span; a chosen moment keeps its place as far as it can, else the right edge does.
 * @param {View} view @param {History} history @param {number} span @returns {View}
 */
export function spanning(view, history, span) {
  if (view.end === null || !view.chosen) return { ...view, span };
  const part = (view.end - view.chosen.time) / view.span;
  return movedTo({ ...view, span }, history, view.chosen.time + part * span);
}
