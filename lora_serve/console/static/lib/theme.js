/** Dark, light, or as the system says. The choice is kept in this browser; it is no secret. */

import { keep, readKept } from "./storage.js";
import { useEffect, useState } from "../vendor/preact.js";

/** @typedef {"auto"|"light"|"dark"} Theme */

const STORED = "lora_serve.theme";
/** @type {Theme} */
let chosen = "auto"; // where the browser keeps nothing
export const THEMES = /** @type {Theme[]} */ (["auto", "light", "dark"]);

/** The theme that was chosen. @returns {Theme} */
export function chosenTheme() {
  const kept = /** @type {Theme} */ (readKept("localStorage", STORED) ?? chosen);
  return THEMES.includes(kept) ? kept : "auto";
}

/** Shows the page in a theme, and keeps the choice. @param {Theme} theme */
export function setTheme(theme) {
  chosen = theme;
  keep("localStorage", STORED, theme);
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

/** True if the page is dark now. */
export function isDark() {
  const theme = chosenTheme();
  return theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
}

/** True if the page is dark, kept up to date: for what is drawn on a canvas. */
export function useIsDark() {
  const [dark, setDark] = useState(isDark);
  useEffect(() => {
    const follow = () => setDark(isDark());
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", follow);
    addEventListener("themechange", follow);
    return () => {
      system.removeEventListener("change", follow);
      removeEventListener("themechange", follow);
    };
  }, []);
  return dark;
}
