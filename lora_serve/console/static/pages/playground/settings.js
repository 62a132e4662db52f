/** A prompt with its columns as text: shared between people, and kept by the history. No key and no answer is in it. */

import { MAX_COLUMNS, MAX_MEMBERS, newColumn } from "./request.js";

/** @typedef {import("./types.js").Column} Column */
/** @typedef {import("./types.js").Play} Play */

const MAX_TEXT = 1 << 20;

/**
 * The settings as JSON, without what only this page needs.
 * @param {Play} play
 */
export function toText(play) {
  const columns = play.columns.map(({ key, ...column }) => column);
  return JSON.stringify({ ...play, columns }, null, 2);
}

/**
 * The settings that a text holds; null if it holds none.
 * @param {string} text
 * @returns {Play | null}
 */
export function fromText(text) {
  const value = text.length > MAX_TEXT ? null : parsed(text);
  if (!isObject(value) || !Array.isArray(value.columns)) return null;
  const columns = value.columns.slice(0, MAX_COLUMNS).map((/** @type {any} */ column, /** @type {number} */ key) => columnOf(column, key));
  const mode = value.mode === "completion" ? "completion" : "chat";
  return { mode, system: textOf(value.system), prompt: textOf(value.prompt), columns };
}

/**
 * @param {any} value
 * @param {number} key
 * @returns {Column}
 */
function columnOf(value, key) {
  const made = newColumn(key, "");
  if (!isObject(value)) return made;
  for (const name of /** @type {const} */ (["temperature", "top_p", "max_tokens", "seed"])) {
    made.sampling[name] = textOf(value.sampling?.[name]);
  }
  const kind = value.kind === "composition" ? "composition" : "model";
  const members = Array.isArray(value.members) ? value.members.slice(0, MAX_MEMBERS).map(memberOf) : [];
  const { model, version, schema, tools } = value;
  return { ...made, kind, members, model: textOf(model), version: textOf(version), schema: textOf(schema), tools: textOf(tools) };
}

/** @param {any} value */
function memberOf(value) {
  const scale = isObject(value) ? Number(value.scale) : NaN;
  return { id: textOf(value?.id), scale: Number.isFinite(scale) ? scale : 1 };
}

/** @param {any} value */
function textOf(value) {
  return typeof value === "string" ? value : "";
}

/** @param {any} value */
function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * @param {string} text
 * @returns {any}
 */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
