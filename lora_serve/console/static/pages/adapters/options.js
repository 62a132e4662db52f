import { CheckField, TextField } from "../../components/field.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/**
 * The options of a registration.
 * @param {{options: import("./acts.js").Options, onChange: (changes: Partial<import("./acts.js").Options>) => void}} props
 */
export function OptionFields({ options, onChange }) {
  const words = TEXTS.adapters;
  const { role } = useSession();
  const isAdmin = role === "admin";
  return html`<div class="stack">
    <${TextField} label=${words.id} hint=${words.idHint} value=${options.id} required=${true} onInput=${(/** @type {string} */ id) => onChange({ id })} />
    ${isAdmin ? html`<${TextField} label=${words.owner} hint=${words.ownerHint} value=${options.tenant} onInput=${(/** @type {string} */ tenant) => onChange({ tenant })} />` : null}
    <${CheckField} label=${words.activateField} checked=${options.activate} onChange=${(/** @type {boolean} */ activate) => onChange({ activate })} />
    ${isAdmin ? html`<${CheckField} label=${words.pin} checked=${options.pin} onChange=${(/** @type {boolean} */ pin) => onChange({ pin })} />` : null}
    <${CheckField} label=${words.allowNoop} checked=${options.allow_noop} onChange=${(/** @type {boolean} */ allow_noop) => onChange({ allow_noop })} />
    <${TextField} label=${words.metadataField} error=${metadataFault(options.metadata)} value=${options.metadata} onInput=${(/** @type {string} */ metadata) => onChange({ metadata })} />
  </div>`;
}

/** False if a whole number in it is too large for this page to keep each of its digits. @param {any} value @returns {boolean} */
export function isExact(value) {
  if (typeof value === "number") return !Number.isInteger(value) || Number.isSafeInteger(value);
  return typeof value !== "object" || value === null || Object.values(value).every(isExact);
}

/** What is wrong with the text of metadata, in words; "" for the JSON of an object, and for nothing. @param {string} text */
export function metadataFault(text) {
  const words = TEXTS.adapters;
  if (!text.trim()) return "";
  try {
    const value = JSON.parse(text);
    if (typeof value !== "object" || value === null || Array.isArray(value)) return words.metadataWrong;
    return isExact(value) ? "" : words.metadataInexact;
  } catch {
    return words.metadataWrong;
  }
}
