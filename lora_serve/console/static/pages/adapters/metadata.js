import { Button } from "../../components/button.js";
import { AreaField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { metadataAct } from "./acts.js";
import { isExact, metadataFault } from "./options.js";

/** The metadata of an adapter, to change. @param {{card: any, onAsk: (asked: import("./act_dialog.js").Asked) => void}} props */
export function Metadata({ card, onAsk }) {
  const words = TEXTS.adapters;
  const known = JSON.stringify(card.metadata, null, 2);
  const [typed, setTyped] = useState(/** @type {string|null} */ (null)); // null: as it is known
  const text = typed ?? known;
  const fault = isExact(card.metadata) ? metadataFault(text) : words.metadataInexact;
  const metadata = !fault ? JSON.parse(text.trim() || "{}") : null;
  const isKnown = JSON.stringify(metadata) === JSON.stringify(card.metadata);
  const apply = () => onAsk({ name: words.metadataApply, text: words.ask.metadata(card.id), act: metadataAct(card.id, metadata) });
  return html`<section class="panel stack" aria-label=${words.metadata}>
    <h2>${words.metadata}</h2>
    <p class="hint">${words.metadataText}</p>
    <${AreaField} label=${words.metadataField} isHidden=${true} isCode=${true} rows=${6} error=${fault} value=${text} onInput=${setTyped} />
    <div class="row"><${Button} disabled=${Boolean(fault) || isKnown} onClick=${apply}>${words.metadataApply}<//></div>
  </section>`;
}
