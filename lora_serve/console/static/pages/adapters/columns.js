/** The columns of the list. */

import { colourOf } from "../../lib/colour.js";
import { bytes, moment, number, shortDigest } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { lastUsed as usedAt } from "./facts.js";
import { Tier } from "./tiers.js";

/** The server's name of a column's order. @type {Record<string, string>} */
export const ORDERS = { id: "name", rank: "rank", bytes: "bytes", requests: "requests", last_used: "last_used" };

/** @param {string} tenant  The viewer's; "" for who sees all. @returns {import("../../components/table.js").Column[]} */
export function columnsFor(tenant) {
  const names = TEXTS.adapters.columns;
  return [
    { key: "id", label: names.id, isSortable: true, render: (row) => html`<${Name} row=${row} tenant=${tenant} />` },
    { key: "tier", label: names.tier, render: (row) => html`<${Tier} state=${row.state} tiers=${row.tiers} />` },
    { key: "version", label: names.version, render: versionCell },
    { key: "digest", label: names.digest, className: "mono", render: (row) => html`<span title=${row.digest}>${shortDigest(row.digest)}</span>` },
    { key: "rank", label: names.rank, isSortable: true, isNumber: true, render: (row) => number(row.rank) },
    { key: "kinds", label: names.kinds, render: (row) => row.kinds.join(", ") || TEXTS.adapters.plainLora },
    { key: "bytes", label: names.bytes, isSortable: true, isNumber: true, render: (row) => bytes(row.bytes) },
    { key: "requests", label: names.requests, isSortable: true, isNumber: true, render: (row) => number(row.activity.requests_per_minute) },
    { key: "last_used", label: names.last_used, isSortable: true, isNumber: true, render: lastUsed },
  ];
}

/** @param {{row: any, tenant: string}} props */
function Name({ row, tenant }) {
  const words = TEXTS.adapters;
  return html`<span class="adapter-name">
    <span class="dot" style=${{ background: colourOf(row.digest) }} data-digest=${row.digest}></span>
    <span>${row.id}</span>
    ${row.pinned ? html`<span class="tag">${words.pinned}</span>` : null}
    ${tenant && row.tenant !== tenant ? html`<span class="tag">${words.sharedBy(row.tenant)}</span>` : null}
    ${row.shared_with.length && (!tenant || row.tenant === tenant) ? html`<span class="tag">${words.shared}</span>` : null}
    ${row.aliases.map((/** @type {string} */ alias) => html`<span class="muted" key=${alias}>= ${alias}</span>`)}
  </span>`;
}

/** @param {any} row */
function versionCell(row) {
  const words = TEXTS.adapters;
  const canary = row.canary ? html` <span class="tag warn">${words.canaryTag(row.canary.version, row.canary.percent)}</span>` : null;
  return html`<span title=${words.ofVersions(row.num_versions)}>${words.versionName(row.version)}${canary}</span>`;
}

/** @param {any} row */
function lastUsed(row) {
  const time = row.activity.last_used;
  return html`<span title=${time === null ? undefined : moment(time)}>${usedAt(time)}</span>`;
}
