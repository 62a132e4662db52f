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
  const wrong = isObject(options.metadata) ? "" : words.metadataWrong;
  return html`<div class="stack">
    <${TextField} label=${words.id} hint=${words.idHint} value=${options.id} required=${true} onInput=${(/** @type {string} */ id) => onChange({ id })} />
    ${isAdmin ? html`<${TextField} label=${words.owner} hint=${words.ownerHint} value=${options.tenant} onInput=${(/** @type {string} */ tenant) => onChange({ tenant })} />` : null}
    <${CheckField} label=${words.activateField} checked=${options.activate} onChange=${(/** @type {boolean} */ activate) => onChange({ activate })} />
    ${isAdmin ? html`<${CheckField} label=${words.pin} checked=${options.pin} onChange=${(/** @type {boolean} */ pin) => onChange({ pin })} />` : null}
    <${CheckField} label=${words.allowNoop} checked=${options.allow_noop} onChange=${(/** @type {boolean} */ allow_noop) => onChange({ allow_noop })} />
    <${TextField} label=${words.metadataField} error=${wrong} value=${options.metadata} onInput=${(/** @type {string} */ metadata) => onChange({ metadata })} />
  </div>`;
}

/** True for the JSON of an object, and for nothing. @param {string} text */
export function isObject(text) {
  if (!text.trim()) return true;
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}
