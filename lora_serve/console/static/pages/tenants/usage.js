/** Usage by day, as the chart and the table want it. */

/** @typedef {{ day: string, adapter: string, tenant: string, digest: string } & Record<string, any>} Row */
/** @typedef {"adapter" | "tenant"} Group */
/** @typedef {{ name: string, digest: string, values: number[] }} Series  digest: of the newest row, for the colour */
/** @typedef {{ days: number[], series: Series[] }} Chart  days in Unix seconds */

export const FIGURES = /** @type {const} */ ([
  "requests", "prompt_tokens", "cached_tokens", "generated_tokens", "queue_seconds", "load_seconds", "compute_seconds", "residency_byte_seconds",
]);
const DAY = 86_400;
const MAX_SERIES = 7; // the rest is one, so that colours stay apart

/**
 * One series for each group, the largest first; every day between the first and the last has a value.
 * @param {Row[]} rows
 * @param {Group} group
 * @param {string} figure
 * @param {string} rest the name of the series of all others
 * @returns {Chart}
 */
export function chartOf(rows, group, figure, rest) {
  const moments = rows.map(momentOf);
  const [first, last] = moments.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
  const num = rows.length ? Math.round((last - first) / DAY) + 1 : 0;
  const days = Array.from({ length: num }, (_, index) => first + index * DAY);
  /** @type {Map<string, Series>} */
  const found = new Map();
  for (const row of rows) {
    const name = row[group];
    const series = found.get(name) ?? { name, digest: "", values: /** @type {number[]} */ (new Array(num).fill(0)) };
    const at = Math.round((momentOf(row) - first) / DAY);
    series.values[at] = (series.values[at] ?? 0) + row[figure];
    found.set(name, { ...series, digest: row.digest || series.digest });
  }
  const sorted = [...found.values()].sort((one, other) => sum(other.values) - sum(one.values));
  if (sorted.length <= MAX_SERIES) return { days, series: sorted };
  const others = sorted.slice(MAX_SERIES - 1).map((one) => one.values);
  const values = days.map((_, at) => sum(others.map((one) => one[at] ?? 0)));
  return { days, series: [...sorted.slice(0, MAX_SERIES - 1), { name: rest, digest: "", values }] };
}

/**
 * The sums of each group over all days.
 * @param {Row[]} rows
 * @param {Group} group
 * @returns {Row[]}
 */
export function groupTotals(rows, group) {
  /** @type {Map<string, Row[]>} */
  const found = new Map();
  for (const row of rows) found.set(row[group], [...(found.get(row[group]) ?? []), row]);
  return [...found].map(([name, own]) => /** @type {any} */ ({ [group]: name, ...totals(own) }));
}

/**
 * The sums of all figures.
 * @param {Row[]} rows
 * @returns {Record<string, number>}
 */
export function totals(rows) {
  return Object.fromEntries(FIGURES.map((name) => [name, sum(rows.map((row) => row[name]))]));
}

/** @param {Row} row */
function momentOf(row) {
  return Date.parse(`${row.day}T00:00:00Z`) / 1000;
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((all, value) => all + value, 0);
}
