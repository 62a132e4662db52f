import { Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { useLoad } from "../../lib/load.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { Admission } from "./admission.js";
import { Controller } from "./controller.js";
import { Cost } from "./cost.js";
import { Leans, Restarts, WarmUp } from "./history.js";
import { Limits } from "./limits.js";

const EVERY_MS = 2000;
const TONES = /** @type {Record<string, string>} */ ({ ready: "good", starting: "warn", draining: "warn", failed: "bad" });

/** The engine: its limits and what they do, how it came up, and what it leans on. */
export function Page() {
  const words = TEXTS.engine;
  const api = useApi();
  const health = useLoad((signal) => api.get("admin/engine/health", {}, { signal }), [], { everyMs: EVERY_MS });
  const engine = useLoad((signal) => api.get("admin/engine", {}, { signal }), [], { everyMs: EVERY_MS });
  if (!health.data) return health.error ? html`<${ErrorNote} error=${health.error} onRetry=${health.reload} />` : html`<${Loading} />`;
  return html`<${Head} health=${health.data} />
    ${engine.error ? html`<${ErrorNote} title=${words.noEngine} error=${engine.error} />` : null}
    ${engine.data ? html`<${Limits} engine=${engine.data} health=${health.data} onChange=${(/** @type {any} */ data) => { engine.setData(data); health.reload(); }} />` : null}
    <div class="panels">
      ${engine.data?.batcher ? html`<${Cost} batcher=${engine.data.batcher} maxLoras=${engine.data.max_loras} />` : null}
      ${engine.data ? html`<${Admission} engine=${engine.data} health=${health.data} />` : null}
      <div class="stack engine-column">
        ${engine.data?.batcher ? html`<${Controller} batcher=${engine.data.batcher} />` : null}
        <${WarmUp} stages=${health.data.warm_up} />
        <${Restarts} health=${health.data} />
        <${Leans} health=${health.data} engine=${engine.data} />
      </div>
    </div>`;
}

/** @param {{health: any}} props */
function Head({ health }) {
  const words = TEXTS.engine;
  const since = health.ready_since === null ? null : Math.max(0, Date.now() / 1000 - health.ready_since);
  return html`<div class="page-head">
    <h1>${words.title}</h1>
    <span class=${`tag ${TONES[health.state] ?? ""}`} data-state=${health.state}>${/** @type {any} */ (words.states)[health.state] ?? health.state}</span>
    <span class="muted">${health.reason || words.readyFor(since)}</span>
    <span class="muted">${words.history.restarts}: ${words.history.numRestarts(health.num_restarts)}</span>
  </div>`;
}
