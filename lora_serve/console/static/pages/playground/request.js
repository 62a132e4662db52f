/** The request of a column: the page sends it, and the copied texts say it. */

/** @typedef {import("./types.js").Ask} Ask */
/** @typedef {import("./types.js").Column} Column */
/** @typedef {import("./types.js").Play} Play */

export const MAX_COLUMNS = 8;
export const MAX_MEMBERS = 8;
const NUM_ALTERNATIVES = 5;

/** A field of a column that makes no request; `code` is the key of its text. */
export class FieldError extends Error {
  /**
   * @param {string} field
   * @param {"number" | "json" | "object" | "list" | "model" | "members"} code
   */
  constructor(field, code) {
    super(`${field}: ${code}`);
    this.field = field;
    this.code = code;
  }
}

/**
 * A column as it is added.
 * @param {number} key
 * @param {string} model
 * @returns {Column}
 */
export function newColumn(key, model) {
  const sampling = { temperature: "0", top_p: "", max_tokens: "64", seed: "" };
  return { key, kind: "model", model, version: "", members: [], sampling, schema: "", tools: "" };
}

/**
 * The model's name on the wire.
 * @param {Column} column
 */
export function nameOf(column) {
  const version = column.version.trim();
  return version && column.kind === "model" ? `${column.model}@${version}` : column.model;
}

/**
 * What a column asks, without what only this page needs. Throws FieldError.
 * @param {Play} play
 * @param {Column} column
 * @returns {Ask}
 */
export function requestOf(play, column) {
  const isChat = play.mode === "chat";
  const prompt = isChat ? { messages: messagesOf(play) } : { prompt: play.prompt };
  const body = { ...target(column), ...prompt, ...sampling(column), ...schema(column) };
  const tools = isChat ? toolsOf(column) : {};
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body: { ...body, ...tools } };
}

/**
 * The same request, streamed and with the log-probabilities that colour the answer.
 * @param {Ask} ask
 * @returns {Ask}
 */
export function streamed(ask) {
  const logprobs = "messages" in ask.body ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : { logprobs: NUM_ALTERNATIVES };
  return { path: ask.path, body: { ...ask.body, ...logprobs, stream: true, stream_options: { include_usage: true } } };
}

/** @param {Play} play */
function messagesOf(play) {
  const user = { role: "user", content: play.prompt };
  return play.system ? [{ role: "system", content: play.system }, user] : [user];
}

/** @param {Column} column */
function target(column) {
  if (column.kind === "model") {
    if (!column.model) throw new FieldError("model", "model");
    return { model: nameOf(column) };
  }
  const [first] = column.members;
  if (!first) throw new FieldError("members", "members");
  return { model: first.id, adapters: column.members.map(({ id, scale }) => ({ id, scale })) };
}

/** @param {Column} column */
function sampling(column) {
  /** @type {Record<string, number>} */
  const found = {};
  for (const [name, text] of Object.entries(column.sampling)) {
    if (!text.trim()) continue;
    const value = Number(text);
    if (!Number.isFinite(value) || (Number.isInteger(value) && !Number.isSafeInteger(value))) throw new FieldError(name, "number");
    found[name] = value;
  }
  return found;
}

/** @param {Column} column */
function schema(column) {
  if (!column.schema.trim()) return {};
  const value = parsed("schema", column.schema);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new FieldError("schema", "object");
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: value } } };
}

/** @param {Column} column */
function toolsOf(column) {
  if (!column.tools.trim()) return {};
  const value = parsed("tools", column.tools);
  if (!Array.isArray(value)) throw new FieldError("tools", "list");
  return { tools: value };
}

/**
 * @param {string} field
 * @param {string} text
 * @returns {any}
 */
function parsed(field, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new FieldError(field, "json");
  }
}
