/**
 * Every act on adapters, as one value: the call that does it, and the command that does the same.
 *
 * @typedef {{method: string, path: string, query?: Record<string, any>, body?: any, cli?: (string|number)[]}} Act  Without `cli`: curl alone does it.
 */

import { segment } from "../../lib/api.js";
import { cliOf, curlOf, option, pathArgument } from "../../lib/cli.js";

/** @param {string} id @param {string} [verb] */
function pathOf(id, verb = "") {
  return `admin/adapters/${segment(id)}${verb ? `/${verb}` : ""}`;
}

/** Pin, unpin, prefetch, evict or roll back. @param {"pin"|"unpin"|"prefetch"|"evict"|"rollback"} verb @param {string} id @returns {Act} */
export function verbAct(verb, id) {
  return { method: "POST", path: pathOf(id, verb), cli: ["adapters", verb, id] };
}

/** Makes a version the one that the id means. @param {string} id @param {number} version @returns {Act} */
export function activateAct(id, version) {
  return { method: "PUT", path: pathOf(id, "route"), body: { version }, cli: ["adapters", "route", id, version] };
}

/** Gives a share to a version; 0 ends it. @param {string} id @param {number} version @param {number} percent @returns {Act} */
export function canaryAct(id, version, percent) {
  const body = { canary: percent ? { version, percent } : null };
  return { method: "PUT", path: pathOf(id, "route"), body, cli: ["adapters", "canary", id, version, percent] };
}

/** Deletes an adapter, or one version. @param {string} id @param {number} [version] @returns {Act} */
export function deleteAct(id, version) {
  const only = version === undefined ? [] : ["--version", version];
  return { method: "DELETE", path: pathOf(id), query: { version }, cli: ["adapters", "delete", id, ...only, "--yes"] };
}

/** Gives a name to a target. @param {string} alias @param {string} target @returns {Act} */
export function aliasAct(alias, target) {
  return { method: "PUT", path: `admin/aliases/${segment(alias)}`, body: { target }, cli: ["adapters", "alias", alias, target] };
}

/** Takes a name away. @param {string} alias @returns {Act} */
export function removeAliasAct(alias) {
  return { method: "DELETE", path: `admin/aliases/${segment(alias)}`, cli: ["adapters", "alias", "--delete", alias] };
}

/** Shares with these tenants and no others; ["*"]: all. @param {string} id @param {string[]} tenants @returns {Act} */
export function shareAct(id, tenants) {
  const named = tenants.length ? tenants.flatMap((one) => option("--with", one)) : ["--nobody"];
  const words = tenants.includes("*") ? ["--all"] : named;
  return { method: "PUT", path: pathOf(id, "sharing"), body: { shared_with: tenants }, cli: ["adapters", "share", id, ...words] };
}

/** Sets what is known of an adapter beside its weights. @param {string} id @param {Record<string, any>} metadata @returns {Act} */
export function metadataAct(id, metadata) {
  return { method: "PATCH", path: pathOf(id), body: { metadata } };
}

/**
 * @typedef {{id: string, tenant: string, pin: boolean, activate: boolean, allow_noop: boolean, metadata: string}} Options
 *   Of a registration; `metadata`: JSON, or "".
 */

/** The options that are not the server's defaults. @param {Options} options @returns {Record<string, any>} */
export function optionFields(options) {
  return {
    ...(options.tenant ? { tenant: options.tenant } : {}),
    ...(options.pin ? { pin: true } : {}),
    ...(options.activate ? {} : { activate: false }),
    ...(options.allow_noop ? { allow_noop: true } : {}),
    ...(options.metadata.trim() ? { metadata: options.metadata } : {}),
  };
}

/** @param {Options} options */
function optionWords(options) {
  return [
    ...(options.tenant ? option("--tenant", options.tenant) : []),
    ...(options.pin ? ["--pin"] : []),
    ...(options.activate ? [] : ["--no-activate"]),
    ...(options.allow_noop ? ["--allow-noop"] : []),
    ...(options.metadata.trim() ? option("--metadata", options.metadata) : []),
  ];
}

/** Registers from a source. @param {Options} options @param {string} source @returns {Act} */
export function registerAct(options, source) {
  const fields = optionFields(options);
  const body = { id: options.id, source, ...fields, ...(options.metadata.trim() ? { metadata: JSON.parse(options.metadata) } : {}) };
  return { method: "POST", path: "admin/adapters", body, cli: ["adapters", "register", options.id, pathArgument(source), ...optionWords(options)] };
}

/** An act as curl and as this program's command. @param {Act} act */
export function commandsOf(act) {
  return { curl: curlOf(act), ...(act.cli ? { cli: cliOf(...act.cli) } : {}) };
}

/** An upload as curl and as this program's command. @param {Options} options @param {import("./dropped.js").Chosen} chosen */
export function uploadCommands(options, chosen) {
  const path = pathOf(options.id);
  const fields = Object.fromEntries(Object.entries(optionFields(options)).map(([name, value]) => [name, String(value)]));
  const parts = Object.fromEntries(chosen.files.map(({ name }) => [name, `@${chosen.name}/${name}`]));
  const curl =
    chosen.archive === null
      ? curlOf({ method: "PUT", path, form: { ...fields, ...parts } })
      : curlOf({ method: "PUT", path, query: fields, upload: chosen.name, mediaType: "application/octet-stream" });
  const cli = cliOf("adapters", "upload", options.id, pathArgument(chosen.name), ...optionWords(options));
  return { curl, cli };
}

/** Does an act; the answer. @param {import("../../lib/api.js").Api} api @param {Act} act */
export async function perform(api, act) {
  return (await api.call(act.method, act.path, { query: act.query, body: act.body })).data;
}

/** Where a registration of this id goes. @param {string} id */
export function uploadPath(id) {
  return pathOf(id);
}
