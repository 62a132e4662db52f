/** The limits of a tenant or a key: their names, what people type, and the flags of `lora-serve`. */

import { bytes, number } from "../../lib/format.js";

/** @typedef {{ name: string, isBytes: boolean, isKeys: boolean }} Limit  `isKeys`: a key may have one too */

/** @type {Limit[]} */
export const LIMITS = [
  { name: "requests_per_minute", isBytes: false, isKeys: true },
  { name: "tokens_per_minute", isBytes: false, isKeys: true },
  { name: "max_running", isBytes: false, isKeys: true },
  { name: "max_queued", isBytes: false, isKeys: true },
  { name: "registrations_per_minute", isBytes: false, isKeys: true },
  { name: "max_adapters", isBytes: false, isKeys: false },
  { name: "max_stored_bytes", isBytes: true, isKeys: false },
  { name: "device_bytes_guaranteed", isBytes: true, isKeys: false },
  { name: "device_bytes_max", isBytes: true, isKeys: false },
];

/** @typedef {Record<string, string>} Typed  by the limit's name, as it was typed; "" is no limit */

/**
 * The limits as texts to be edited.
 * @param {Record<string, number>} quota
 * @returns {Typed}
 */
export function typedOf(quota) {
  return Object.fromEntries(LIMITS.map(({ name }) => [name, name in quota ? String(quota[name]) : ""]));
}

/**
 * What a change sends: limits that were typed otherwise than they are; null ends one. A number, or bytes as 512MiB.
 * @param {Typed} typed
 * @param {Record<string, number>} quota
 * @returns {Record<string, number | string | null>}
 */
export function changeOf(typed, quota) {
  const known = typedOf(quota);
  /** @type {Record<string, number | string | null>} */
  const change = {};
  for (const { name } of LIMITS) {
    const text = (typed[name] ?? "").trim();
    if (text !== known[name]) change[name] = text === "" ? null : /^\d+$/.test(text) ? Number(text) : text;
  }
  return change;
}

/**
 * The same change as flags.
 * @param {Record<string, number | string | null>} change
 */
export function flagsOf(change) {
  return Object.entries(change).flatMap(([name, value]) => [`--${name.replaceAll("_", "-")}`, value === null ? "none" : String(value)]);
}

/**
 * A limit's value as people read it.
 * @param {Limit} limit
 * @param {number} value
 */
export function limitText(limit, value) {
  return limit.isBytes ? bytes(value) : number(value);
}
