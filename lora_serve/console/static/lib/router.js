/**
 * Addresses behind the `#`: `#/page`, `#/page/<argument>`, `#/page?name=value`.
 *
 * @typedef {{page: string, argument: string, query: Record<string, string>}} Route
 */

import { useLayoutEffect, useState } from "../vendor/preact.js";

/** The route in the address bar. @returns {Route} */
export function currentRoute() {
  const [path = "", search = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", ...rest] = path.split("/");
  return { page, argument: decoded(rest.join("/")), query: Object.fromEntries(new URLSearchParams(search)) };
}

/** The address of a page. @param {string} page @param {string} [argument]  An id. @param {Record<string, any>} [query] */
export function link(page, argument = "", query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${page}${argument ? `/${encodeURIComponent(argument)}` : ""}${search ? `?${search}` : ""}`;
}

/** Goes to a page. @param {string} address  As `link` gives it. @param {{isReplaced?: boolean}} [options]  No step back. */
export function go(address, { isReplaced = false } = {}) {
  if (!isReplaced) location.hash = address;
  else {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}

/** The route, kept up to date. */
export function useRoute() {
  const [route, setRoute] = useState(currentRoute);
  useLayoutEffect(() => {
    const follow = () => setRoute(currentRoute());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a person's own percent sign
  }
}
