/** Dark, light, or as the system says. The choice is kept in this browser; it is no secret. */

import { useEffect, useState } from "../vendor/preact.js";

/** @typedef {"auto"|"light"|"dark"} Theme */

const STORED = "lora_serve.theme";
export const THEMES = /** @type {Theme[]} */ (["auto", "light", "dark"]);

/** The theme that was chosen. @returns {Theme} */
export function chosenTheme() {
  const kept = /** @type {Theme} */ (localStorage.getItem(STORED) ?? "auto");
  return THEMES.includes(kept) ? kept : "auto";
}

/** Shows the page in a theme, and keeps the choice. @param {Theme} theme */
export function setTheme(theme) {
  localStorage.setItem(STORED, theme);
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
