/** Colours by probability: 0 is certain, 5 is hardly ever. */

export const BOUNDS = [0.9, 0.6, 0.3, 0.1, 0.01];

/**
 * The level of a log-probability.
 * @param {number | null} logprob
 */
export function levelOf(logprob) {
  if (logprob === null) return 0;
  const at = BOUNDS.findIndex((bound) => Math.exp(logprob) >= bound);
  return at < 0 ? BOUNDS.length : at;
}
