/** The models that the caller may use, and an adapter's versions where the caller may see them. */

import { segment } from "../../lib/api.js";
import { useLoad } from "../../lib/load.js";
import { useApi, useSession } from "../../lib/session.js";

/** @typedef {{ id: string, parent: string | null, digest: string | null, owned_by: string }} Model */

/** The base model first, then adapters by name; `data` is null until they are known. */
export function useModels() {
  const api = useApi();
  return useLoad(async (signal) => /** @type {Model[]} */ ((await api.get("v1/models", {}, { signal })).data), [api]);
}

/**
 * The numbers of an adapter's versions, newest first; empty where the caller may not ask, or there is no such adapter.
 * @param {string} id
 * @param {Model[]} models
 * @returns {number[]}
 */
export function useVersions(id, models) {
  const session = useSession();
  const mayAsk = session.isManaging && models.some((model) => model.parent && model.id === id);
  const { data } = useLoad(async (signal) => (mayAsk ? await versionsOf(session.api, id, signal) : null), [id, mayAsk]);
  return data?.id === id ? data.versions : [];
}

/**
 * @param {import("../../lib/api.js").Api} api
 * @param {string} id
 * @param {AbortSignal} signal
 */
async function versionsOf(api, id, signal) {
  const card = await api.get(`admin/adapters/${segment(id)}`, {}, { signal }).catch(() => null); // a shared one is its owner's to show
  const versions = /** @type {number[]} */ (card?.versions.map((/** @type {any} */ one) => one.version) ?? []);
  return { id, versions: versions.sort((one, other) => other - one) };
}
