/**
 * The colour of an adapter: a function of its digest alone, so the same on every page, in every tab and after a reload.
 * Two of many may look alike: names stand beside colours everywhere. Its tone is the theme's.
 */

/** Degrees that look apart: fewer among the greens, which look alike. */
const HUES = [355, 22, 42, 68, 120, 160, 185, 208, 232, 262, 292, 326];
const SHIFTS = [-7, 0, 7];
/** Lightness on a light ground and on a dark one. */
const TONES = [[42, 62], [54, 50], [34, 72]];
const [LIGHT_SATURATION, DARK_SATURATION] = [62, 60];
const BASE = "var(--base-model)";

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
  const hash = hashOf(digest);
  const hue = (HUES[hash % HUES.length] ?? 0) + (SHIFTS[(hash >>> 8) % SHIFTS.length] ?? 0);
  const [light, dark] = TONES[(hash >>> 16) % TONES.length] ?? [];
  return `light-dark(hsl(${hue} ${LIGHT_SATURATION}% ${light}%), hsl(${hue} ${DARK_SATURATION}% ${dark}%))`;
}

/** A colour as a canvas takes it, which knows neither variables nor themes. @param {string} colour */
export function resolved(colour) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = colour;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
