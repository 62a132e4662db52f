import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { Confirm } from "../../components/confirm.js";
import { Empty, Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { Table } from "../../components/table.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { ago, moment } from "../../lib/format.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { KeyDialog } from "./key_dialog.js";
import { useLoaded } from "./loaded.js";

const T = TEXTS.tenants;

/** A tenant's keys: made, listed, revoked. @param {{ tenant: string }} props */
export function KeysPanel({ tenant }) {
  const api = useApi();
  const path = `admin/tenants/${encodeURIComponent(tenant)}/keys`;
  const { data, error, reload } = useLoaded(path);
  const [isMaking, setMaking] = useState(false);
  const [ending, setEnding] = useState(/** @type {any} */ (null));
  const end = async () => {
    await api.delete(`${path}/${encodeURIComponent(ending.id)}`);
    reload();
  };
  const done = () => {
    setMaking(false);
    reload();
  };
  return html`<div class="toolbar"><${Button} kind="primary" onClick=${() => setMaking(true)}>${T.createKey}<//></div>
    ${error && html`<${ErrorNote} error=${error} onRetry=${reload} />`} ${!data && !error && html`<${Loading} />`}
    ${data &&
    html`<${Table} caption=${T.keys} columns=${columns(setEnding)} rows=${data.data} keyOf=${(/** @type {any} */ key) => key.id}
      dataOf=${(/** @type {any} */ key) => ({ "data-key": key.id, "data-active": String(key.active) })} empty=${html`<${Empty} title=${T.noKeys} />`} />`}
    <${Command} curl=${curlOf({ path })} cli=${cliOf("keys", "list", tenant)} />
    ${isMaking && html`<${KeyDialog} tenant=${tenant} onClose=${done} />`}
    ${ending &&
    html`<${Confirm} title=${T.revokeOf(ending.id)} text=${T.revokeHint} action=${T.revoke} onConfirm=${end} onClose=${() => setEnding(null)}>
      <${Command} curl=${curlOf({ method: "DELETE", path: `${path}/${encodeURIComponent(ending.id)}` })} cli=${cliOf("keys", "revoke", tenant, ending.id)} />
    <//>`}`;
}

/** @param {(key: any) => void} onRevoke */
function columns(onRevoke) {
  return [
    { key: "id", label: T.keyId, render: (/** @type {any} */ key) => html`<code>${key.id}</code>` },
    { key: "label", label: T.label },
    { key: "role", label: T.role, render: (/** @type {any} */ key) => TEXTS.common.roles[/** @type {"admin"} */ (key.role)] ?? key.role },
    { key: "active", label: T.state, render: stateOf },
    { key: "created", label: T.created, render: (/** @type {any} */ key) => moment(key.created) },
    { key: "last_used", label: T.lastUsed, render: (/** @type {any} */ key) => ago(key.last_used) },
    {
      key: "revoke",
      label: T.revoke,
      render: (/** @type {any} */ key) => key.active && html`<${Button} kind="quiet" label=${T.revokeOf(key.id)} onClick=${() => onRevoke(key)}>${T.revoke}<//>`,
    },
  ];
}

/** @param {any} key */
function stateOf(key) {
  if (key.revoked !== null) return T.revoked(moment(key.revoked));
  if (!key.active) return T.expired(moment(key.expires));
  return key.expires === null ? T.active : T.activeUntil(moment(key.expires));
}
