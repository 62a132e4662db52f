import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { Confirm } from "../../components/confirm.js";
import { Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { Tabs } from "../../components/tabs.js";
import { toast } from "../../components/toast.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { moment } from "../../lib/format.js";
import { go, link } from "../../lib/router.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { AuditPanel } from "./audit_panel.js";
import { KeysPanel } from "./keys_panel.js";
import { useLoaded } from "./loaded.js";
import { TenantDialog } from "./tenant_dialog.js";
import { UsagePanel } from "./usage_panel.js";
import { UseBars } from "./use_bars.js";

const T = TEXTS.tenants;
const TABS = ["use", "keys", "usage", "audit"];

/**
 * One tenant: its limits against their use, its keys, usage and acts.
 * @param {{ name: string, tab: string, onSelect: (id: string) => void }} props
 */
export function TenantPage({ name, tab, onSelect }) {
  const { api, role, caller } = useSession();
  const path = `admin/tenants/${encodeURIComponent(name)}`;
  const { data: card, error, reload } = useLoaded(path);
  const [dialog, setDialog] = useState("");
  const close = () => setDialog("");
  if (error) return html`<${ErrorNote} error=${error} onRetry=${reload} />`;
  if (!card) return html`<${Loading} />`;
  const remove = async () => {
    const gone = await api.delete(path);
    toast(T.deleted(name, gone.adapters.length), "good");
    go(link("tenants"));
  };
  const changed = () => {
    close();
    reload();
  };
  const selected = TABS.includes(tab) ? tab : "use";
  return html`<header class="page-head" data-tenant=${name}>
      <div>
        <h1>${name}</h1>
        <p class="muted">${T.since(moment(card.created))} ${card.may_use_base ? T.usesBase : T.noBase} ${card.offload || !caller?.has_neighbours ? "" : T.noOffload}</p>
      </div>
      ${role === "admin" &&
      html`<div class="buttons">
        <${Button} href=${link("tenants")}>${T.all}<//> <${Button} onClick=${() => setDialog("change")}>${T.change}<//>
        <${Button} kind="danger" onClick=${() => setDialog("delete")}>${T.delete}<//>
      </div>`}
    </header>
    <${Tabs} label=${name} tabs=${TABS.map((id) => ({ id, label: T.tabs[id] }))} selected=${selected} onSelect=${onSelect}>
      ${selected === "use" && html`<${UseBars} tenant=${name} quota=${card.quota} />`} ${selected === "keys" && html`<${KeysPanel} tenant=${name} />`}
      ${selected === "usage" && html`<${UsagePanel} tenant=${name} />`} ${selected === "audit" && html`<${AuditPanel} tenant=${name} />`}
    <//>
    ${dialog === "change" && html`<${TenantDialog} card=${card} onDone=${changed} onClose=${close} />`}
    ${dialog === "delete" &&
    html`<${Confirm} title=${T.deleteOf(name)} text=${T.deleteHint(card.num_keys, card.num_adapters)} action=${T.delete} expected=${name} onConfirm=${remove} onClose=${close}>
      <${Command} curl=${curlOf({ method: "DELETE", path })} cli=${cliOf("tenants", "delete", name)} />
    <//>`}`;
}
