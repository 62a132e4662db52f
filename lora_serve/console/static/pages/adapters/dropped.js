/**
 * What was dropped or chosen, as the API takes it: an archive as it is, or the adapter's files out of a folder.
 *
 * @typedef {{name: string, file: File}} Named  The name is one of FILE_NAMES.
 * @typedef {{name: string, archive: File|null, files: Named[], leftOut: string[], size: number}} Chosen
 * @typedef {{path: string, file: File}} Found  `path`: from the dropped folder on.
 */

import { TEXTS } from "../../texts.js";

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";
/** As the server knows them (server/admin/upload.py). */
export const FILE_NAMES = [CONFIG, WEIGHTS, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
const ARCHIVE = /\.(tar|tar\.gz|tgz|zip)$/i;
const MAX_FILES = 2000; // looked at in a folder

/** The dropped thing. Raises Error in words. @param {DataTransfer} transfer @returns {Promise<Chosen>} */
export async function chosenOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.() ?? null).filter((entry) => entry !== null);
  const files = [...transfer.files];
  if (entries.some((entry) => entry.isDirectory)) return chosenFiles(await readAll(entries));
  return chosenFiles(files.map((file) => ({ path: file.name, file })));
}

/** Files of a folder, or one archive. Raises Error in words. @param {Found[]} found @returns {Chosen} */
export function chosenFiles(found) {
  const words = TEXTS.adapters;
  const [first] = found;
  if (!first) throw new Error(words.nothingDropped);
  if (found.length === 1 && !FILE_NAMES.includes(nameOf(first.path))) return archiveOf(first.file);
  const configs = found.filter(({ path }) => nameOf(path) === CONFIG);
  const depth = Math.min(...configs.map(({ path }) => path.split("/").length));
  const nearest = configs.filter(({ path }) => path.split("/").length === depth);
  const [config] = nearest;
  if (!config) throw new Error(words.noConfig);
  if (nearest.length > 1) throw new Error(words.severalAdapters(nearest.length));
  return folderOf(found, config.path.slice(0, -CONFIG.length));
}

/** @param {Found[]} found @param {string} folder  Ends with a slash, or is "". @returns {Chosen} */
function folderOf(found, folder) {
  const isSent = (/** @type {Found} */ { path }) => path.startsWith(folder) && FILE_NAMES.includes(path.slice(folder.length));
  const files = found.filter(isSent).map(({ path, file }) => ({ name: nameOf(path), file }));
  if (!files.some(({ name }) => name === WEIGHTS)) throw new Error(TEXTS.adapters.noWeights);
  const leftOut = found.filter((one) => !isSent(one)).map(({ path }) => path);
  return { name: folder.replace(/\/$/, "") || ".", archive: null, files, leftOut, size: sizeOf(files) };
}

/** @param {File} file @returns {Chosen} */
function archiveOf(file) {
  if (!ARCHIVE.test(file.name)) throw new Error(TEXTS.adapters.noArchive);
  return { name: file.name, archive: file, files: [], leftOut: [], size: file.size };
}

/** @param {FileSystemEntry[]} entries @returns {Promise<Found[]>} */
async function readAll(entries) {
  /** @type {Found[]} */
  const found = [];
  const left = [...entries];
  while (left.length) {
    const entry = /** @type {any} */ (left.pop());
    if (entry.isDirectory) left.push(...(await childrenOf(entry.createReader())));
    else found.push({ path: entry.fullPath.replace(/^\//, ""), file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
    if (found.length + left.length > MAX_FILES) throw new Error(TEXTS.adapters.tooManyFiles);
  }
  return found;
}

/** A reader gives some at a time, and at last none. @param {any} reader @returns {Promise<FileSystemEntry[]>} */
async function childrenOf(reader) {
  /** @type {FileSystemEntry[]} */
  const children = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length || children.length > MAX_FILES) return children;
    children.push(...some);
  }
}

/** @param {string} path */
function nameOf(path) {
  return path.slice(path.lastIndexOf("/") + 1);
}

/** @param {Named[]} files */
function sizeOf(files) {
  return files.reduce((sum, { file }) => sum + file.size, 0);
}

/** An id for a folder, an archive or a source: its own name, in the tenant's namespace. @param {string} path @param {string} tenant */
export function suggestedId(path, tenant) {
  const last = path.replace(/[?#].*$|\/+$/g, "").split("/").pop() ?? "";
  const name = last.replace(ARCHIVE, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "");
  return name && tenant ? `${tenant}/${name}` : name;
}
