// What was seen of figures over the last minutes.

/** How far back a chart shows at most. */
export const WINDOW_MS = 5 * 60_000;
/** Two values that are nearer than this become one. */
const STEP_MS = 250;

export class Series {
  readonly times: number[] = [];
  readonly values: number[] = [];

  get last(): number | undefined {
    return this.values.at(-1);
  }

  add(time: number, value: number): void {
    const before = this.times.at(-2);
    if (before !== undefined && time - before < STEP_MS) {
      this.times[this.times.length - 1] = time;
      this.values[this.values.length - 1] = value;
      return;
    }
    this.times.push(time);
    this.values.push(value);
    // One from before the window stays: a line begins there.
    let old = 0;
    while ((this.times[old + 1] ?? time) < time - WINDOW_MS) old += 1;
    if (old > 64) {
      this.times.splice(0, old);
      this.values.splice(0, old);
    }
  }

  /** The value at this time, if one was known. */
  at(time: number): number | undefined {
    let [low, high] = [0, this.times.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.times[middle] as number) <= time) low = middle + 1;
      else high = middle;
    }
    return this.values[low - 1];
  }
}
