/** The same act as a command for a terminal. The key is written as a variable, never itself. */

export const KEY_VARIABLE = "LORA_SERVE_KEY";

/** A word as a shell takes it. @param {string} text */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/**
 * A call as curl makes it.
 * @param {{method?: string, path: string, query?: Record<string, any>, body?: any, form?: Record<string, string>,
 *          upload?: string, mediaType?: string}} call  `form`: parts, "@file" for a file; `upload`: a file's name.
 * @param {URL|string} [base]  Of the API.
 */
export function curlOf({ method = "GET", path, query = {}, body, form, upload, mediaType }, base = apiBase()) {
  const url = new URL(path.replace(/^\//, ""), base);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, String(value));
  }
  const words = ["curl", "-sS"];
  if (method !== "GET") words.push("-X", method);
  words.push(quoted(url.href), "-H", `"Authorization: Bearer $${KEY_VARIABLE}"`);
  if (body !== undefined) words.push("-H", quoted("Content-Type: application/json"), "-d", quoted(JSON.stringify(body)));
  for (const [name, value] of Object.entries(form ?? {})) words.push(...partOf(name, value));
  if (mediaType) words.push("-H", quoted(`Content-Type: ${mediaType}`));
  if (upload) words.push("--data-binary", quoted(`@${upload}`));
  return words.join(" ");
}

/** A part of a form. curl reads `;` and `,` in it, unless it is quoted for curl too. @param {string} name @param {string} value */
function partOf(name, value) {
  if (!value.startsWith("@")) return ["--form-string", quoted(`${name}=${value}`)];
  const path = value.slice(1);
  return ["-F", quoted(/[;,"\\]/.test(path) ? `${name}=@"${path.replace(/["\\]/g, "\\$&")}"` : `${name}=@${path}`)];
}

/** An option with its value, which may begin like an option itself. @param {string} name @param {string} value */
export function option(name, value) {
  return value.startsWith("-") ? [`${name}=${value}`] : [name, value];
}

/** A path as an argument: one that begins like an option is named from its folder. @param {string} path */
export function pathArgument(path) {
  return path.startsWith("-") ? `./${path}` : path;
}

/** A command of the program, to this server. @param {...(string|number)} words */
export function cliOf(...words) {
  const url = apiBase().href.replace(/\/$/, "");
  return ["lora-serve", ...words, "--url", url].map((word) => quoted(String(word))).join(" ");
}

/** The API's address, from the page's own: `/prefix/ui/` -> `/prefix/`. */
export function apiBase() {
  return new URL("../", new URL(".", location.href));
}
