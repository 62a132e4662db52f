/** The console: who is signed in decides which pages there are. */

import { Empty, Loading } from "./components/empty.js";
import { ErrorNote } from "./components/error.js";
import { Shell } from "./components/shell.js";
import { SignIn } from "./components/sign_in.js";
import { canStream } from "./lib/api.js";
import { useChanges } from "./lib/changes.js";
import { apiBase } from "./lib/cli.js";
import { Connection, useConnection } from "./lib/connection.js";
import { go, link, useRoute } from "./lib/router.js";
import { Session, SessionContext } from "./lib/session.js";
import { chosenTheme, setTheme } from "./lib/theme.js";
import { TEXTS } from "./texts.js";
import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact.js";

/**
 * @typedef {object} Registered
 * @property {string} id  In the address, and of TEXTS.
 * @property {string} icon  A name of components/icon.js.
 * @property {string[]} roles  That see it.
 * @property {() => Promise<{Page: any}>} load
 */

const CHECKED_MS = 5000; // so often, while the page is seen
const MANAGING = ["admin", "tenant-admin"];
/** @type {Registered[]} */
const PAGES = [
  { id: "live", icon: "live", roles: MANAGING, load: () => import("./pages/live/page.js") },
  { id: "adapters", icon: "adapters", roles: MANAGING, load: () => import("./pages/adapters/page.js") },
  { id: "playground", icon: "playground", roles: [...MANAGING, "inference", "anonymous"], load: () => import("./pages/playground/page.js") },
  { id: "tenants", icon: "tenants", roles: MANAGING, load: () => import("./pages/tenants/page.js") },
  { id: "engine", icon: "engine", roles: ["admin"], load: () => import("./pages/engine/page.js") },
];

/** @param {{session: Session, connection: Connection}} props */
function App({ session, connection }) {
  useChanges(session);
  useConnection(connection);
  useChecks(session);
  const route = useRoute();
  useEffect(() => {
    if (session.isStarted) performance.mark("interactive");
  }, [session.isStarted]);
  if (!session.isStarted) return connection.state === "lost" ? html`<${ErrorNote} error=${TEXTS.common.lost} />` : html`<${Loading} />`;
  const allowed = PAGES.filter((page) => page.roles.includes(session.role));
  const titles = allowed.map(({ id, icon }) => ({ id, icon, title: titleOf(id) }));
  return html`<${SessionContext.Provider} value=${session}>
    <${Shell} pages=${titles} selected=${route.page} connection=${connection}>
      ${canStream() ? null : html`<p class="notice" role="alert">${TEXTS.common.oldBrowser}</p>`}
      <${Content} ...${{ route, allowed, session }} />
    <//>
  <//>`;
}

/** A revoked key and a lost server are noticed on a page that asks for nothing, too. @param {Session} session */
function useChecks(session) {
  useEffect(() => {
    const check = () => {
      if (!document.hidden && session.isStarted) session.check();
    };
    const timer = setInterval(check, CHECKED_MS);
    document.addEventListener("visibilitychange", check);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", check);
    };
  }, [session]);
}

/** The other pages' files come when nothing else is to do, so that a click needs no server. @param {Registered[]} allowed */
function usePrefetch(allowed) {
  useEffect(() => {
    const timer = setTimeout(() => allowed.forEach((page) => page.load().catch(() => {})), 500);
    return () => clearTimeout(timer);
  }, [allowed.length]);
}

/** @param {string} id */
function titleOf(id) {
  return /** @type {any} */ (TEXTS)[id].title;
}

/** @param {{route: import("./lib/router.js").Route, allowed: Registered[], session: Session}} props */
function Content({ route, allowed, session }) {
  const first = allowed[0];
  const page = allowed.find((one) => one.id === route.page);
  const isKnown = PAGES.some((one) => one.id === route.page);
  usePrefetch(allowed);
  const home = first && (route.page === "" || (route.page === "sign-in" && session.hasKey)) ? first.id : "";
  useEffect(() => {
    if (home) go(link(home), { isReplaced: true });
  }, [home]);
  useEffect(() => {
    document.title = page ? `${titleOf(page.id)} · ${TEXTS.common.product}` : TEXTS.common.product;
  }, [page]);
  if (page) return html`<${Loaded} key=${`${page.id} ${session.caller?.key_id ?? ""}`} page=${page} route=${route} />`;
  if (home) return html`<${Loading} />`;
  if (session.role === "metrics") return html`<${Empty} title=${TEXTS.signIn.title} text=${TEXTS.signIn.metrics} />`;
  if (session.hasKey || (!isKnown && route.page !== "sign-in" && route.page !== "")) return html`<${Empty} title=${TEXTS.common.noSuchPage} />`;
  return html`<${SignIn} />`;
}

/** A page of its own files, which are fetched when it is first seen. @param {{page: Registered, route: any}} props */
function Loaded({ page, route }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [failure, setFailure] = useState(/** @type {any} */ (null));
  const [broken, reset] = useErrorBoundary((error) => console.error(error));
  useEffect(() => {
    if (broken) reset(); // another address is another chance
  }, [route]);
  useEffect(() => {
    page.load().then((module) => setFound(() => module.Page), setFailure);
  }, [page]);
  if (broken) return html`<${ErrorNote} title=${TEXTS.common.pageFailed} error=${broken} onRetry=${reset} />`;
  if (failure) return html`<${ErrorNote} error=${TEXTS.common.notReached} onRetry=${() => location.reload()} />`;
  return found ? html`<${found} route=${route} />` : html`<${Loading} />`;
}

async function start() {
  setTheme(chosenTheme());
  const base = apiBase();
  const connection = new Connection(base);
  const session = new Session(base, (isReached) => connection.note(isReached));
  const root = document.getElementById("app");
  if (root) render(html`<${App} session=${session} connection=${connection} />`, root);
  for (;;) {
    try {
      return await session.start();
    } catch {
      await new Promise((wake) => setTimeout(wake, 1000)); // the server is not there yet
    }
  }
}

start();
