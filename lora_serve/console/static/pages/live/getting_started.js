/** @file What to do to see something. */

import { CopyButton } from "../../components/command.js";
import { apiBase } from "../../lib/cli.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

const WORDS = TEXTS.live.empty;

/**
 * Two commands that make the page move.
 * @param {{model: string}} props
 */
export function GettingStarted({ model }) {
  return html`<div class="live-empty">
    <h2>${WORDS.heading}</h2>
    <p>${WORDS.text}</p>
    <${CommandLine} text=${curlOfChat(model)} />
    <p>${WORDS.or}</p>
    <${CommandLine} text=${WORDS.demo} />
  </div>`;
}

/** @param {{text: string}} props */
function CommandLine({ text }) {
  return html`<div class="live-command"><pre tabindex="0"><code>${text}</code></pre><${CopyButton} text=${text} /></div>`;
}

/** @param {string} model */
function curlOfChat(model) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }], max_tokens: 64 });
  const head = "-H 'Content-Type: application/json' -H \"Authorization: Bearer $LORA_SERVE_KEY\"";
  return `curl ${new URL("v1/chat/completions", apiBase()).href} ${head} -d '${body.replaceAll("'", "'\\''")}'`;
}
