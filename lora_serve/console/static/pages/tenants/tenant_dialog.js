import { Command } from "../../components/command.js";
import { CheckField, TextField } from "../../components/field.js";
import { cliOf, curlOf } from "../../lib/cli.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { ActDialog } from "./act_dialog.js";
import { changeOf, flagsOf, LIMITS, typedOf } from "./quota.js";
import { QuotaFields } from "./quota_fields.js";

const T = TEXTS.tenants;
const NEW = { name: "", may_use_base: true, offload: true, quota: {} };

/**
 * Makes a tenant, or changes the one whose card is given.
 * @param {{ card: any, onDone: (card: any) => void, onClose: () => void }} props
 */
export function TenantDialog({ card, onDone, onClose }) {
  const api = useApi();
  const known = card ?? NEW;
  const [fields, setFields] = useState({ name: known.name, may_use_base: known.may_use_base, offload: known.offload });
  const [typed, setTyped] = useState(typedOf(known.quota));
  const set = (/** @type {any} */ news) => setFields((old) => ({ ...old, ...news }));
  const act = actOf(card, fields, changeOf(typed, known.quota));
  const run = async () => onDone((await api.call(act.method, act.path, { body: act.body })).data);
  return html`<${ActDialog} title=${card ? T.changeOf(card.name) : T.create} action=${card ? T.save : T.create} isEnabled=${fields.name !== ""} onAct=${run} onClose=${onClose}>
    ${!card && html`<${TextField} label=${T.name} name="name" value=${fields.name} isFocused=${true} onInput=${(/** @type {string} */ name) => set({ name })} />`}
    <${CheckField} label=${T.mayUseBase} checked=${fields.may_use_base} onChange=${(/** @type {boolean} */ may_use_base) => set({ may_use_base })} />
    <${CheckField} label=${T.mayOffload} hint=${T.offloadHint} checked=${fields.offload} onChange=${(/** @type {boolean} */ offload) => set({ offload })} />
    <${QuotaFields} limits=${LIMITS} typed=${typed} onChange=${setTyped} />
    <${Command} curl=${curlOf(act)} cli=${act.cli} />
  <//>`;
}

/**
 * The act as a call and as a command; a change holds what is changed alone.
 * @param {any} card
 * @param {{ name: string, may_use_base: boolean, offload: boolean }} fields
 * @param {Record<string, number | string | null>} quota
 */
function actOf(card, { name, may_use_base, offload }, quota) {
  const flag = (/** @type {string} */ word, /** @type {boolean} */ is, /** @type {boolean} */ was) => (is === was ? [] : [is ? `--${word}` : `--no-${word}`]);
  const was = card ?? NEW;
  const flags = [...flag("base", may_use_base, was.may_use_base), ...flag("offload", offload, was.offload), ...flagsOf(quota)];
  if (!card) return { method: "POST", path: "admin/tenants", body: { name, may_use_base, offload, quota }, cli: cliOf("tenants", "create", name, ...flags) };
  const changed = { ...(may_use_base === was.may_use_base ? {} : { may_use_base }), ...(offload === was.offload ? {} : { offload }) };
  return { method: "PATCH", path: `admin/tenants/${encodeURIComponent(name)}`, body: { ...changed, quota }, cli: cliOf("tenants", "set", name, ...flags) };
}
