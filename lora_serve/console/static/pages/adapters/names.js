import { Button } from "../../components/button.js";
import { TextField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { aliasAct, removeAliasAct, shareAct } from "./acts.js";
import { sharedText } from "./facts.js";

/** @typedef {{card: any, onAsk: (asked: import("./act_dialog.js").Asked) => void}} Props */

/** The aliases of an adapter. @param {Props} props */
export function Aliases({ card, onAsk }) {
  const words = TEXTS.adapters;
  const [alias, setAlias] = useState("");
  const [target, setTarget] = useState(card.id);
  const targets = [card.id, ...card.versions.map((/** @type {any} */ one) => `${card.id}@${one.version}`)];
  const add = () => onAsk({ name: words.aliasAdd, text: words.ask.alias(alias, target), act: aliasAct(alias, target) });
  const remove = (/** @type {string} */ one) => onAsk({ name: words.aliasRemove(one), text: words.ask.aliasRemove(one), act: removeAliasAct(one), isDanger: true });
  return html`<section class="panel stack" aria-label=${words.aliases}>
    <h2>${words.aliases}</h2>
    <p class="hint">${words.aliasText}</p>
    ${card.aliases.length ? null : html`<p class="muted">${words.noAliases}</p>`}
    ${card.aliases.map((/** @type {string} */ one) => html`<div class="row" key=${one} data-alias=${one}><span>${one}</span><${Button} kind="quiet" label=${words.aliasRemove(one)} onClick=${() => remove(one)}>×<//></div>`)}
    <${TextField} label=${words.aliasName} value=${alias} onInput=${setAlias} />
    <${TextField} label=${words.aliasTarget} value=${target} list=${targets} onInput=${setTarget} />
    <div class="row"><${Button} disabled=${!alias || !target} onClick=${add}>${words.aliasAdd}<//></div>
  </section>`;
}

/** The tenants that may use an adapter. @param {Props} props */
export function Sharing({ card, onAsk }) {
  const words = TEXTS.adapters;
  const [text, setText] = useState(card.shared_with.join(", "));
  const tenants = text.split(",").map((/** @type {string} */ one) => one.trim()).filter(Boolean);
  const apply = () => onAsk({ name: words.sharingApply, text: words.ask.share(card.id, sharedText(tenants)), act: shareAct(card.id, tenants) });
  return html`<section class="panel stack" aria-label=${words.sharing}>
    <h2>${words.sharing}</h2>
    <p class="hint">${words.sharingText}</p>
    <${TextField} label=${words.sharingField} hint=${words.sharingHint} value=${text} onInput=${setText} />
    <div class="row"><${Button} onClick=${apply}>${words.sharingApply}<//></div>
  </section>`;
}
