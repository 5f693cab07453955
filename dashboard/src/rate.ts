// How many units are taken in a second, from one figure of the stream to the next.

/** The mean of these. */
const OVER_MS = 5_000;
/** Nothing is said of less than this. */
const LEAST_MS = 1_000;

/**
 * At least so many: units that came back between two figures hide as many that were taken. Nothing is
 * said of a time that nobody has followed.
 */
export class Rate {
  private readonly times: number[] = [];
  private readonly units: number[] = [];
  private sum = 0;
  private since: number | undefined;

  /** It is followed from now on; what was before counts no more. */
  begin(now: number): void {
    this.forget();
    this.since = now;
  }

  /** It is not followed any more. */
  forget(): void {
    [this.times.length, this.units.length, this.sum] = [0, 0, 0];
    this.since = undefined;
  }

  add(now: number, units: number): void {
    if (units <= 0) return;
    this.times.push(now);
    this.units.push(units);
    this.sum += units;
    this.drop(now);
  }

  perSecond(now: number): number | undefined {
    if (this.since === undefined || now - this.since < LEAST_MS) return undefined;
    this.drop(now);
    return (1_000 * this.sum) / Math.min(now - this.since, OVER_MS);
  }

  private drop(now: number): void {
    let old = 0;
    while ((this.times[old] ?? now) <= now - OVER_MS) old += 1;
    if (old === 0) return;
    this.times.splice(0, old);
    for (const units of this.units.splice(0, old)) this.sum -= units;
  }
}
