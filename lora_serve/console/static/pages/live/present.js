/** @file Who runs and who waits at a moment: what figures, tenants and headings all say. Knows no page. */

import { QUEUED } from "./types.js";

/** @typedef {import("./history.js").History} History @typedef {import("./types.js").RequestInfo} RequestInfo */

/**
 * @typedef {{running: number, waiting: number}} Counts  Those that wait include the preempted.
 * @typedef {Counts & {tenants: Record<string, Counts>, rows: Record<string, number>, adapters: number}} Present
 * `rows`: running, by replica; `adapters`: different ones that run.
 */

/**
 * The requests at a time between two frames, or with null those of the last frame.
 * @param {History} history @param {number | null} time @returns {Present}
 */
export function presentAt(history, time) {
  const found = /** @type {Present} */ ({ running: 0, waiting: 0, tenants: {}, rows: {}, adapters: 0 });
  const digests = new Set();
  for (const { info, isRunning } of requestsAt(history, time)) {
    count(found, info.tenant, isRunning ? "running" : "waiting", 1);
    if (!isRunning) continue;
    found.rows[info.replica] = (found.rows[info.replica] ?? 0) + 1;
    for (const { digest } of info.adapters) digests.add(digest);
  }
  for (const [tenant, number] of Object.entries(unnamed(history, time))) count(found, tenant, "waiting", number);
  return { ...found, adapters: digests.size };
}

/** @param {Present} present @param {string} tenant @param {"running" | "waiting"} what @param {number} number */
function count(present, tenant, what, number) {
  const own = (present.tenants[tenant] ??= { running: 0, waiting: 0 });
  own[what] += number;
  present[what] += number;
}

/** @param {History} history @param {number | null} time @returns {{info: RequestInfo, isRunning: boolean}[]} */
function requestsAt(history, time) {
  if (time === null) {
    const live = history.latest?.requests.filter((one) => one.state !== "finished") ?? [];
    return live.map((info) => ({ info, isRunning: info.state === "running" }));
  }
  return [...history.tracks.values()].flatMap((track) => {
    const state = track.stateAt(time);
    return track.info && state && state !== "finished" ? [{ info: track.info, isRunning: state === "running" }] : [];
  });
}

/**
 * By tenant, those that wait and that the frame counts without naming them: it names the first of the queue only.
 * @param {History} history @param {number | null} time @returns {Record<string, number>}
 */
function unnamed(history, time) {
  const frame = time === null ? history.latest : history.frameAt(time);
  const left = Object.fromEntries(Object.entries(frame?.queue ?? {}).map(([tenant, { waiting }]) => [tenant, waiting]));
  for (const { tenant, state } of frame?.requests ?? []) {
    if (QUEUED.has(state) || state === "preempted") left[tenant] = (left[tenant] ?? 0) - 1;
  }
  return Object.fromEntries(Object.entries(left).filter(([, number]) => number > 0));
}
