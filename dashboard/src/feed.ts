// WatchStock of one activity, called again for as long as somebody looks.

import { create } from "@bufbuild/protobuf";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import { seckill, isPassing, sentence } from "./api.js";
import { ActivityState } from "./gen/seckill/v1/types_pb.js";
import type { WatchStockResponse } from "./gen/seckill/v1/seckill_pb.js";

/** The server says something at least every 15 seconds. */
const SILENCE_MS = 20_000;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
/** How many messages are taken before the page may draw. */
const AT_ONCE = 50;
/** Few offers are told about at once, many once a second. */
const FEW_OFFERS = 100;

export type Line =
  | { kind: "calling" }
  | { kind: "live" }
  /** The next attempt is at this time. */
  | { kind: "lost"; why: string; at: number }
  | { kind: "refused"; error: unknown }
  | { kind: "settled" };

export interface Listener {
  stock(message: WatchStockResponse): void;
  line(line: Line): void;
}

export class Feed {
  private stopped = new AbortController();
  private wake: () => void = () => undefined;
  private waitMs = FIRST_WAIT_MS;

  constructor(
    readonly activityId: string,
    private readonly offers: number,
    private readonly listener: Listener,
  ) {
    void this.run();
  }

  stop(): void {
    this.stopped.abort();
    this.wake();
  }

  /** Does not wait any longer. */
  retry(): void {
    this.wake();
  }

  private async run(): Promise<void> {
    while (!this.stopped.signal.aborted) {
      this.tell({ kind: "calling" });
      try {
        await this.follow();
        // The stream ends well only when there will be nothing more.
        if (!this.stopped.signal.aborted) this.tell({ kind: "settled" });
        return;
      } catch (error) {
        if (this.stopped.signal.aborted) return;
        if (!isPassing(error)) {
          this.tell({ kind: "refused", error });
          return;
        }
        // Pages of a server that stopped must not come back all at once.
        const waitMs = this.waitMs * (0.5 + Math.random() / 2);
        this.waitMs = Math.min(2 * this.waitMs, LONGEST_WAIT_MS);
        this.tell({ kind: "lost", why: sentence(error), at: Date.now() + waitMs });
        await this.pause(waitMs);
      }
    }
  }

  private async follow(): Promise<void> {
    const call = new AbortController();
    const end = (): void => call.abort();
    this.stopped.signal.addEventListener("abort", end);
    let silence = setTimeout(end, SILENCE_MS);
    const minInterval = create(DurationSchema, {
      seconds: this.offers > FEW_OFFERS ? 1n : 0n,
      nanos: this.offers > FEW_OFFERS ? 0 : 200_000_000,
    });
    const request = { activityId: this.activityId, minInterval };
    try {
      let taken = 0;
      for await (const message of seckill.watchStock(request, { signal: call.signal })) {
        if (this.stopped.signal.aborted) return;
        clearTimeout(silence);
        silence = setTimeout(end, SILENCE_MS);
        this.waitMs = FIRST_WAIT_MS;
        this.tell({ kind: "live" });
        this.listener.stock(message);
        if (message.state === ActivityState.SETTLED) continue;
        taken += 1;
        if (taken % AT_ONCE === 0) await new Promise((resolve) => setTimeout(resolve));
      }
    } finally {
      clearTimeout(silence);
      this.stopped.signal.removeEventListener("abort", end);
    }
  }

  private tell(line: Line): void {
    if (!this.stopped.signal.aborted) this.listener.line(line);
  }

  private pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
