/** Components that show something which changes by itself. */

import { useLayoutEffect, useState } from "../vendor/preact.js";

/**
 * Renders the component anew at every change of `source`. It listens as soon as the component stands in the page: an
 * effect would come a frame later, or much later in a tab that is not drawn, and a change before it would never show.
 * @param {{listen(listener: () => void): () => void}} source
 */
export function useChanges(source) {
  const [, setCount] = useState(0);
  useLayoutEffect(() => source.listen(() => setCount((count) => count + 1)), [source]);
}
