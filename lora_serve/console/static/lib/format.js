/** Numbers, times and digests as people read them. A value that is missing is "–". */

export const NOTHING = "–";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const DAY = new Intl.DateTimeFormat("en", { dateStyle: "medium" });
const MOMENT = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "medium" });
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
/** @type {[number, string][]} */
const SPANS = [
  [86_400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];

/** @typedef {number|null|undefined} Maybe */

/** 1536 -> "1.5 KiB". @param {Maybe} count */
export function bytes(count) {
  if (count === null || count === undefined) return NOTHING;
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? WHOLE.format(value) : SHORT.format(value)} ${UNITS[unit]}`;
}

/** Milliseconds: 3.14159 -> "3.14 ms", 2500 -> "2.5 s". @param {Maybe} milliseconds */
export function ms(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return NOTHING;
  return Math.abs(milliseconds) < 1000 ? `${SHORT.format(milliseconds)} ms` : `${SHORT.format(milliseconds / 1000)} s`;
}

/** Seconds as a span: 90 -> "1 min 30 s". @param {Maybe} seconds */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 1) return ms(1000 * seconds);
  const at = SPANS.findIndex(([size]) => seconds >= size);
  const [size, name] = SPANS[at] ?? [1, "s"];
  const next = SPANS[at + 1];
  const whole = Math.floor(seconds / size);
  const rest = next ? Math.floor((seconds % size) / next[0]) : 0;
  return rest && next ? `${whole} ${name} ${rest} ${next[1]}` : `${whole} ${name}`;
}

/** Unix seconds -> "3 min 2 s ago". @param {Maybe} time @param {number} [now]  Unix seconds. */
export function ago(time, now = Date.now() / 1000) {
  if (time === null || time === undefined) return NOTHING;
  const passed = now - time;
  if (passed < 1) return "now";
  return passed > 30 * 86_400 ? DAY.format(1000 * time) : `${span(passed).split(" ").slice(0, 2).join(" ")} ago`;
}

/** Unix seconds -> "Nov 23, 2026, 4:44:58 AM". @param {Maybe} time */
export function moment(time) {
  return time === null || time === undefined ? NOTHING : MOMENT.format(1000 * time);
}

/** Unix seconds -> "04:44:58". @param {Maybe} time */
export function clock(time) {
  return time === null || time === undefined ? NOTHING : CLOCK.format(1000 * time);
}

/** 12345.6 -> "12,346"; below 100 three digits that count. @param {Maybe} count */
export function number(count) {
  if (count === null || count === undefined) return NOTHING;
  return Number.isInteger(count) || Math.abs(count) >= 100 ? WHOLE.format(count) : SHORT.format(count);
}

/** 0.123 -> "12.3%". @param {Maybe} part */
export function percent(part) {
  return part === null || part === undefined ? NOTHING : `${SHORT.format(100 * part)}%`;
}

/** "sha256:0123456789..." -> "01234567". @param {string|null|undefined} digest */
export function shortDigest(digest) {
  return digest ? digest.replace(/^sha256:/, "").slice(0, 8) : NOTHING;
}

/** One word for one, another for more: plural(2, "adapter", "adapters") -> "2 adapters". @param {number} count @param {string} one @param {string} more */
export function plural(count, one, more) {
  return `${number(count)} ${count === 1 ? one : more}`;
}
