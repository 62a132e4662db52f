/** What a step would cost, by the coefficients that the engine has learned: see engine/step_cost.py. */

/** @typedef {Record<string, number>} Cost  Microseconds for one more of each. */

export const CONTEXT = 256; // tokens of a row that others are compared with

/** Seconds of a step. @param {Cost} cost @param {{tokens: number, rows: number, adapters: number, kv?: number, pairs?: number}} load */
function seconds(cost, { tokens, rows, adapters, kv = 0, pairs = 0 }) {
  const of = (/** @type {string} */ name) => cost[name] ?? 0;
  const constant = of("step") + (tokens > rows ? of("prompt_step") : 0);
  const sum = constant + tokens * of("token") + rows * of("row") + adapters * of("adapter") + kv * of("kv_token") + pairs * of("attended_pair");
  return sum / 1e6;
}

/** A step in which each of `rows` gets its next token. @param {Cost} cost @param {number} rows @param {number} maxLoras */
export function decodeSeconds(cost, rows, maxLoras) {
  return seconds(cost, { tokens: rows, rows, adapters: Math.min(rows, maxLoras), kv: rows * CONTEXT });
}

/** A step of one prompt's tokens. @param {Cost} cost @param {number} tokens */
export function promptSeconds(cost, tokens) {
  return seconds(cost, { tokens, rows: 1, adapters: 1, pairs: (tokens * tokens) / 2 });
}
