/**
 * The prompts and settings that were run, in this browser alone, for each tenant apart: never a key, never an answer.
 * A browser that keeps nothing (private windows, a full quota) has no history, and nothing else changes.
 */

import { fromText, toText } from "./settings.js";

/** @typedef {import("./types.js").Play} Play */
/** @typedef {{ time: number, text: string }} Entry */

const MAX_ENTRIES = 50;
const MAX_CHARACTERS = 500_000;

/** The history of one tenant. */
export class History {
  /**
   * @param {string} tenant
   * @param {Storage | null} storage
   */
  constructor(tenant, storage) {
    const place = `${location.pathname}:${tenant}`;
    this._name = `lora-serve.playground.history:${place}`;
    this._switch = `lora-serve.playground.keeps:${place}`;
    this._storage = storage;
  }

  /** Whether prompts are kept: yes, until somebody says no. */
  get isOn() {
    return this._read(this._switch) !== "no";
  }

  set isOn(isOn) {
    this._write(this._switch, isOn ? "yes" : "no");
    if (!isOn) this.clear();
  }

  /**
   * The newest first.
   * @returns {Entry[]}
   */
  get entries() {
    try {
      const found = JSON.parse(this._read(this._name) ?? "[]");
      return Array.isArray(found) ? found.filter(isEntry) : [];
    } catch {
      return [];
    }
  }

  /**
   * Keeps what is run; what was the same stands once.
   * @param {Play} play
   */
  add(play) {
    if (!this.isOn) return;
    const text = toText(play);
    const kept = [{ time: Date.now(), text }, ...this.entries.filter((entry) => entry.text !== text)].slice(0, MAX_ENTRIES);
    let size = 0;
    this._write(this._name, JSON.stringify(kept.filter((entry) => (size += entry.text.length) <= MAX_CHARACTERS)));
  }

  clear() {
    try {
      this._storage?.removeItem(this._name);
    } catch {
      // nothing was kept
    }
  }

  /** @param {string} name */
  _read(name) {
    try {
      return this._storage?.getItem(name) ?? null;
    } catch {
      return null;
    }
  }

  /**
   * @param {string} name
   * @param {string} value
   */
  _write(name, value) {
    try {
      this._storage?.setItem(name, value);
    } catch {
      // the browser keeps nothing
    }
  }
}

/** This browser's storage; null where it is forbidden. */
export function storage() {
  try {
    return localStorage;
  } catch {
    return null;
  }
}

/** @param {any} entry */
function isEntry(entry) {
  return typeof entry?.time === "number" && typeof entry.text === "string" && fromText(entry.text) !== null;
}
