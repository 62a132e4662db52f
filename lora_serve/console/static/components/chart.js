import { resolved } from "../lib/colour.js";
import { useIsDark } from "../lib/theme.js";
import { html, useEffect, useRef } from "../vendor/preact.js";
import uPlot from "../vendor/uplot.js";

/**
 * @typedef {{label: string, values: (number|null)[], colour: string, isFilled?: boolean, isBars?: boolean, isDashed?: boolean,
 *          isOpaque?: boolean, said?: (number|null)[]}} Series  `said`: in the legend, where that is not the height.
 */

/**
 * A chart over time (or any numbers) by uPlot. It takes the width that there is, and the theme's colours.
 * @param {{label: string, x: number[], series: Series[], height?: number, format?: (value: number) => string,
 *          isTime?: boolean, formatX?: (value: number) => string, labelX?: string, max?: number|null, rangeX?: number[]}} props
 *   `x`: Unix seconds, if `isTime`; `labelX`: what it is, for the legend; `max`: of the y axis, else as the values are.
 */
export function Chart({ label, x, series, height = 160, format = String, isTime = true, formatX, labelX, max = null, rangeX }) {
  const element = useRef(/** @type {HTMLDivElement|null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const isDark = useIsDark();
  const shape = JSON.stringify([series.map(({ label, colour, isFilled, isBars, isDashed }) => [label, colour, isFilled, isBars, isDashed]), isTime, max, height, rangeX]);
  const data = [x, ...series.map((one) => one.values)];
  useEffect(() => {
    const box = element.current;
    if (!box) return undefined;
    plot.current = new uPlot(optionsOf({ series, height, format, isTime, formatX, labelX, max, rangeX, width: box.clientWidth }), data, box);
    const watch = new ResizeObserver(() => plot.current?.setSize({ width: box.clientWidth, height }));
    watch.observe(box);
    return () => {
      watch.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, isDark]);
  useEffect(() => plot.current?.setData(data), [x, series]);
  return html`<figure class="chart" aria-label=${label}><div ref=${element}></div></figure>`;
}

const WHOLE = [1, 2, 5, 10, 20, 50, 100]; // steps of an axis of numbered things

/** @param {any} options */
function optionsOf({ series, height, format, isTime, formatX, labelX, max, rangeX, width }) {
  const line = resolved("var(--line)");
  const axis = { stroke: resolved("var(--muted)"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
  return {
    width: Math.max(width, 50),
    height,
    padding: [8, 20, 0, 0],
    cursor: { y: false, drag: { x: false, y: false } },
    legend: { live: true },
    scales: { x: { time: isTime, ...(rangeX ? { range: rangeX } : {}) }, y: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => [Math.min(low ?? 0, 0), max ?? ((high || 0) * 1.1 || 1)] } },
    axes: [
      { ...axis, ...(rangeX ? { incrs: WHOLE } : {}), ...(formatX ? { values: (/** @type {any} */ _, /** @type {number[]} */ found) => found.map(formatX) } : {}) },
      { ...axis, size: 64, values: (/** @type {any} */ _, /** @type {number[]} */ found) => found.map(format) },
    ],
    series: [
      { ...(labelX ? { label: labelX } : {}), ...(formatX ? { value: (/** @type {any} */ _, /** @type {number|null} */ at) => (at === null ? "" : formatX(at)) } : {}) },
      ...series.map((/** @type {Series} */ one) => seriesOf(one, format)),
    ],
  };
}

/** @param {Series} one @param {(value: number) => string} format */
function seriesOf(one, format) {
  const colour = resolved(one.colour);
  return {
    label: one.label,
    stroke: colour,
    width: 1.5,
    fill: one.isOpaque ? colour : one.isFilled || one.isBars ? `color-mix(in srgb, ${colour} 22%, transparent)` : undefined,
    dash: one.isDashed ? [4, 4] : undefined,
    paths: one.isBars ? uPlot.paths.bars({ size: [0.7, 48] }) : undefined,
    points: { show: false },
    value: (/** @type {any} */ _, /** @type {number|null} */ value, /** @type {number} */ __, /** @type {number} */ at) => (value === null ? "" : format(one.said?.[at] ?? value)),
  };
}
