import { Chart } from "../../components/chart.js";
import { colourOf } from "../../lib/colour.js";
import { number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useMemo } from "../../vendor/preact.js";
import { chartOf } from "./usage.js";

const T = TEXTS.tenants;
const DATE = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", timeZone: "UTC" });

/**
 * A figure by day: bars of which each adapter, or tenant, is a part.
 * @param {{ rows: import("./usage.js").Row[], group: import("./usage.js").Group, figure: string }} props
 */
export function UsageChart({ rows, group, figure }) {
  const { days, series } = useMemo(() => chartOf(rows, group, figure, T.others), [rows, group, figure]);
  const bars = useMemo(() => stacked(series, group), [series]);
  const at = useMemo(() => days.map((_, index) => index), [days]);
  const day = (/** @type {number} */ index) => (index in days ? DATE.format(1000 * (days[index] ?? 0)) : "");
  return html`<${Chart} label=${T.chart(T.figures[figure] ?? figure)} x=${at} series=${bars} height=${220} format=${number} isTime=${false} formatX=${day} labelX=${T.day} rangeX=${[-0.6, days.length - 0.4]} />`;
}

/**
 * Each part as high as all that are below it and itself; the highest is drawn first, and the others over it.
 * @param {import("./usage.js").Series[]} series
 * @param {string} group
 */
function stacked(series, group) {
  /** @type {number[]} */
  let below = [];
  const bars = series.map(({ name, digest, values }) => {
    below = values.map((value, at) => value + (below[at] ?? 0));
    const colour = name === T.others ? "var(--line)" : colourOf(group === "adapter" ? digest : name);
    return { label: name, values: below, said: values, colour, isBars: true, isOpaque: true };
  });
  return bars.reverse();
}
