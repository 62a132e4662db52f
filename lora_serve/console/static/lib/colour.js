/**
 * The colour of an adapter: chosen by its digest, and moved on where another one has it already. The same on every
 * page until the tab is loaded anew. Its tone is the theme's.
 */

/** Degrees that look apart: fewer among the greens, which look alike. Neighbours also differ in tone. */
const HUES = [355, 22, 42, 68, 120, 160, 185, 208, 232, 262, 292, 326];
/** Lightness on a light ground and on a dark one. */
const TONES = [[42, 62], [54, 50], [34, 72]];
const [LIGHT_SATURATION, DARK_SATURATION] = [62, 60];
const BASE = "var(--base-model)";

/** Colours that were given: an index into hues by tones for each digest. @type {Map<string, number>} */
const given = new Map();

/** A number from 0 to 2^32 that a text's every character has a part in (FNV-1a). @param {string} text */
function hashOf(text) {
  let hash = 0x811c9dc5;
  for (let at = 0; at < text.length; at += 1) hash = Math.imul(hash ^ text.charCodeAt(at), 0x01000193);
  return hash >>> 0;
}

/**
 * A CSS colour for a digest, and for "base" (or nothing) the base model's grey. Lightness comes from the theme.
 * @param {string|null|undefined} digest
 */
export function colourOf(digest) {
  if (!digest || digest === "base") return BASE;
  const place = given.get(digest) ?? newPlace(digest);
  const at = place % HUES.length;
  const [light, dark] = TONES[(at + Math.floor(place / HUES.length)) % TONES.length] ?? [];
  return `light-dark(hsl(${HUES[at]} ${LIGHT_SATURATION}% ${light}%), hsl(${HUES[at]} ${DARK_SATURATION}% ${dark}%))`;
}

/**
 * The hue that the digest's hash prefers, else the nearest that is free, each first in one tone, then in the next.
 * Once all are given they are shared: nothing more is remembered.
 * @param {string} digest
 */
function newPlace(digest) {
  const wanted = hashOf(digest) % HUES.length;
  const round = Math.floor(given.size / HUES.length);
  if (round >= TONES.length) return wanted;
  const taken = new Set(given.values());
  const steps = HUES.map((_, step) => (step % 2 ? -(step + 1) / 2 : step / 2));
  const free = steps.map((step) => ((wanted + step + HUES.length) % HUES.length) + round * HUES.length);
  const place = free.find((one) => !taken.has(one)) ?? wanted;
  given.set(digest, place);
  return place;
}

/** A colour as a canvas takes it, which knows neither variables nor themes. @param {string} colour */
export function resolved(colour) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = colour;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
