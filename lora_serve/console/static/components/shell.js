import { link } from "../lib/router.js";
import { useSession } from "../lib/session.js";
import { THEMES, chosenTheme, setTheme } from "../lib/theme.js";
import { TEXTS } from "../texts.js";
import { html, useState } from "../vendor/preact.js";
import { Button } from "./button.js";
import { Icon } from "./icon.js";
import { Toasts } from "./toast.js";

/**
 * What is around every page: navigation, who is signed in, the theme, toasts, and whether the server answers.
 * @param {{pages: {id: string, title: string, icon: string}[], selected: string, connection: import("../lib/connection.js").Connection,
 *          children?: any}} props
 */
export function Shell({ pages, selected, connection, children }) {
  const words = TEXTS.common;
  return html`<div class="shell">
    <a class="skip" href="#content" onClick=${skip}>${words.skip}</a>
    <aside class="side">
      <div class="brand"><img src="icon.svg" alt="" width="20" height="20" /><span>${words.product}</span></div>
      <nav class="navigation" aria-label=${words.navigation}>
        ${pages.map(
          (page) => html`<a key=${page.id} href=${link(page.id)} aria-current=${page.id === selected ? "page" : undefined} data-page=${page.id}>
            <${Icon} name=${page.icon} /><span>${page.title}</span>
          </a>`,
        )}
      </nav>
      <div class="side-end"><${ThemeChoice} /><${Account} /></div>
    </aside>
    <div class="main">
      <${Banner} connection=${connection} />
      <main id="content" tabindex="-1">${children}</main>
    </div>
    <${Toasts} />
  </div>`;
}

/** The address bar's `#` belongs to the router. @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

/** @param {{connection: import("../lib/connection.js").Connection}} props */
function Banner({ connection }) {
  const words = TEXTS.common;
  const text = { up: "", lost: words.lost, back: words.back }[connection.state];
  return html`<div role="status" class=${`banner ${connection.state}`}>${text}</div>`;
}

/** One button through the three themes, so that it has its place on a phone too. */
function ThemeChoice() {
  const [theme, choose] = useState(chosenTheme);
  const words = TEXTS.common;
  const turn = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "auto";
    setTheme(next);
    choose(next);
  };
  return html`<${Button} kind="quiet" label=${`${words.theme}: ${words.themes[theme]}`} title=${words.themeHint} onClick=${turn}>
    <${Icon} name=${theme} /><span class="wide-only">${words.themes[theme]}</span>
  <//>`;
}

function Account() {
  const session = useSession();
  const words = TEXTS.common;
  if (!session.hasKey) return html`<a class="button plain" href=${link("sign-in")}>${words.signIn}</a>`;
  const role = words.roles[session.role];
  const tenant = session.tenant === role ? "" : session.tenant;
  return html`<div class="account">
    <span class="account-name" data-role=${session.role}>${tenant && html`<span class="account-tenant" title=${tenant}>${tenant}</span>`}<span>${role}</span></span>
    <${Button} kind="quiet" onClick=${() => session.end()}>${words.signOut}<//>
  </div>`;
}
