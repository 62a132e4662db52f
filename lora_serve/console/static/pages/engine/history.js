import { Bar } from "../../components/bar.js";
import { Table } from "../../components/table.js";
import { moment, ms, span } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

const TONES = ["var(--accent)", "var(--good)", "var(--warn)", "var(--muted)"];

/** The last warm-up, part by part. @param {{stages: {name: string, seconds: number}[]}} props */
export function WarmUp({ stages }) {
  const words = TEXTS.engine.history;
  const segments = stages.map((one, at) => ({ label: one.name, value: 1000 * one.seconds, colour: TONES[at % TONES.length] ?? "" }));
  return html`<section class="panel stack" aria-labelledby="engine-warm-up">
    <h2 id="engine-warm-up">${words.warmUp}</h2>
    ${stages.length
      ? html`<${Bar} label=${words.warmUpWhole} segments=${segments} format=${ms} />
          <dl class="facts">
            ${stages.map(
              (one, at) => html`<dt key=${one.name}>
                  <span class="dot" style=${{ background: TONES[at % TONES.length] }}></span> ${one.name}
                </dt>
                <dd>${ms(1000 * one.seconds)}</dd>`,
            )}
          </dl>`
      : html`<p class="hint">${words.noWarmUp}</p>`}
  </section>`;
}

/** The ends of engines, newest first. @param {{health: any}} props */
export function Restarts({ health }) {
  const words = TEXTS.engine.history;
  const columns = [
    { key: "time", label: words.when, render: (/** @type {any} */ row) => moment(row.time) },
    { key: "reason", label: words.why },
    { key: "seconds", label: words.away, isNumber: true, render: (/** @type {any} */ row) => (row.seconds === null ? words.notYet : span(row.seconds)) },
  ];
  return html`<section class="panel stack" aria-labelledby="engine-restarts">
    <h2 id="engine-restarts">${words.restarts}</h2>
    <${Table}
      caption=${words.restarts}
      columns=${columns}
      rows=${health.restarts}
      keyOf=${(/** @type {any} */ row) => String(row.time)}
      empty=${html`<p class="hint">${words.noRestarts}</p>`}
    />
  </section>`;
}

/** The store and Redis as the server last met them. @param {{health: any, engine: any}} props */
export function Leans({ health, engine }) {
  const words = TEXTS.engine.history;
  const { redis } = health;
  const tier = engine?.tiers?.redis;
  return html`<section class="panel stack" aria-labelledby="engine-leans">
    <h2 id="engine-leans">${words.leans}</h2>
    <dl class="facts">
      <dt>${words.store}</dt>
      <dd data-store>${health.store_problem ? html`<span class="bad">${health.store_problem}</span>` : html`<span class="tag good">${words.storeWell}</span>`}</dd>
      ${redis
        ? html`<dt>${words.registry}</dt>
            <dd data-redis="registry"><${Journal} journal=${redis.registry} /></dd>
            <dt>${words.tenants}</dt>
            <dd data-redis="tenants"><${Journal} journal=${redis.tenants} /></dd>`
        : html`<dt>${words.redis}</dt>
            <dd>${words.noRedis}</dd>`}
      ${tier
        ? html`<dt>${words.tier}</dt>
            <dd>${words.tierHolds(tier.num_items, tier.num_bytes)}</dd>`
        : null}
    </dl>
  </section>`;
}

/** @param {{journal: {is_away: boolean, seconds_away: number, num_losses: number}}} props */
function Journal({ journal }) {
  const words = TEXTS.engine.history;
  const losses = journal.num_losses ? words.losses(journal.num_losses) : "";
  if (journal.is_away) return html`<span class="tag bad">${words.awayFor(journal.seconds_away)}</span>${losses}`;
  return html`<span class="tag good">${words.there}</span>${losses}`;
}
