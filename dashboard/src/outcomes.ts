// What buyers hear, per second: from the counters that Prometheus reads, of this server alone.

import { Series } from "./series.js";

const FAMILIES = [
  "seckill_reserve_outcomes_total",
  "seckill_reserve_errors_total",
  "seckill_build_info",
  "seckill_engine_frozen_offers",
  "seckill_reconcile_differences",
];
const QUERY = FAMILIES.map((name) => `name[]=${name}`).join("&");
const PATIENCE_MS = 5_000;

/** How the outcomes are drawn: in groups that an operator can tell apart. */
const GROUPS: [string, string, (outcome: string) => boolean][] = [
  ["Reserved", "first", (outcome) => outcome === "reserved"],
  ["Sold out", "second", (outcome) => outcome === "sold_out" || outcome === "insufficient"],
  ["Duplicate", "third", (outcome) => outcome === "duplicate" || outcome === "replayed"],
  ["Refused otherwise", "fourth", () => true],
];

interface Sample {
  name: string;
  labels: Record<string, string>;
  value: number;
}

export class Outcomes {
  readonly curves = [
    ...GROUPS.map(([name, style]) => ({ name, style, series: new Series() })),
    { name: "Not decided", style: "bad", series: new Series() },
  ];
  version = "";
  frozen = 0;
  differences = 0;
  /** Since the server started, in the order of the curves. */
  totals: number[] = [];
  private before: { at: number; totals: number[] } | undefined;

  /** Reads the counters once. */
  async look(): Promise<void> {
    const answer = await fetch(`/metrics?${QUERY}`, {
      cache: "no-store",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (!answer.ok) throw new Error(`the metrics answer ${answer.status}`);
    this.take(Date.now(), parse(await answer.text()));
  }

  private take(now: number, samples: Sample[]): void {
    const totals = this.curves.map(() => 0);
    [this.frozen, this.differences] = [0, 0];
    for (const { name, labels, value } of samples) {
      if (name === "seckill_reserve_outcomes_total") {
        const group = GROUPS.findIndex(([, , holds]) => holds(labels["outcome"] ?? ""));
        totals[group] = (totals[group] ?? 0) + value;
      } else if (name === "seckill_reserve_errors_total") {
        totals[GROUPS.length] = (totals[GROUPS.length] ?? 0) + value;
      } else if (name === "seckill_build_info") this.version = labels["version"] ?? "";
      else if (name === "seckill_engine_frozen_offers") this.frozen = value;
      else this.differences += value;
    }
    const before = this.before;
    [this.totals, this.before] = [totals, { at: now, totals }];
    if (!before || now <= before.at) return;
    const seconds = (now - before.at) / 1000;
    this.curves.forEach(({ series }, nth) => {
      const grown = (totals[nth] ?? 0) - (before.totals[nth] ?? 0);
      // A server that was started anew counts from 0.
      series.add(now, Math.max(grown, 0) / seconds);
    });
  }
}

const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function parse(text: string): Sample[] {
  const samples: Sample[] = [];
  for (const line of text.split("\n")) {
    const [, name, labels, value] = SAMPLE.exec(line) ?? [];
    if (!name || !value) continue;
    const pairs = [...(labels ?? "").matchAll(LABEL)].map(([, key, text]) => [key, text]);
    samples.push({ name, labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return samples;
}
