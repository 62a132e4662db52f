import { Button } from "../../components/button.js";
import { Command, CopyButton } from "../../components/command.js";
import { Dialog } from "../../components/dialog.js";
import { SelectField, TextField } from "../../components/field.js";
import { cliOf, curlOf, option } from "../../lib/cli.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { ActDialog } from "./act_dialog.js";
import { changeOf, flagsOf, LIMITS } from "./quota.js";
import { QuotaFields } from "./quota_fields.js";

const T = TEXTS.tenants;
const HOUR = 3600;
const SPANS = /** @type {Record<string, number>} */ ({ "12h": 12 * HOUR, "30d": 720 * HOUR, "90d": 2160 * HOUR, "365d": 8760 * HOUR });
const KEYS_LIMITS = LIMITS.filter((limit) => limit.isKeys);

/**
 * Makes a key and shows its secret, once: it is in this dialog alone, and gone with it.
 * @param {{ tenant: string, onClose: () => void }} props
 */
export function KeyDialog({ tenant, onClose }) {
  const { api, role: own } = useSession();
  const [fields, setFields] = useState({ role: "inference", label: "", expires: "" });
  const [typed, setTyped] = useState(/** @type {Record<string, string>} */ ({}));
  const [secret, setSecret] = useState("");
  const set = (/** @type {any} */ news) => setFields((old) => ({ ...old, ...news }));
  const act = actOf(tenant, fields, changeOf(typed, {}));
  const run = async () => setSecret((await api.post(act.path, act.body)).secret);
  if (secret) return html`<${Secret} secret=${secret} onClose=${onClose} />`;
  const roles = own === "admin" ? ["inference", "tenant-admin", "metrics", "admin"] : ["inference", "tenant-admin"];
  return html`<${ActDialog} title=${T.createKeyOf(tenant)} action=${T.createKey} isEnabled=${true} onAct=${run} onClose=${onClose}>
    <${SelectField} label=${T.role} value=${fields.role} choices=${roles.map((value) => ({ value, label: T.roles[value] }))} onChange=${(/** @type {string} */ role) => set({ role })} />
    <${TextField} label=${T.label} hint=${T.labelHint} value=${fields.label} onInput=${(/** @type {string} */ label) => set({ label })} />
    <${SelectField} label=${T.expires} value=${fields.expires} choices=${["", ...Object.keys(SPANS)].map((value) => ({ value, label: T.spans[value] }))} onChange=${(/** @type {string} */ expires) => set({ expires })} />
    <${QuotaFields} limits=${KEYS_LIMITS} typed=${typed} onChange=${setTyped} />
    <${Command} curl=${curlOf(act)} cli=${act.cli} />
  <//>`;
}

/** @param {{ secret: string, onClose: () => void }} props */
function Secret({ secret, onClose }) {
  const footer = html`<${CopyButton} text=${secret} /> <${Button} kind="primary" onClick=${onClose}>${T.secretKept}<//>`;
  return html`<${Dialog} title=${T.secret} onClose=${onClose} footer=${footer}>
    <p>${T.secretHint}</p>
    <p><code class="secret" data-secret="">${secret}</code></p>
  <//>`;
}

/**
 * @param {string} tenant
 * @param {{ role: string, label: string, expires: string }} fields
 * @param {Record<string, number | string | null>} quota
 */
function actOf(tenant, { role, label, expires }, quota) {
  const body = { role, label, quota, ...(expires ? { expires_in: SPANS[expires] } : {}) };
  const flags = ["--role", role, ...(label ? option("--label", label) : []), ...(expires ? ["--expires", expires] : []), ...flagsOf(quota)];
  return { method: "POST", path: `admin/tenants/${encodeURIComponent(tenant)}/keys`, body, cli: cliOf("keys", "create", tenant, ...flags) };
}
