/**
 * The limits that PUT /admin/engine takes: how each is written into its field, and read from it.
 *
 * @typedef {"whole"|"ms"|"bytes"} Kind
 * @typedef {{name: string, kind: Kind, canBeOff: boolean, mayBeNone?: boolean}} Limit
 */

import { TEXTS } from "../../texts.js";

/** @type {Limit[]} */
export const BATCHING = [
  { name: "max_num_seqs", kind: "whole", canBeOff: false },
  { name: "max_num_batched_tokens", kind: "whole", canBeOff: false },
  { name: "latency_target_ms", kind: "ms", canBeOff: true },
  { name: "inter_token_target_ms", kind: "ms", canBeOff: true },
  { name: "batch_wait_ms", kind: "ms", canBeOff: false },
  { name: "preferred_batch_size", kind: "whole", canBeOff: true },
];
/** @type {Limit[]} */
export const ADAPTERS = [
  { name: "max_loras", kind: "whole", canBeOff: false },
  { name: "adapter_memory", kind: "bytes", canBeOff: false, mayBeNone: true },
  { name: "adapter_host_memory", kind: "bytes", canBeOff: false },
  { name: "max_cpu_loras", kind: "whole", canBeOff: false, mayBeNone: true },
];
const UNITS = /** @type {[string, number][]} */ ([
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
]);

/** The values that are set now, by name. @param {any} engine  GET /admin/engine. @param {any} health  GET /admin/engine/health. */
export function valuesOf(engine, health) {
  return { ...(engine.batcher ?? {}), ...health.adapter_limits };
}

/** A value as its field shows it; "" for none. @param {Limit} limit @param {number|null|undefined} value */
export function shown(limit, value) {
  if (value === null || value === undefined) return "";
  if (limit.kind !== "bytes") return String(value);
  const unit = UNITS.find(([, size]) => value >= size && value % size === 0);
  return unit ? `${value / unit[1]}${unit[0]}` : String(value);
}

/** The fault of a field's text, in words; "" if there is none. @param {Limit} limit @param {string} text */
export function faultOf(limit, text) {
  const words = TEXTS.engine.limits;
  const given = text.trim();
  if (given === "") return limit.canBeOff ? "" : limit.kind === "bytes" ? words.notBytes : words.notANumber;
  if (limit.kind === "bytes") return /^\d+(\.\d+)?\s*([KMGT]i?B?)?$/i.test(given) ? "" : words.notBytes;
  const number = Number(given);
  const isWhole = limit.kind !== "whole" || Number.isInteger(number);
  return Number.isFinite(number) && number >= 0 && isWhole ? "" : words.notANumber;
}

/** A field's text as the API takes it; null turns a limit off. @param {Limit} limit @param {string} text */
export function valueIn(limit, text) {
  const given = text.trim();
  if (given === "") return null;
  return limit.kind === "bytes" && !/^\d+$/.test(given) ? given : Number(given);
}
