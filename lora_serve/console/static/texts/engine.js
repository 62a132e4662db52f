import { bytes, ms, number, percent, plural, span } from "../lib/format.js";

export const engine = {
  title: "Engine",
  states: { starting: "starting", ready: "ready", draining: "draining", failed: "failed" },
  /** @param {number|null} seconds */
  readyFor: (seconds) => (seconds === null ? "not ready" : `ready for ${span(seconds)}`),
  noEngine: "The engine does not answer at present.",
  limits: {
    title: "Limits",
    lead: "They change while the server runs and are forgotten at a restart: no running row is cut off.",
    save: "Apply",
    reset: "Undo",
    saved: "The new limits are in force.",
    off: "off",
    none: "no limit",
    /** @param {string} value */
    inForce: (value) => `In force: ${value}`,
    batching: "Batches",
    adapters: "Adapters in memory",
    notANumber: "Enter a number.",
    notBytes: "Enter bytes, such as 512MiB or 2GiB.",
    labels: {
      max_num_seqs: "Rows of a step, at most",
      max_num_batched_tokens: "Tokens of a step, at most",
      batch_wait_ms: "Wait for a fuller batch (ms)",
      preferred_batch_size: "Requests that end the wait",
      latency_target_ms: "Target of first tokens, p95 (ms)",
      inter_token_target_ms: "Target between tokens, p95 (ms)",
      max_loras: "Device slots for adapters",
      adapter_memory: "Bytes of the device for adapters",
      adapter_host_memory: "Bytes of host memory for adapters",
      max_cpu_loras: "Adapters in host memory, at most",
    },
    /** @param {number} seconds @param {number} rows @param {number} context */
    rowsEffect: (seconds, rows, context) =>
      `Learned: ${plural(rows, "row", "rows")} over ${number(context)} tokens each take ${ms(1000 * seconds)} a step, ${number(rows / seconds)} tokens/s.`,
    /** @param {number} seconds @param {number} tokens */
    tokensEffect: (seconds, tokens) => `Learned: a step of ${plural(tokens, "prompt token", "prompt tokens")} takes ${ms(1000 * seconds)}, which others wait for their next token.`,
    /** @param {number} wait */
    waitEffect: (wait) => (wait > 0 ? `A first token comes up to ${ms(wait)} later.` : "Off: a batch starts at once."),
    preferredEffect: "Empty: the whole wait is waited.",
    /** @param {number|null} measured */
    targetEffect: (measured) => `Measured: ${ms(measured)}. Empty: nothing is adapted.`,
    /** @param {number} used @param {number} all */
    slotsEffect: (used, all) => `${number(used)} of ${number(all)} are in use.`,
    /** @param {number|null} used */
    bytesEffect: (used) => `${bytes(used)} are in use.`,
    /** @param {number|null} used */
    countEffect: (used) => `${number(used)} are there now.`,
  },
  cost: {
    title: "Learned cost of a step",
    /** @param {number|null} error */
    error: (error) => (error === null ? "Too early to tell." : `The last steps were predicted with a median error of ${percent(error)}.`),
    one: "One more",
    costs: "costs",
    names: {
      step: "step",
      token: "token",
      row: "row",
      adapter: "adapter",
      kv_token: "cached token read",
      attended_pair: "pair of attention",
      prompt_step: "step with prompts",
      drafting_step: "step with drafts",
      draft_token: "guessed token",
    },
    chart: "Predicted milliseconds of a step by its rows",
    predicted: "predicted, decoding",
    prompts: "predicted, with a full step of prompts",
    rows: "rows",
  },
  controller: {
    title: "Latency controller",
    first: "First token, p95",
    between: "Between tokens, p95",
    /** @param {string} measured @param {string} target */
    against: (measured, target) => `${measured} against ${target}`,
    noTarget: "no target",
    kept: "kept",
    missed: "missed",
    limit: "Limit",
    set: "as set",
    inForce: "in force",
  },
  admission: {
    title: "Admission",
    running: "Running rows",
    waiting: "Waiting requests",
    waitingTokens: "Waiting prompt tokens",
    blocks: "KV blocks",
    used: "in use",
    memory: "Memory",
    parts: { weights: "weights", kv: "KV cache", adapters: "adapters", activations: "last step" },
    queue: "Queue",
    preemptions: "Preemptions",
    /** @param {number} swapped @param {number} recomputed */
    preempted: (swapped, recomputed) => `${number(swapped)} moved to host memory, ${number(recomputed)} computed again`,
    outOfMemory: "Steps out of memory",
    /** @param {string} count @param {string} most */
    of: (count, most) => `${count} of ${most}`,
    batches: "The last steps",
    batchRows: "rows",
    stepsFromNow: "steps from now",
    batchMs: "measured",
    noBatches: "No step has run yet.",
  },
  history: {
    warmUp: "Last warm-up",
    warmUpWhole: "whole",
    noWarmUp: "Nothing was warmed up (--warmup off), or the engine is still starting.",
    restarts: "Restarts",
    /** @param {number} count */
    numRestarts: (count) => (count ? plural(count, "restart", "restarts") : "none since the server began"),
    noRestarts: "The engine has not been lost since the server began.",
    when: "When",
    why: "Why",
    away: "Ready again after",
    notYet: "not yet",
    leans: "Store and Redis",
    store: "Store",
    storeWell: "takes changes",
    redis: "Redis",
    noRedis: "not used: one server alone",
    registry: "Shared registry",
    tenants: "Shared tenants",
    there: "there",
    /** @param {number} seconds */
    awayFor: (seconds) => `away for ${span(seconds)}; what is known here is served`,
    /** @param {number} count */
    losses: (count) => `, read anew ${count === 1 ? "once" : `${number(count)} times`}`,
    tier: "Adapters in Redis",
    /** @param {number} items @param {number} size */
    tierHolds: (items, size) => `${plural(items, "adapter", "adapters")}, ${bytes(size)}`,
  },
};
