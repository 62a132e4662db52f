import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { Dialog } from "../../components/dialog.js";
import { TextField } from "../../components/field.js";
import { Tabs } from "../../components/tabs.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useRef, useState } from "../../vendor/preact.js";
import { commandsOf, registerAct, uploadCommands } from "./acts.js";
import { DropZone } from "./drop_zone.js";
import { suggestedId } from "./dropped.js";
import { OptionFields, metadataFault } from "./options.js";
import { Progress } from "./progress.js";
import { Registered } from "./registered.js";
import { useRegistration } from "./registration.js";

/** @typedef {{chosen: import("./dropped.js").Chosen|null, error: string}} Dropped  What was dropped, or why it cannot be read. */

/**
 * Registers an adapter: from files of this computer, or from a source that the server fetches.
 * @param {{id: string, dropped: Dropped|null, onClose: () => void}} props  `id`: of an adapter that gets another version; or "".
 */
export function RegisterDialog({ id, dropped, onClose }) {
  const words = TEXTS.adapters;
  const { role, tenant } = useSession();
  const [way, setWay] = useState("upload");
  const [source, setSource] = useState("");
  const [{ chosen, error }, setDropped] = useState(/** @type {Dropped} */ ({ chosen: null, error: "" }));
  const [options, setOptions] = useState({ id, tenant: "", pin: false, activate: !id, allow_noop: false, metadata: "" });
  const suggested = useRef("");
  const { running, upload, register, reset, stop } = useRegistration();
  const change = (/** @type {Partial<typeof options>} */ some) => setOptions((known) => ({ ...known, ...some }));
  const isRunning = running?.state === "running";
  const take = (/** @type {Dropped} */ found) => {
    if (isRunning) return; // one after the other
    setDropped(found);
    setWay("upload");
    reset();
    if (found.chosen) suggest(found.chosen.name);
  };
  /** An id that nobody typed follows what is chosen. */
  const suggest = (/** @type {string} */ name) =>
    setOptions((known) => {
      if (known.id !== suggested.current) return known;
      suggested.current = suggestedId(name, role === "admin" ? "" : tenant);
      return { ...known, id: suggested.current };
    });
  useEffect(() => {
    if (dropped) take(dropped);
  }, [dropped]);

  const isUpload = way === "upload";
  const isReady = Boolean(options.id && !metadataFault(options.metadata) && (isUpload ? chosen : source));
  const begin = () => (isUpload && chosen ? upload(options, chosen) : register(options, source));
  const commands = !isReady ? null : isUpload && chosen ? uploadCommands(options, chosen) : commandsOf(registerAct(options, source));

  if (running?.state === "done") return html`<${Registered} card=${running.card} onAnother=${reset} onClose=${onClose} />`;
  const isSending = isRunning && running.isUpload && running.step === 0; // else it goes on at the server
  const footer = html`${isSending ? html`<${Button} onClick=${stop}>${words.stop}<//>` : html`<${Button} onClick=${onClose}>${isRunning ? TEXTS.common.close : TEXTS.common.cancel}<//>`}
    <${Button} kind="primary" disabled=${!isReady} isBusy=${isRunning} onClick=${begin}>${words.register}<//>`;
  const tabs = [
    { id: "upload", label: words.ways.upload },
    { id: "source", label: words.ways.source },
  ];
  return html`<${Dialog} title=${words.registerTitle} onClose=${onClose} footer=${footer} isWide=${true}>
    <${Tabs} label=${words.registerTitle} tabs=${tabs} selected=${way} onSelect=${setWay}>
      ${isUpload
        ? html`<${DropZone} chosen=${chosen} error=${error} onChosen=${take} />`
        : html`<${TextField} label=${words.source} hint=${words.sourceHint} value=${source} onInput=${(/** @type {string} */ text) => { setSource(text); suggest(text); }} />`}
    <//>
    <${OptionFields} options=${options} onChange=${change} />
    ${commands ? html`<${Command} ...${commands} isOpen=${true} />` : null} ${running ? html`<${Progress} running=${running} />` : null}
  <//>`;
}
