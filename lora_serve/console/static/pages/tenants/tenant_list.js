import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { Empty, Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { Pager } from "../../components/pager.js";
import { Table } from "../../components/table.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { moment, number } from "../../lib/format.js";
import { go, link } from "../../lib/router.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { usePages } from "./loaded.js";
import { limitText, LIMITS } from "./quota.js";
import { TenantDialog } from "./tenant_dialog.js";

const T = TEXTS.tenants;
const PAGE = 50;
const COLUMNS = [
  { key: "name", label: T.name },
  { key: "num_keys", label: T.keys, isNumber: true, render: (/** @type {any} */ row) => number(row.num_keys) },
  { key: "num_adapters", label: T.adapters, isNumber: true, render: (/** @type {any} */ row) => number(row.num_adapters) },
  { key: "may_use_base", label: T.base, render: (/** @type {any} */ row) => (row.may_use_base ? T.yes : T.no) },
  { key: "offload", label: T.offload, render: (/** @type {any} */ row) => (row.offload ? T.yes : T.no) },
  { key: "quota", label: T.limits, className: "wide", render: (/** @type {any} */ row) => limitsOf(row.quota) },
  { key: "created", label: T.created, render: (/** @type {any} */ row) => moment(row.created) },
];

/** All tenants by name, each a link to its own page. */
export function TenantList() {
  const { data, error, rows, pager, reload } = usePages("admin/tenants", { limit: PAGE });
  const [isMaking, setMaking] = useState(false);
  const { caller } = useSession();
  const columns = COLUMNS.filter(({ key }) => key !== "offload" || caller?.has_neighbours);
  const open = (/** @type {string} */ name) => go(link("tenants", name));
  const empty = html`<${Empty} title=${T.none} text=${T.noneHint} />`;
  return html`<div class="toolbar"><${Button} kind="primary" onClick=${() => setMaking(true)}>${T.create}<//></div>
    ${error && html`<${ErrorNote} error=${error} onRetry=${reload} />`} ${!data && !error && html`<${Loading} />`}
    ${data &&
    html`<${Table} caption=${T.title} columns=${columns} rows=${rows} keyOf=${(/** @type {any} */ row) => row.name} onOpen=${(/** @type {any} */ row) => open(row.name)}
        dataOf=${(/** @type {any} */ row) => ({ "data-tenant": row.name })} empty=${empty} />
      <${Pager} ...${pager} />`}
    <${Command} curl=${curlOf({ path: "admin/tenants" })} cli=${cliOf("tenants", "list")} />
    ${isMaking && html`<${TenantDialog} card=${null} onDone=${(/** @type {any} */ card) => open(card.name)} onClose=${() => setMaking(false)} />`}`;
}

/** @param {Record<string, number>} quota */
function limitsOf(quota) {
  const words = LIMITS.flatMap((limit) => {
    const value = quota[limit.name];
    return value === undefined ? [] : [`${T.limitNames[limit.name]} ${limitText(limit, value)}`];
  });
  return words.join(", ") || T.noLimit;
}
