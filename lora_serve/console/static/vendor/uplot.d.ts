// The part of uPlot that the page uses.

export default class uPlot {
  constructor(options: any, data: (number | null)[][], parent: HTMLElement);
  static paths: { bars(options?: any): any; stepped(options?: any): any; spline(options?: any): any };
  setData(data: (number | null)[][], resetScales?: boolean): void;
  setSize(size: { width: number; height: number }): void;
  destroy(): void;
  cursor: { idx: number | null };
}
