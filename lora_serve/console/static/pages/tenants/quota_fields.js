import { TextField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** @typedef {import("./quota.js").Typed} Typed */

const T = TEXTS.tenants;

/**
 * A field for each limit; an empty one is no limit.
 * @param {{ limits: import("./quota.js").Limit[], typed: Typed, onChange: (typed: Typed) => void }} props
 */
export function QuotaFields({ limits, typed, onChange }) {
  return html`<fieldset class="quota-fields">
    <legend>${T.limits}</legend>
    <p class="hint">${T.limitHint}</p>
    ${limits.map(({ name }) => html`<${TextField} key=${name} name=${name} label=${T.limitNames[name]} value=${typed[name] ?? ""} placeholder=${name === "device_bytes_guaranteed" ? T.noGuarantee : T.noLimit}
      onInput=${(/** @type {string} */ text) => onChange({ ...typed, [name]: text })} />`)}
  </fieldset>`;
}
