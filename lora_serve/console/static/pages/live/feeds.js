/** @file The feed of this tab: it outlives the page, so that nothing is lost when another page is looked at. */

import { useSession } from "../../lib/session.js";
import { useEffect, useState } from "../../vendor/preact.js";
import { Feed } from "./feed.js";

/** @typedef {import("../../lib/session.js").Session} Session */

const feeds = /** @type {WeakMap<Session, {key: string, feed: Feed}>} */ (new WeakMap());

/** The session's feed, read while a component uses it, which is drawn again at each change. */
export function useFeed() {
  const session = useSession();
  const key = session.caller?.key_id ?? "";
  const feed = feedOf(session, key);
  const [, setCount] = useState(0);
  useEffect(() => {
    const stop = feed.open(() => setCount((count) => count + 1));
    return () => {
      stop();
      if (!session.hasKey) feeds.delete(session); // whoever signs in next sees nothing of it
    };
  }, [feed]);
  return feed;
}

/** @param {Session} session @param {string} key */
function feedOf(session, key) {
  const known = feeds.get(session);
  if (known?.key === key) return known.feed;
  const feed = new Feed(session.api);
  feeds.set(session, { key, feed });
  return feed;
}
