import { Bar } from "../../components/bar.js";
import { Button } from "../../components/button.js";
import { RangeField, SelectField } from "../../components/field.js";
import { colourOf } from "../../lib/colour.js";
import { percent } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { activateAct, canaryAct } from "./acts.js";

/**
 * The canary: which version, which share, and what both sides do now.
 * @param {{card: any, canChange: boolean, onAsk: (asked: import("./act_dialog.js").Asked) => void}} props
 */
export function Canary({ card, canChange, onAsk }) {
  const words = TEXTS.adapters;
  const others = card.versions.filter((/** @type {any} */ one) => one.version !== card.version);
  if (!others.length) return html`<section class="panel" aria-label=${words.canaryTitle}><h2>${words.canaryTitle}</h2><p class="muted">${words.oneVersion}</p></section>`;
  return html`<section class="panel stack" aria-label=${words.canaryTitle}>
    <h2>${words.canaryTitle}</h2>
    ${card.route.canary ? html`<${Live} card=${card} />` : html`<p class="muted">${words.noCanary}</p>`}
    ${canChange ? html`<${Controls} key=${JSON.stringify(card.route)} ...${{ card, others, onAsk }} />` : null}
  </section>`;
}

/** Answers and errors of both sides. @param {{card: any}} props */
function Live({ card }) {
  const words = TEXTS.adapters;
  const digests = new Map(card.versions.map((/** @type {any} */ one) => [one.version, one.digest]));
  const sides = /** @type {any[]} */ (card.route.answers).map((one) => ({ ...one, digest: digests.get(one.version) }));
  const all = sides.reduce((sum, one) => sum + one.requests, 0);
  const segments = sides.map((one) => ({
    label: words.versionName(one.version),
    value: one.requests,
    colour: colourOf(one.digest),
    data: { "data-version": String(one.version), "data-digest": one.digest },
  }));
  const format = (/** @type {number} */ count) => words.shareText(count, null);
  return html`<div class="stack" data-live-canary>
    <p class="hint">${words.liveWindow(card.activity.window_seconds / 60)}</p>
    <${Bar} label=${words.liveShare} segments=${segments} format=${format} />
    <dl class="facts">
      ${sides.map(
        (one) => html`<dt key=${`name ${one.version}`}>
            <span class="row"><span class="dot" style=${{ background: colourOf(one.digest) }}></span>${words.versionName(one.version)} ${one.version === card.version ? words.current : words.canary}</span>
          </dt>
          <dd key=${one.version} data-side=${one.version}>
            ${one.requests ? words.shareText(one.requests, one.requests / all) : words.noAnswers}${one.requests
              ? html`; ${words.errorRate}: <span class=${one.errors ? "bad" : "good"}>${percent(one.errors / one.requests)}</span>`
              : null}
          </dd>`,
      )}
    </dl>
  </div>`;
}

/** @param {{card: any, others: any[], onAsk: (asked: import("./act_dialog.js").Asked) => void}} props */
function Controls({ card, others, onAsk }) {
  const words = TEXTS.adapters;
  const { canary } = card.route;
  const [version, setVersion] = useState(canary?.version ?? others[others.length - 1].version);
  const [share, setShare] = useState(canary?.percent ?? 5);
  const choices = others.map((one) => ({ value: String(one.version), label: words.versionName(one.version) }));
  const apply = () => onAsk({ name: words.canaryApply, text: words.ask.canary(card.id, version, share), act: canaryAct(card.id, version, share) });
  const end = () => onAsk({ name: words.canaryEnd, text: words.ask.canaryEnd(card.id), act: canaryAct(card.id, canary.version, 0) });
  const promote = () =>
    onAsk({ name: words.canaryPromote, text: words.ask.activate(card.id, canary.version), act: activateAct(card.id, canary.version) });
  const isSame = canary?.version === version && canary?.percent === share;
  return html`<p class="hint">${words.canaryText}</p>
    <${SelectField} label=${words.canaryVersion} value=${String(version)} choices=${choices} onChange=${(/** @type {string} */ value) => setVersion(Number(value))} />
    <${RangeField} label=${words.canaryShare} value=${share} min=${0} max=${100} show=${(/** @type {number} */ value) => `${value}%`} onInput=${setShare} />
    <div class="row">
      <${Button} kind="primary" disabled=${isSame || !share} onClick=${apply}>${words.canaryApply}<//>
      ${canary ? html`<${Button} onClick=${end}>${words.canaryEnd}<//><${Button} onClick=${promote}>${words.canaryPromote}<//>` : null}
    </div>`;
}
