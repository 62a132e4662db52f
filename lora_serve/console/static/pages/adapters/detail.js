import { Button } from "../../components/button.js";
import { Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { segment } from "../../lib/api.js";
import { colourOf } from "../../lib/colour.js";
import { useLoad } from "../../lib/load.js";
import { go, link } from "../../lib/router.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { ActDialog } from "./act_dialog.js";
import { deleteAct, verbAct } from "./acts.js";
import { Canary } from "./canary.js";
import { Facts } from "./facts.js";
import { Metadata } from "./metadata.js";
import { Aliases, Sharing } from "./names.js";
import { Warnings } from "./registered.js";
import { Versions } from "./versions.js";

const EVERY_MS = 2000;
/** @typedef {import("./act_dialog.js").Asked} Asked */

/** One adapter: what it is, what it does now, and every act on it. @param {{id: string, onRegister: () => void}} props */
export function AdapterDetail({ id, onRegister }) {
  const words = TEXTS.adapters;
  const { api, role, tenant } = useSession();
  const [asked, setAsked] = useState(/** @type {Asked|null} */ (null));
  const { data: card, error, reload } = useLoad((signal) => api.get(`admin/adapters/${segment(id)}`, {}, { signal }), [id], { everyMs: EVERY_MS });
  const isAdmin = role === "admin";
  const canChange = isAdmin || card?.tenant === tenant;
  const done = (/** @type {any} */ answer) => {
    if (answer?.deleted && answer.id === id && answer.version === null) go(link("adapters"));
    else reload();
  };
  return html`<div class="page-head">
      <div class="stack">
        <a href=${link("adapters")}>← ${words.back}</a>
        <h1><span class="dot" style=${{ background: colourOf(card?.digest) }}></span> ${id}</h1>
      </div>
      ${card && canChange ? html`<${Acts} ...${{ card, isAdmin, onRegister }} onAsk=${setAsked} />` : null}
    </div>
    ${error ? html`<${ErrorNote} error=${error} onRetry=${reload} />` : null} ${card || error ? null : html`<${Loading} />`}
    ${card
      ? html`<${Warnings} warnings=${card.warnings} />
          <div class="panels">
            <section class="panel" aria-label=${words.facts}><h2>${words.facts}</h2><${Facts} ...${{ card, isAdmin }} /></section>
            <${Canary} ...${{ card, canChange }} onAsk=${setAsked} />
          </div>
          <${Versions} ...${{ card, canChange }} onAsk=${setAsked} />
          ${canChange ? html`<${Metadata} key=${id} card=${card} onAsk=${setAsked} />` : null}
          ${isAdmin ? html`<div class="panels"><${Aliases} card=${card} onAsk=${setAsked} /><${Sharing} card=${card} onAsk=${setAsked} /></div>` : null}`
      : null}
    ${asked ? html`<${ActDialog} asked=${asked} onClose=${() => setAsked(null)} onDone=${done} />` : null}`;
}

/** @param {{card: any, isAdmin: boolean, onRegister: () => void, onAsk: (asked: Asked) => void}} props */
function Acts({ card, isAdmin, onRegister, onAsk }) {
  const words = TEXTS.adapters;
  const button = (/** @type {"pin"|"unpin"|"prefetch"|"evict"|"rollback"} */ verb) => {
    const ask = () => onAsk({ name: words.act[verb], text: words.ask[verb](card.id), act: verbAct(verb, card.id) });
    const isIdle = verb === "rollback" && !card.route.canary && !card.route.history.length;
    return html`<${Button} key=${verb} disabled=${isIdle} onClick=${ask}>${words.act[verb]}<//>`;
  };
  const remove = () =>
    onAsk({ name: words.act.delete, text: words.ask.delete(card.id), act: deleteAct(card.id), isDanger: true, expected: card.id });
  return html`<div class="row">
    <${Button} kind="primary" onClick=${onRegister}>${words.newVersion}<//>
    ${button(card.pinned ? "unpin" : "pin")} ${isAdmin ? [button("prefetch"), button("evict")] : null} ${button("rollback")}
    <${Button} kind="danger" onClick=${remove}>${words.act.delete}<//>
  </div>`;
}
