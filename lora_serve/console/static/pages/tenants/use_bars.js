import { Bar } from "../../components/bar.js";
import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { useLoaded } from "./loaded.js";
import { limitText, LIMITS } from "./quota.js";

const T = TEXTS.tenants;
const NEARLY = 0.9; // of a limit: shown as a warning

/**
 * Each limit with what is used of it now.
 * @param {{ tenant: string, quota: Record<string, number> }} props
 */
export function UseBars({ tenant, quota }) {
  const path = `admin/tenants/${encodeURIComponent(tenant)}/use`;
  const { data, error, isBusy, reload } = useLoaded(path);
  if (error) return html`<${ErrorNote} error=${error} onRetry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  return html`<div class="use-bars">
    ${LIMITS.map((limit) => html`<${LimitBar} key=${limit.name} limit=${limit} used=${data.use[limit.name]} allowed=${quota[limit.name] ?? null} />`)}
    <p class="muted">${T.useHint}</p>
    <${Button} isBusy=${isBusy} onClick=${reload}>${T.refresh}<//>
    <${Command} curl=${curlOf({ path })} cli=${cliOf("tenants", "show", tenant)} />
  </div>`;
}

/** @param {{ limit: import("./quota.js").Limit, used: number | null, allowed: number | null }} props */
function LimitBar({ limit, used, allowed }) {
  const label = T.limitNames[limit.name];
  const format = (/** @type {number} */ value) => limitText(limit, value);
  const data = { "data-limit": limit.name };
  if (used === null || allowed === null) {
    const none = limit.name === "device_bytes_guaranteed" ? T.noGuarantee : T.noLimit;
    const words = [used === null ? T.notCounted : format(used), allowed === null ? none : T.of(format(allowed))].join(", ");
    return html`<div class="bar-row" ...${data}><span class="bar-label">${label}</span><span class="muted">${words}</span></div>`;
  }
  const isGuarantee = limit.name === "device_bytes_guaranteed";
  const colour = used >= allowed && !isGuarantee ? "var(--bad)" : used >= NEARLY * allowed && !isGuarantee ? "var(--warn)" : "var(--accent)";
  return html`<${Bar} label=${label} segments=${[{ label, value: used, colour }]} whole=${allowed} format=${format} data=${data} />`;
}
