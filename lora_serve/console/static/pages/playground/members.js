import { Button } from "../../components/button.js";
import { RangeField, TextField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { Picker } from "./picker.js";
import { MAX_MEMBERS } from "./request.js";

/** @typedef {import("./types.js").Member} Member */

const T = TEXTS.playground;
const SLIDE = 2; // the slider goes from -2 to 2; the field beside it as far as the API

/**
 * The adapters of a composition, each with its scale.
 * @param {{ number: number, members: Member[], models: import("./models.js").Model[], onChange: (members: Member[]) => void }} props
 */
export function Members({ number, members, models, onChange }) {
  const adapters = models.filter((model) => model.parent);
  const set = (/** @type {number} */ at, /** @type {Partial<Member>} */ news) => onChange(members.map((one, index) => (index === at ? { ...one, ...news } : one)));
  return html`<div class="members">
    ${members.map(
      (member, at) => html`<div key=${at} class="member" role="group" aria-label=${T.member(at + 1)} data-member=${member.id}>
        <${Picker} id="member-${number}-${at}" label=${T.memberModel(at + 1)} models=${adapters} value=${member.id} onPick=${(/** @type {string} */ id) => set(at, { id })} />
        <${RangeField} label=${T.scale} isHidden=${true} min=${-SLIDE} max=${SLIDE} step=${0.05} value=${member.scale} show=${shown} onInput=${(/** @type {number} */ scale) => set(at, { scale })} />
        <${TextField} label=${T.exactScale} isHidden=${true} type="number" min=${-100} max=${100} step="any" value=${member.scale}
          onInput=${(/** @type {string} */ text) => text.trim() && Number.isFinite(Number(text)) && set(at, { scale: Number(text) })} />
        <${Button} kind="quiet" label=${T.removeMember(at + 1)} onClick=${() => onChange(members.filter((_, index) => index !== at))}>×<//>
      </div>`,
    )}
    <${Button} disabled=${members.length >= MAX_MEMBERS} onClick=${() => onChange([...members, { id: "", scale: 1 }])}>${T.addMember}<//>
  </div>`;
}

/** @param {number} scale */
function shown(scale) {
  return scale.toFixed(2);
}
