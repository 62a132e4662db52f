import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { Empty, Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { SelectField } from "../../components/field.js";
import { Table, sorted } from "../../components/table.js";
import { toast } from "../../components/toast.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { number, span } from "../../lib/format.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { useLoaded } from "./loaded.js";
import { FIGURES, groupTotals } from "./usage.js";
import { UsageChart } from "./usage_chart.js";

const T = TEXTS.tenants;
const PERIODS = ["1", "7", "30", "90", "365"];

/** The metered usage by day: of one tenant, or of all with "". @param {{ tenant: string }} props */
export function UsagePanel({ tenant }) {
  const api = useApi();
  const [asked, setAsked] = useState(/** @type {{ days: string, group: import("./usage.js").Group, figure: string }} */ ({ days: "30", group: "adapter", figure: "requests" }));
  const [sort, setSort] = useState({ key: "requests", isDescending: true });
  const set = (/** @type {any} */ news) => setAsked((old) => ({ ...old, ...news }));
  const from = firstDay(Number(asked.days));
  const query = { tenant, from, by: asked.group === "adapter" ? "day,adapter,digest" : "day,tenant" };
  const { data, error, reload } = useLoaded("admin/usage", query);
  const rows = data && data.by.includes(asked.group) ? data.data : null;
  const download = async () => {
    try {
      const { data: text } = await api.call("GET", "admin/usage", { query: { ...query, format: "csv" } });
      save(text, `usage-${tenant || "all"}-${from}.csv`);
    } catch (failed) {
      toast(/** @type {Error} */ (failed).message, "bad");
    }
  };
  const flags = [...(tenant ? ["--tenant", tenant] : []), "--from", from, "--by", query.by, "--csv"];
  return html`<div class="toolbar">
      <${SelectField} label=${T.period} value=${asked.days} choices=${PERIODS.map((value) => ({ value, label: T.periods[value] }))} onChange=${(/** @type {string} */ days) => set({ days })} />
      ${!tenant &&
      html`<${SelectField} label=${T.groupBy} value=${asked.group} choices=${[{ value: "adapter", label: T.byAdapter }, { value: "tenant", label: T.byTenant }]} onChange=${(/** @type {string} */ group) => set({ group })} />`}
      <${SelectField} label=${T.figure} value=${asked.figure} choices=${FIGURES.map((value) => ({ value, label: T.figures[value] }))} onChange=${(/** @type {string} */ figure) => set({ figure })} />
      <${Button} onClick=${download}>${T.csv}<//>
    </div>
    ${error && html`<${ErrorNote} error=${error} onRetry=${reload} />`} ${!rows && !error && html`<${Loading} />`}
    ${data && !data.is_complete && html`<p class="warn" role="status">${T.notComplete}</p>`}
    ${rows && !rows.length && html`<${Empty} title=${T.noUsage} />`}
    ${rows?.length > 0 &&
    html`<${UsageChart} rows=${rows} group=${asked.group} figure=${asked.figure} />
      <${Table} caption=${T.usage} columns=${columns(asked.group)} rows=${sorted(groupTotals(rows, asked.group), sort)} sort=${sort} onSort=${setSort}
        keyOf=${(/** @type {any} */ row) => row[asked.group]} dataOf=${(/** @type {any} */ row) => ({ [`data-${asked.group}`]: row[asked.group] })} />`}
    <${Command} curl=${curlOf({ path: "admin/usage", query: { ...query, format: "csv" } })} cli=${cliOf("usage", ...flags)} />`;
}

/** @param {string} group */
function columns(group) {
  const figures = FIGURES.map((name) => ({
    key: name, label: T.figures[name], isNumber: true, isSortable: true,
    render: (/** @type {any} */ row) => (name.endsWith("_seconds") && !name.startsWith("residency") ? span(row[name]) : number(row[name])),
  }));
  return [{ key: group, label: group === "adapter" ? T.adapter : T.name, isSortable: true }, ...figures];
}

/**
 * The first day of a period that ends today, as the API takes it.
 * @param {number} days
 */
function firstDay(days) {
  return new Date(Date.now() - (days - 1) * 86_400_000).toISOString().slice(0, 10);
}

/**
 * Hands a text to the browser as a file. The key went in a header, so that no link holds it.
 * @param {string} text
 * @param {string} name
 */
function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const anchor = Object.assign(document.createElement("a"), { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
