import { Button } from "../../components/button.js";
import { ErrorNote } from "../../components/error.js";
import { number } from "../../lib/format.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useRef, useState } from "../../vendor/preact.js";
import { canDigest, checked } from "./chain.js";

const T = TEXTS.tenants;
const PAGE = 1000; // the server's own limit
const MAX_LINES = 200_000;

/** Reads all lines that the caller may see and checks them here. @param {{ tenant: string }} props */
export function ChainCheck({ tenant }) {
  const api = useApi();
  const [numRead, setNumRead] = useState(/** @type {number | null} */ (null));
  const [verdict, setVerdict] = useState(/** @type {import("./chain.js").Verdict | null} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const aborter = useRef(new AbortController());
  useEffect(() => () => aborter.current.abort(), []);
  const check = async () => {
    aborter.current = new AbortController();
    setVerdict(null);
    setError(null);
    try {
      setVerdict(await checked(await allLines(api, tenant, aborter.current.signal, setNumRead)));
    } catch (failed) {
      if (!aborter.current.signal.aborted) setError(failed);
    }
    setNumRead(null);
  };
  if (!canDigest()) return html`<p class="muted">${T.noDigest}</p>`;
  const isBusy = numRead !== null;
  return html`<div class="toolbar">
      <${Button} isBusy=${isBusy} onClick=${check}>${T.checkChain}<//> ${isBusy && html`<${Button} onClick=${() => aborter.current.abort()}>${T.stop}<//>`}
      <p role="status">${isBusy ? T.reading(number(numRead)) : verdict && html`<${Words} verdict=${verdict} />`}</p>
    </div>
    ${error && html`<${ErrorNote} error=${error} />`}`;
}

/** @param {{ verdict: import("./chain.js").Verdict }} props */
function Words({ verdict: { numLines, numChecked, broken } }) {
  const others = numLines > numChecked ? ` ${T.chainGaps(number(numLines - numChecked))}` : "";
  if (!broken.length) return html`<span class="good" data-chain="whole">${T.chainWhole(number(numChecked))}</span>${others}`;
  const first = broken.reduce((one, other) => (other.number < one.number ? other : one));
  return html`<span class="bad" data-chain="broken">${T.chainBroken(number(broken.length), first.number, first.replica)}</span>${others}`;
}

/**
 * @param {import("../../lib/api.js").Api} api
 * @param {string} tenant
 * @param {AbortSignal} signal
 * @param {(num: number) => void} onProgress
 * @returns {Promise<import("./chain.js").Entry[]>}
 */
async function allLines(api, tenant, signal, onProgress) {
  /** @type {any[]} */
  const lines = [];
  /** @type {any} */
  let page = { has_more: true, last_id: null };
  onProgress(0);
  while (page.has_more && lines.length < MAX_LINES) {
    page = await api.get("admin/audit", { tenant, limit: PAGE, after: page.last_id }, { signal });
    lines.push(...page.data);
    onProgress(lines.length);
  }
  return lines;
}
