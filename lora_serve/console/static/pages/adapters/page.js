import { html, useLayoutEffect, useState } from "../../vendor/preact.js";
import { AdapterDetail } from "./detail.js";
import { chosenOf } from "./dropped.js";
import { AdapterList } from "./list.js";
import { RegisterDialog } from "./register.js";

/**
 * The page "Adapters": the list or, with an id in the address, one adapter. What is dropped anywhere on it is registered.
 * @param {{route: import("../../lib/router.js").Route}} props
 */
export function Page({ route }) {
  const [isRegistering, setRegistering] = useState(false);
  const [dropped, setDropped] = useState(/** @type {import("./register.js").Dropped|null} */ (null));
  const register = () => setRegistering(true);
  useDrops((found) => {
    setDropped(found);
    setRegistering(true);
  });
  const close = () => {
    setRegistering(false);
    setDropped(null);
  };
  return html`${route.argument
      ? html`<${AdapterDetail} key=${route.argument} id=${route.argument} onRegister=${register} />`
      : html`<${AdapterList} query=${route.query} onRegister=${register} />`}
    ${isRegistering ? html`<${RegisterDialog} id=${route.argument} dropped=${dropped} onClose=${close} />` : null}`;
}

/** From the page's first picture on: left alone, a browser would leave it for what is dropped. @param {(found: import("./register.js").Dropped) => void} onDrop */
function useDrops(onDrop) {
  useLayoutEffect(() => {
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    const over = (/** @type {DragEvent} */ event) => hasFiles(event) && event.preventDefault(); // text goes into its field
    const drop = async (/** @type {DragEvent} */ event) => {
      if (!event.dataTransfer || !hasFiles(event)) return;
      event.preventDefault();
      try {
        onDrop({ chosen: await chosenOf(event.dataTransfer), error: "" });
      } catch (error) {
        onDrop({ chosen: null, error: error instanceof Error ? error.message : String(error) });
      }
    };
    document.addEventListener("dragover", over);
    document.addEventListener("drop", drop);
    return () => {
      document.removeEventListener("dragover", over);
      document.removeEventListener("drop", drop);
    };
  }, []);
}
