import { Button } from "../../components/button.js";
import { colourOf } from "../../lib/colour.js";
import { ago, bytes, moment, number, shortDigest } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { lastUsed } from "./facts.js";
import { activateAct, deleteAct } from "./acts.js";
import { Tier } from "./tiers.js";

/**
 * The facts that are compared: the value, and how it is shown.
 * @type {[keyof typeof TEXTS.adapters.fact, (version: any) => any, (value: any, version: any) => any][]}
 */
const ROWS = [
  ["digest", (one) => one.digest, (value) => html`<span class="mono" title=${value}>${shortDigest(value)}</span>`],
  ["created", (one) => one.created, (value) => html`<span title=${moment(value)}>${ago(value)}</span>`],
  ["tiers", (one) => one.tiers.join(), (_, one) => html`<${Tier} state=${one.state} tiers=${one.tiers} />`],
  ["rank", (one) => one.rank, number],
  ["kinds", (one) => one.kinds.join(", "), (value) => value || TEXTS.adapters.plainLora],
  ["bytes", (one) => one.bytes, bytes],
  ["targets", (one) => one.targets.join(", "), String],
  ["source", (one) => one.source, String],
  ["probe", (one) => one.probe?.max_logit_change, number],
  ["requests", (one) => one.activity.requests, number],
  ["errors", (one) => one.activity.errors, (value, one) => TEXTS.adapters.errorsText(value, one.activity.requests)],
  ["last_used", (one) => one.activity.last_used, lastUsed],
  ["warnings", (one) => one.warnings.join(" "), String],
];

/**
 * Versions as columns, side by side; where they differ the row is marked.
 * @param {{card: any, canChange: boolean, onAsk: (asked: import("./act_dialog.js").Asked) => void}} props
 */
export function Versions({ card, canChange, onAsk }) {
  const words = TEXTS.adapters;
  const versions = [...card.versions].reverse();
  return html`<section class="panel" aria-label=${words.versions}>
    <h2>${words.versions}</h2>
    <div class="table-box" tabindex="0" role="region" aria-label=${words.versionsTable}>
      <table class="table versions">
        <thead>
          <tr>
            <th scope="col"><span class="hidden">${words.field}</span></th>
            ${versions.map((one) => html`<th scope="col" key=${one.version} data-version=${one.version}><${Head} ...${{ card, one }} /></th>`)}
          </tr>
        </thead>
        <tbody>
          ${ROWS.map((row) => html`<${Row} key=${row[0]} ...${{ row, versions }} />`)}
          ${canChange ? html`<tr><td></td>${versions.map((one) => html`<td key=${one.version}><${Acts} ...${{ card, one, onAsk }} /></td>`)}</tr>` : null}
        </tbody>
      </table>
    </div>
  </section>`;
}

/** @param {{row: typeof ROWS[number], versions: any[]}} props */
function Row({ row: [name, valueOf, show], versions }) {
  const values = versions.map(valueOf);
  if (values.every((one) => one === "")) return null;
  const differs = values.some((one) => one !== values[0]);
  return html`<tr class=${differs ? "differs" : ""} data-fact=${`versions ${name}`}>
    <th scope="row" title=${differs ? TEXTS.adapters.differs : undefined}>${TEXTS.adapters.fact[name]}</th>
    ${versions.map((one, at) => html`<td key=${one.version}>${show(values[at], one)}</td>`)}
  </tr>`;
}

/** @param {{card: any, one: any}} props */
function Head({ card, one }) {
  const words = TEXTS.adapters;
  const isCanary = card.route.canary?.version === one.version;
  return html`<span class="row">
    <span class="dot" style=${{ background: colourOf(one.digest) }} data-digest=${one.digest}></span>${words.versionName(one.version)}
    ${one.version === card.version ? html`<span class="tag good">${words.current}</span>` : null}
    ${isCanary ? html`<span class="tag warn">${words.canary}</span>` : null}
  </span>`;
}

/** @param {{card: any, one: any, onAsk: (asked: import("./act_dialog.js").Asked) => void}} props */
function Acts({ card, one, onAsk }) {
  const words = TEXTS.adapters;
  const name = words.versionName(one.version);
  const activate = () => onAsk({ name: words.activate, text: words.ask.activate(card.id, one.version), act: activateAct(card.id, one.version) });
  const remove = () =>
    onAsk({
      name: words.remove,
      text: words.ask.deleteVersion(card.id, one.version),
      act: deleteAct(card.id, one.version),
      isDanger: true,
      expected: `${card.id}@${one.version}`,
    });
  return html`<div class="row">
    <${Button} disabled=${one.version === card.version} label=${`${words.activate} ${name}`} onClick=${activate}>${words.activate}<//>
    ${card.versions.length > 1 ? html`<${Button} kind="quiet" label=${`${words.remove} ${name}`} onClick=${remove}>${words.remove}<//>` : null}
  </div>`;
}
