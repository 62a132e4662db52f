import { ApiError } from "../lib/api.js";
import { useSession } from "../lib/session.js";
import { TEXTS } from "../texts.js";
import { html, useState } from "../vendor/preact.js";
import { Button } from "./button.js";
import { CheckField, TextField } from "./field.js";

/** The form for a key. @param {{onDone?: () => void}} props  `onDone`: after signing in. */
export function SignIn({ onDone = () => {} }) {
  const words = TEXTS.signIn;
  const session = useSession();
  const [key, setKey] = useState("");
  const [isKept, setKept] = useState(false);
  const [isBusy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const given = key.trim();
    const fault = faultOf(given);
    setProblem(fault);
    if (fault) return;
    setBusy(true);
    try {
      await session.signIn(given, isKept);
      setKey("");
      onDone();
    } catch (error) {
      setProblem(inWords(error));
    }
    setBusy(false);
  };
  return html`<form class="sign-in panel" onSubmit=${submit} aria-labelledby="sign-in-title">
    <h1 id="sign-in-title">${words.title}</h1>
    ${session.reason ? html`<p class="notice" role="status">${session.reason}</p>` : null}
    <p class="hint">${words.lead}</p>
    <${TextField} label=${words.key} type="password" value=${key} onInput=${setKey} error=${problem} hint=${words.keyHint} isFocused autocomplete="off" />
    <${CheckField} label=${words.keep} checked=${isKept} onChange=${setKept} />
    <${Button} kind="primary" type="submit" isBusy=${isBusy}>${words.submit}<//>
    <p class="hint">${words.whereIsTheKey}</p>
  </form>`;
}

/** @param {string} key */
function faultOf(key) {
  if (!key) return TEXTS.signIn.empty;
  return /^[\x21-\x7e]+$/.test(key) ? "" : TEXTS.signIn.notAscii;
}

/** @param {unknown} error */
function inWords(error) {
  if (!(error instanceof ApiError)) return String(error);
  if (error.isLost) return TEXTS.signIn.lost;
  if (error.status === 429) return TEXTS.signIn.tooMany(error.retryAfter);
  return error.message;
}
