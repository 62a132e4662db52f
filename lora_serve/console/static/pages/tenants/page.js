import { Tabs } from "../../components/tabs.js";
import { go, link, useRoute } from "../../lib/router.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { AuditPanel } from "./audit_panel.js";
import { TenantList } from "./tenant_list.js";
import { TenantPage } from "./tenant_page.js";
import { UsagePanel } from "./usage_panel.js";

const T = TEXTS.tenants;

/** The page "Tenants": all of them for the operator, its own for a tenant's admin. */
export function Page() {
  const session = useSession();
  const { argument, query } = useRoute();
  const name = session.role === "admin" ? argument : session.tenant;
  const tab = query.tab ?? "";
  const select = (/** @type {string} */ id) => go(link("tenants", name, { tab: id }), { isReplaced: true });
  return name ? html`<${TenantPage} key=${name} ...${{ name, tab, onSelect: select }} />` : html`<${Everything} tab=${tab || "tenants"} onSelect=${select} />`;
}

/** @param {{ tab: string, onSelect: (id: string) => void }} props */
function Everything({ tab, onSelect }) {
  const tabs = [
    { id: "tenants", label: T.title },
    { id: "usage", label: T.usage },
    { id: "audit", label: T.audit },
  ];
  return html`<header class="page-head"><h1>${T.title}</h1></header>
    <${Tabs} label=${T.title} tabs=${tabs} selected=${tab} onSelect=${onSelect}>
      ${tab === "tenants" && html`<${TenantList} />`} ${tab === "usage" && html`<${UsagePanel} tenant="" />`} ${tab === "audit" && html`<${AuditPanel} tenant="" />`}
    <//>`;
}
