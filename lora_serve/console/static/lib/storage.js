/** What this browser keeps for the page. It may refuse that, or have no room: then nothing is kept, and the page goes on. */

/** @typedef {"localStorage"|"sessionStorage"} Where */

/** What is kept under a name; null: nothing. @param {Where} where @param {string} name @returns {string|null} */
export function readKept(where, name) {
  try {
    return window[where].getItem(name);
  } catch {
    return null;
  }
}

/** Keeps a value under a name; null forgets it. @param {Where} where @param {string} name @param {string|null} value */
export function keep(where, name, value) {
  try {
    if (value === null) window[where].removeItem(name);
    else window[where].setItem(name, value);
  } catch {
    // as said above
  }
}
