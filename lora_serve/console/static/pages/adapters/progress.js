import { ErrorNote } from "../../components/error.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { Refusal } from "./refusal.js";

/** The steps of a registration, the one that runs, and where it failed. @param {{running: import("./registration.js").Running}} props */
export function Progress({ running }) {
  const words = TEXTS.adapters;
  const steps = [
    { id: running.isUpload ? "send" : "fetch", text: bytesText(running) },
    { id: "examine", text: words.stepText.examine },
    { id: "probe", text: words.stepText.probe },
  ];
  return html`<div class="stack">
    <ol class="steps" aria-live="polite">
      ${steps.map(({ id, text }, at) => html`<${Step} key=${id} id=${id} text=${text} state=${stateOf(running, at)} />`)}
    </ol>
    ${running.step === 0 && running.total ? html`<progress aria-label=${words.steps.send} value=${running.sent} max=${running.total}></progress>` : null}
    ${running.state === "failed" ? html`<${Failure} error=${running.error} />` : null}
  </div>`;
}

/** @param {{id: string, text: string, state: string}} props */
function Step({ id, text, state }) {
  const { steps, stepState } = TEXTS.adapters;
  return html`<li class=${`step ${state}`} data-step=${id} data-state=${state} aria-current=${state === "running" ? "step" : undefined}>
    <strong>${/** @type {any} */ (steps)[id]}</strong> <span class="step-state">${/** @type {any} */ (stepState)[state]}</span>
    <p class="hint">${text}</p>
  </li>`;
}

/** @param {import("./registration.js").Running} running @param {number} at */
function stateOf({ state, step }, at) {
  if (at < step) return "done";
  if (at > step) return "waiting";
  return state === "failed" ? "failed" : "running";
}

/** @param {import("./registration.js").Running} running */
function bytesText({ isUpload, sent, total }) {
  if (isUpload) return total ? TEXTS.adapters.sent(sent, total) : "";
  return sent ? TEXTS.adapters.fetched(sent) : "";
}

/** @param {{error: any}} props */
function Failure({ error }) {
  if (error?.name === "AbortError") return html`<p class="notice">${TEXTS.adapters.stopped}</p>`;
  const reasons = error?.body?.error?.reasons;
  return Array.isArray(reasons) ? html`<${Refusal} reasons=${reasons} requestId=${error.requestId} />` : html`<${ErrorNote} error=${error} />`;
}
