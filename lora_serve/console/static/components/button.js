import { html } from "../vendor/preact.js";

/**
 * A button, or with `href` a link that looks like one.
 * @param {{kind?: "plain"|"primary"|"danger"|"quiet", isBusy?: boolean, disabled?: boolean, onClick?: (event: any) => void,
 *          title?: string, label?: string, type?: "button"|"submit", href?: string, pressed?: boolean, data?: Record<string, string>,
 *          children?: any}} props  `label`: its accessible name where its content is an icon.
 */
export function Button({ kind = "plain", isBusy = false, disabled = false, onClick, title, label, type = "button", href, pressed, data = {}, children }) {
  const name = `button ${kind}`;
  if (href) return html`<a class=${name} href=${href} title=${title} aria-label=${label} ...${data}>${children}</a>`;
  return html`<button
    class=${name}
    type=${type}
    title=${title}
    aria-label=${label}
    aria-busy=${isBusy ? "true" : undefined}
    aria-pressed=${pressed === undefined ? undefined : String(pressed)}
    disabled=${disabled || isBusy}
    onClick=${onClick}
    ...${data}
  >
    ${children}
  </button>`;
}
