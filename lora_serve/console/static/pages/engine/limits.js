import { Button } from "../../components/button.js";
import { Command } from "../../components/command.js";
import { ErrorNote } from "../../components/error.js";
import { TextField } from "../../components/field.js";
import { toast } from "../../components/toast.js";
import { curlOf } from "../../lib/cli.js";
import { ms, number } from "../../lib/format.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { ADAPTERS, BATCHING, faultOf, shown, valueIn, valuesOf } from "./limit_fields.js";
import { CONTEXT, decodeSeconds, promptSeconds } from "./prediction.js";

const PATH = "admin/engine";

/**
 * The limits, each with what it does by what the engine has learned; only those that were changed are sent.
 * @param {{engine: any, health: any, onChange: (engine: any) => void}} props
 */
export function Limits({ engine, health, onChange }) {
  const words = TEXTS.engine.limits;
  const api = useApi();
  const [texts, setTexts] = useState(/** @type {Record<string, string>} */ ({}));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [isBusy, setBusy] = useState(false);
  const set = valuesOf(engine, health);
  const limits = engine.batcher ? [...BATCHING, ...ADAPTERS] : ADAPTERS;
  const changed = limits.filter(({ name }) => name in texts && texts[name] !== shown(limitOf(name), set[name]));
  const isFaulty = changed.some((limit) => faultOf(limit, texts[limit.name] ?? "") !== "");
  const body = Object.fromEntries(changed.map((limit) => [limit.name, valueIn(limit, texts[limit.name] ?? "")]));
  const apply = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      onChange(await api.put(PATH, body));
      setTexts({});
      toast(words.saved, "good");
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  const field = (/** @type {import("./limit_fields.js").Limit} */ limit) => {
    const text = texts[limit.name] ?? shown(limit, set[limit.name]);
    return html`<${TextField}
      key=${limit.name}
      name=${limit.name}
      label=${labelOf(limit.name)}
      value=${text}
      error=${limit.name in texts ? faultOf(limit, text) : ""}
      placeholder=${limit.canBeOff ? words.off : limit.mayBeNone ? words.none : undefined}
      hint=${effectOf(limit, text, engine)}
      onInput=${(/** @type {string} */ value) => setTexts({ ...texts, [limit.name]: value })}
    />`;
  };
  return html`<form class="panel" onSubmit=${apply} aria-labelledby="engine-limits">
    <h2 id="engine-limits">${words.title}</h2>
    <p class="hint">${words.lead}</p>
    ${engine.batcher
      ? html`<h3>${words.batching}</h3>
          <div class="engine-fields">${BATCHING.map(field)}</div>`
      : null}
    <h3>${words.adapters}</h3>
    <div class="engine-fields">${ADAPTERS.map(field)}</div>
    ${error ? html`<${ErrorNote} error=${error} />` : null}
    <div class="row">
      <${Button} kind="primary" type="submit" isBusy=${isBusy} disabled=${!changed.length || isFaulty}>${words.save}<//>
      <${Button} disabled=${!changed.length || isBusy} onClick=${() => setTexts({})}>${words.reset}<//>
    </div>
    ${changed.length && !isFaulty ? html`<${Command} isOpen curl=${curlOf({ method: "PUT", path: PATH, body })} />` : null}
  </form>`;
}

/** @param {string} name */
function limitOf(name) {
  const found = [...BATCHING, ...ADAPTERS].find((one) => one.name === name);
  if (!found) throw new Error(name);
  return found;
}

/** @param {string} name */
function labelOf(name) {
  return /** @type {Record<string, string>} */ (TEXTS.engine.limits.labels)[name];
}

/** What the value does, or would do. @param {import("./limit_fields.js").Limit} limit @param {string} text @param {any} engine */
function effectOf(limit, text, engine) {
  const words = TEXTS.engine.limits;
  const { batcher, tiers, slots } = engine;
  const value = Number(text);
  const isGood = text.trim() !== "" && Number.isFinite(value) && value > 0;
  const inForce = batcher?.in_force[limit.name];
  const isTightened = inForce !== undefined && inForce !== batcher[limit.name];
  const force = isTightened ? `${words.inForce(limit.kind === "ms" ? ms(inForce) : number(inForce))}. ` : "";
  const cost = batcher?.step_cost_us ?? {};
  switch (limit.name) {
    case "max_num_seqs":
      return isGood ? force + words.rowsEffect(decodeSeconds(cost, value, engine.max_loras), value, CONTEXT) : force;
    case "max_num_batched_tokens":
      return isGood ? force + words.tokensEffect(promptSeconds(cost, value), value) : force;
    case "batch_wait_ms":
      return force + words.waitEffect(isGood ? value : 0);
    case "preferred_batch_size":
      return words.preferredEffect;
    case "latency_target_ms":
      return words.targetEffect(batcher.measured.ttft_p95_ms);
    case "inter_token_target_ms":
      return words.targetEffect(batcher.measured.inter_token_p95_ms);
    case "max_loras":
      return words.slotsEffect(slots.filter((/** @type {any} */ slot) => slot.digest).length, engine.max_loras);
    case "adapter_memory":
      return words.bytesEffect(tiers.device?.num_bytes ?? null);
    case "adapter_host_memory":
      return words.bytesEffect(tiers.host?.num_bytes ?? null);
    default:
      return words.countEffect(tiers.host?.num_items ?? null);
  }
}
