/** @file The chosen moment: its step, who was in it, and the chosen request's story. */

import { Button } from "../../components/button.js";
import { CopyButton } from "../../components/command.js";
import { colourOf } from "../../lib/colour.js";
import { clock, ms, number, plural } from "../../lib/format.js";
import { link } from "../../lib/router.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { nameOf, shortId } from "./lane_list.js";
import { momentAt, timingsOf } from "./moment.js";

/** @typedef {import("./history.js").History} History @typedef {import("./moment.js").Chosen} Chosen */
/** @typedef {import("./moment.js").Moment} Moment @typedef {import("./track.js").Track} Track */

const WORDS = TEXTS.live.moment;

/**
 * The side panel of a chosen moment.
 * @param {{history: History, chosen: Chosen, onStep: (direction: 1 | -1) => void, onPick: (track: Track) => void,
 *   onClose: () => void}} props
 */
export function MomentPanel({ history, chosen, onStep, onPick, onClose }) {
  const moment = momentAt(history, chosen);
  return html`<aside class="panel live-moment" aria-label=${WORDS.heading}>
    <header class="live-panel-head">
      <h2>${moment.step ? WORDS.step(number(moment.step.number)) : WORDS.heading}</h2>
      <span class="row">
        <${Button} kind="quiet" label=${WORDS.before} onClick=${() => onStep(-1)}>←<//>
        <${Button} kind="quiet" label=${WORDS.after} onClick=${() => onStep(1)}>→<//>
        <${Button} kind="quiet" label=${WORDS.close} onClick=${onClose}>×<//>
      </span>
    </header>
    <${Step} moment=${moment} chosen=${chosen} onPick=${onPick} />
    <${Request} track=${moment.track} time=${moment.step?.end ?? chosen.time} wasChosen=${chosen.id !== null} />
  </aside>`;
}

/** @param {{moment: Moment, chosen: Chosen, onPick: (track: Track) => void}} props */
function Step({ moment: { step, rows }, chosen, onPick }) {
  if (!step) return html`<p class="muted">${WORDS.noStep}</p>`;
  const adapters = new Set(rows.flatMap(({ track }) => track.info?.adapters.map((one) => one.digest) ?? [])).size;
  const most = Math.max(1, ...rows.map((row) => row.tokens));
  return html`<p class="live-step-line" data-step=${step.number}>
      <strong>${ms(step.ms)}</strong> · ${plural(step.rows, "row", "rows")} · ${plural(step.tokens, "token", "tokens")} ·
      ${" "}${plural(adapters, "adapter", "adapters")} <span class="muted">${WORDS.at} ${clock(step.end)}</span>
    </p>
    ${step.gap && html`<p class="notice">${WORDS.gap}</p>`}
    <ul class="live-composition" aria-label=${WORDS.composition}>
      ${rows.map(
        ({ track, kind, tokens }) => html`<li key=${track.id}>
          <button type="button" data-request=${track.id} data-digest=${track.digest} data-tokens=${tokens} data-kind=${kind}
            aria-pressed=${String(track.id === chosen.id)} onClick=${() => onPick(track)}>
            <span class="live-swatch" style=${{ color: colourOf(track.digest) }}></span>
            <span class="live-adapter">${nameOf(track)}</span>
            <span class="live-id">${shortId(track.id)}</span>
            <span class="live-kind">${TEXTS.live.kinds[kind]}</span>
            <span class="live-tokens"><i style=${{ width: `${(100 * tokens) / most}%`, background: colourOf(track.digest) }}></i></span>
            <span class="live-count">${number(tokens)}</span>
          </button>
        </li>`,
      )}
    </ul>`;
}

/** @param {{track: Track | null, time: number, wasChosen: boolean}} props */
function Request({ track, time, wasChosen }) {
  if (!track) return html`<p class="muted">${wasChosen ? WORDS.gone : WORDS.none}</p>`;
  const { info } = track;
  const times = timingsOf(track);
  const state = track.stateAt(time) ?? "finished";
  return html`<section class="live-request" aria-label=${WORDS.request} data-request=${track.id} data-digest=${track.digest}>
    <h3><span class="live-swatch" style=${{ color: colourOf(track.digest) }}></span>${nameOf(track)}</h3>
    <div class="live-full-id"><code class="one-line" title=${track.id}>${track.id}</code><${CopyButton} text=${track.id} /></div>
    <dl class="facts">
      <dt>${WORDS.state}</dt><dd>${TEXTS.live.states[state]}${info?.reason ? html` <span class="muted">(${WORDS.reason} ${info.reason})</span>` : ""}</dd>
      <dt>${WORDS.tenant}</dt><dd>${info?.tenant}</dd>
      <dt>${WORDS.promptTokens}</dt><dd>${number(info?.num_prompt)} ${info?.num_cached ? html`<span class="muted">${WORDS.cached(number(info.num_cached))}</span>` : ""}</dd>
      <dt>${WORDS.outputTokens}</dt><dd>${number(info?.num_output)}</dd>
      <dt>${WORDS.arrived}</dt><dd>${clock(info?.arrived)}</dd>
      <dt>${WORDS.waited}</dt><dd>${ms(times.waited)}</dd>
      <dt>${WORDS.firstToken}</dt><dd>${ms(times.first)}</dd>
      <dt>${WORDS.between}</dt><dd>${ms(times.between)}</dd>
      <dt>${WORDS.ran}</dt><dd>${ms(times.ran)}</dd>
    </dl>
    ${info?.adapters.map((adapter) => html`<${Adapter} key=${adapter.digest} adapter=${adapter} />`)}
  </section>`;
}

/** @param {{adapter: import("./types.js").AdapterUse}} props */
function Adapter({ adapter }) {
  return html`<dl class="facts live-adapter-facts">
    <dt>${WORDS.adapter}</dt><dd><a href=${link("adapters", adapter.name)}>${adapter.name}</a></dd>
    <dt>${WORDS.version}</dt><dd>${adapter.version}${adapter.scale === 1 ? "" : html` <span class="muted">${WORDS.scale} ${number(adapter.scale)}</span>`}</dd>
    <dt>${WORDS.digest}</dt><dd><code class="live-digest">${adapter.digest}</code></dd>
  </dl>`;
}
