import { Command } from "../../components/command.js";
import { Empty, Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { Pager } from "../../components/pager.js";
import { Table } from "../../components/table.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { moment, shortDigest } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { ChainCheck } from "./chain_check.js";
import { usePages } from "./loaded.js";

const T = TEXTS.tenants;
const PAGE = 50;
const COLUMNS = [
  { key: "time", label: T.time, render: (/** @type {any} */ line) => moment(line.time) },
  { key: "key", label: T.key, render: (/** @type {any} */ line) => html`<code>${line.key}</code>` },
  { key: "tenant", label: T.by, render: (/** @type {any} */ line) => `${line.tenant} (${line.role})` },
  { key: "action", label: T.action },
  { key: "subject", label: T.subject },
  { key: "outcome", label: T.outcome, isNumber: true, render: (/** @type {any} */ line) => html`<span class=${line.outcome < 400 ? "good" : "bad"}>${line.outcome}</span>` },
  { key: "number", label: T.line, isNumber: true, render: (/** @type {any} */ line) => html`<span title=${line.line_digest}>${line.number} <code>${shortDigest(line.line_digest)}</code></span>` },
];

/** The audit log, newest first: of one tenant, or of all with "". @param {{ tenant: string }} props */
export function AuditPanel({ tenant }) {
  const { data, error, rows, pager, reload } = usePages("admin/audit", { tenant, limit: PAGE });
  const flags = tenant ? ["--tenant", tenant] : [];
  return html`<${ChainCheck} tenant=${tenant} />
    ${error && html`<${ErrorNote} error=${error} onRetry=${reload} />`} ${!data && !error && html`<${Loading} />`}
    ${data && !data.is_complete && html`<p class="warn" role="status">${T.notComplete}</p>`}
    ${data &&
    html`<${Table} caption=${T.audit} columns=${COLUMNS} rows=${rows} keyOf=${(/** @type {any} */ line) => line.id}
        dataOf=${(/** @type {any} */ line) => ({ "data-line": line.id, title: T.requestId(line.request_id) })} empty=${html`<${Empty} title=${T.noAudit} />`} />
      <${Pager} ...${pager} />`}
    <${Command} curl=${curlOf({ path: "admin/audit", query: { tenant } })} cli=${cliOf("audit", ...flags)} />`;
}
