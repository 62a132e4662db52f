/**
 * The audit log's chain, checked here: digest(n) = SHA-256(digest(n - 1) + line(n)), for each replica.
 *
 * A line can be checked when the one before it is there too. A tenant's admin sees some lines only, and of a fleet the
 * last 100 000 of each server: the others are counted, not guessed at.
 */

/** @typedef {Record<string, any> & { id: string, replica: string, number: number, time: number, line_digest: string }} Entry */
/** @typedef {{ numLines: number, numChecked: number, broken: { replica: string, number: number }[] }} Verdict */
/** @typedef {(text: string) => Promise<string>} Digest */

const FIRST = "0".repeat(64); // stands before the first line
const ADDED = ["id", "replica", "number", "time", "line_digest"]; // by the answer, to the line as it was written

/** Whether this browser gives pages SHA-256: over https, and of this machine. */
export function canDigest() {
  return globalThis.crypto?.subtle !== undefined;
}

/**
 * SHA-256 in hex.
 * @type {Digest}
 */
export async function sha256(text) {
  const raw = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return [...new Uint8Array(raw)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Checks each line that has its predecessor among the entries.
 * @param {Entry[]} entries
 * @param {Digest} digest
 * @returns {Promise<Verdict>}
 */
export async function checked(entries, digest = sha256) {
  const known = new Map(entries.map((entry) => [placeOf(entry.replica, entry.number), entry]));
  const broken = [];
  let numChecked = 0;
  for (const entry of known.values()) {
    const before = entry.number === 1 ? FIRST : known.get(placeOf(entry.replica, entry.number - 1))?.line_digest;
    if (before === undefined) continue;
    numChecked += 1;
    const { replica, number } = entry;
    if ((await digest(before + lineOf(entry))) !== entry.line_digest) broken.push({ replica, number });
  }
  return { numLines: known.size, numChecked, broken };
}

/**
 * The line as the server wrote it: JSON as Python has it, with sorted names.
 * @param {Entry} entry
 */
export function lineOf(entry) {
  const kept = Object.entries(entry).filter(([name]) => !ADDED.includes(name));
  const all = /** @type {[string, any][]} */ ([...kept, ["time_ms", Math.round(1000 * entry.time)]]);
  const parts = all.sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, value]) => `${ascii(name)}: ${ascii(value)}`);
  return `{${parts.join(", ")}}`;
}

/**
 * @param {string} replica
 * @param {number} number
 */
function placeOf(replica, number) {
  return `${number}/${replica}`;
}

/** @param {any} value */
function ascii(value) {
  return JSON.stringify(value).replace(/[\x7f-\uffff]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
