/** Where an answer's time went: the server's word for what was before the first token, this page's clock for the rest. */

/** @typedef {{ name: "queue" | "load" | "prefill" | "decode", ms: number | null, isMeasured: boolean }} Part  null: not known */
/**
 * @typedef {{ sent: number, first: number | null, last: number | null, numTokens: number, numFirst: number }} Times
 * moments of performance.now() at which the page read tokens, first and last; `numFirst`: tokens that came with the first
 */

const PARTS = /** @type {const} */ (["queue", "load", "prefill", "decode"]);

/**
 * Milliseconds by name of a Server-Timing header (https://www.w3.org/TR/server-timing/).
 * @param {string | null} header
 * @returns {Record<string, number>}
 */
export function parseServerTiming(header) {
  /** @type {Record<string, number>} */
  const found = {};
  for (const metric of (header ?? "").split(",")) {
    const [name, ...parameters] = metric.split(";").map((text) => text.trim());
    const duration = parameters.find((text) => text.startsWith("dur="));
    const ms = duration === undefined ? NaN : Number(duration.slice(4));
    if (name && Number.isFinite(ms)) found[name] = ms;
  }
  return found;
}

/**
 * The parts of the bar. The headers of a stream leave before its tokens, so its decoding is measured here.
 * @param {Record<string, number>} told
 * @param {Times} times
 * @returns {Part[]}
 */
export function partsOf(told, times) {
  const decoded = isSpread(times) ? (times.last ?? 0) - (times.first ?? 0) : null;
  return PARTS.map((name) => {
    const isMeasured = !(name in told);
    return { name, ms: told[name] ?? (name === "decode" ? decoded : 0), isMeasured };
  });
}

/**
 * Milliseconds until the first token, as this page saw it; null: there is none yet.
 * @param {Times} times
 */
export function firstTokenMs(times) {
  return times.first === null ? null : times.first - times.sent;
}

/**
 * Tokens per second after those that came first; null where that says nothing: all may come in one read.
 * @param {Times} times
 */
export function tokensPerSecond(times) {
  const { first, last, numTokens, numFirst } = times;
  return isSpread(times) ? (1000 * (numTokens - numFirst)) / ((last ?? 0) - (first ?? 0)) : null;
}

/**
 * True if tokens came after the first read: only then their time is known here.
 * @param {Times} times
 */
function isSpread({ first, last, numTokens, numFirst }) {
  return first !== null && last !== null && last > first && numTokens > numFirst;
}
