// The part of Preact, its hooks and htm that the page uses. Templates of htm are not checked: their values are `any`.

export type VNode = object;
export interface Context<T> {
  Provider: (props: { value: T; children?: any }) => VNode;
}
export type Ref<T> = { current: T };
export type Cleanup = void | undefined | (() => void);

export function html(strings: TemplateStringsArray, ...values: any[]): any;
export function h(type: any, props: any, ...children: any[]): VNode;
export function render(node: any, parent: Element): void;
export function createContext<T>(value: T): Context<T>;
export function createPortal(node: any, parent: Element): VNode;
export const Fragment: any;

export function useState<T>(initial: T | (() => T)): [T, (next: T | ((known: T) => T)) => void];
export function useReducer<S, A>(reducer: (state: S, action: A) => S, initial: S): [S, (action: A) => void];
export function useEffect(effect: () => Cleanup, inputs?: readonly any[]): void;
export function useLayoutEffect(effect: () => Cleanup, inputs?: readonly any[]): void;
export function useRef<T>(initial: T): Ref<T>;
export function useMemo<T>(make: () => T, inputs: readonly any[]): T;
export function useCallback<F extends (...values: any[]) => any>(callback: F, inputs: readonly any[]): F;
export function useContext<T>(context: Context<T>): T;
export function useErrorBoundary(note?: (error: any) => void): [any, () => void];
export function useId(): string;
