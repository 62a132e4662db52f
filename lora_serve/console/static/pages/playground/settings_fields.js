import { AreaField, TextField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** @typedef {import("./types.js").Column} Column */

const T = TEXTS.playground;
const SAMPLING = /** @type {const} */ (["temperature", "top_p", "max_tokens", "seed"]);

/**
 * How a column samples, and the form that its answer is held to.
 * @param {{ column: Column, isChat: boolean, onChange: (news: Partial<Column>) => void }} props
 */
export function SettingsFields({ column, isChat, onChange }) {
  const set = (/** @type {string} */ name) => (/** @type {string} */ text) => onChange({ sampling: { ...column.sampling, [name]: text } });
  return html`<details class="settings">
    <summary>${T.settings} <span class="muted">${summary(column)}</span></summary>
    <div class="sampling">
      ${SAMPLING.map((name) => html`<${TextField} key=${name} name=${name} label=${T.fields[name]} value=${column.sampling[name]} placeholder=${T.asServer} onInput=${set(name)} />`)}
    </div>
    <${AreaField} label=${T.fields.schema} isCode=${true} rows=${3} value=${column.schema} placeholder=${T.schemaHint} onInput=${(/** @type {string} */ schema) => onChange({ schema })} />
    ${isChat && html`<${AreaField} label=${T.fields.tools} isCode=${true} rows=${3} value=${column.tools} placeholder=${T.toolsHint} onInput=${(/** @type {string} */ tools) => onChange({ tools })} />`}
  </details>`;
}

/** @param {Column} column */
function summary(column) {
  const sampling = SAMPLING.filter((name) => column.sampling[name].trim()).map((name) => `${name} ${column.sampling[name]}`);
  const forms = [column.schema.trim() && T.fields.schema, column.tools.trim() && T.fields.tools].filter(Boolean);
  return [...sampling, ...forms].join(", ");
}
