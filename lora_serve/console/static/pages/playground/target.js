import { SelectField, TextField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { Members } from "./members.js";
import { useVersions } from "./models.js";
import { Picker } from "./picker.js";

/** @typedef {import("./types.js").Column} Column */
/** @typedef {import("./models.js").Model} Model */

const T = TEXTS.playground;

/**
 * Whom a column asks: the base model, an adapter or one of its versions, or several adapters added up.
 * @param {{ column: Column, number: number, models: Model[], onChange: (news: Partial<Column>) => void }} props
 */
export function Target({ column, number, models, onChange }) {
  const choices = [
    { value: "model", label: T.oneModel },
    { value: "composition", label: T.composition },
  ];
  const choose = (/** @type {any} */ kind) => {
    const isFirst = kind === "composition" && !column.members.length && models.some(({ id, parent }) => parent && id === column.model);
    onChange(isFirst ? { kind, members: [{ id: column.model, scale: 1 }] } : { kind });
  };
  const isComposed = column.kind === "composition";
  return html`<div class="target">
    <${SelectField} label=${T.kind} isHidden=${true} value=${column.kind} choices=${choices} onChange=${choose} />
    ${isComposed
      ? html`<${Members} number=${number} members=${column.members} models=${models} onChange=${(/** @type {any} */ members) => onChange({ members })} />`
      : html`<${OneModel} ...${{ column, number, models, onChange }} />`}
  </div>`;
}

/** @param {{ column: Column, number: number, models: Model[], onChange: (news: Partial<Column>) => void }} props */
function OneModel({ column, number, models, onChange }) {
  const versions = useVersions(column.model, models);
  const isBase = models.some(({ id, parent }) => !parent && id === column.model);
  return html`<div class="one-model">
    <${Picker} id="model-${number}" label=${T.modelOf(number)} models=${models} value=${column.model} onPick=${(/** @type {string} */ model) => onChange({ model, version: "" })} />
    ${!isBase &&
    html`<${TextField} label=${T.version} isHidden=${true} value=${column.version} placeholder=${T.versionHint} list=${versions.map(String)} onInput=${(/** @type {string} */ version) => onChange({ version })} />`}
  </div>`;
}
