// Figures, times and words as people read them.

import { ActivityState } from "./gen/seckill/v1/types_pb.js";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const time = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  year: "numeric",
  hour: "2-digit",
  minute: "2-digit",
});

export const count = (value: number | bigint): string => whole.format(value);

/** A figure on an axis. */
export const tick = (value: number): string =>
  value >= 10_000 ? short.format(value) : whole.format(value);

export const rate = (value: number): string => (value > 0 && value < 10 ? value.toFixed(1) : count(value));

export const clock = (at: number): string => time.format(at);
/** Two times; the day once, if it is the same. */
export const between = (from: number, to: number): string => day.formatRange(from, to);

export const plural = (n: number, one: string, many = `${one}s`): string =>
  `${count(n)} ${n === 1 ? one : many}`;

/** What is left of a total, rounded so that 0 % means nothing and 100 % means all. */
export function share(part: number, total: number): string {
  if (total <= 0) return "–";
  const percent = (100 * part) / total;
  if (part > 0 && percent < 1) return "< 1 %";
  return `${Math.floor(percent)} %`;
}

/** A span of time, in the unit that fits. */
export function span(seconds: number): string {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

interface Stage {
  word: string;
  style: string;
}

const STAGES: Record<ActivityState, Stage> = {
  [ActivityState.UNSPECIFIED]: { word: "Unknown", style: "still" },
  [ActivityState.PENDING_REVIEW]: { word: "Pending review", style: "wait" },
  [ActivityState.SCHEDULED]: { word: "Scheduled", style: "wait" },
  [ActivityState.ACTIVE]: { word: "Active", style: "good" },
  [ActivityState.PAUSED]: { word: "Paused", style: "warn" },
  [ActivityState.ENDED]: { word: "Ended", style: "still" },
  [ActivityState.SETTLED]: { word: "Settled", style: "still" },
};

export const stage = (state: ActivityState): Stage => STAGES[state];

/** A word of the contract, as in `COUNTER_DRIFT`, in plain letters. */
export const plain = (word: string): string => word.toLowerCase().replaceAll("_", " ");
