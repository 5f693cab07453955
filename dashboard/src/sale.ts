// One activity: its state, its stock, its charts, its offers, and what needs somebody.

import { durationMs } from "@bufbuild/protobuf/wkt";
import { badge, times } from "./activities.js";
import { admin, patience } from "./api.js";
import { Chart } from "./chart.js";
import { DeadLetters, Reconciliation } from "./checks.js";
import { confirm, type Question } from "./dialogs.js";
import { make, say, show } from "./dom.js";
import { count, rate, share, span } from "./format.js";
import type { GetPipelineStatusResponse } from "./gen/seckill/v1/admin_pb.js";
import { type Activity, ActivityState } from "./gen/seckill/v1/types_pb.js";
import { type Offers, OfferTable, pace } from "./offers.js";
import type { Outcomes } from "./outcomes.js";
import { Series } from "./series.js";

/** How often the table is put in order again. */
const ORDER_EVERY_MS = 2_000;

export class Sale {
  readonly element = make("div.sale");
  private readonly title = make("h2");
  private readonly badge = make("span.badge");
  private readonly id = make("code");
  private readonly when = make("span");
  private readonly buttons = make("div.buttons");
  private readonly advice = make("p.advice", { hidden: true });
  private readonly remaining = make("b.big", { id: "remaining" }, "–");
  private readonly of = make("span");
  private readonly bar = make("i");
  private readonly figures = new Map<string, HTMLElement>();
  private readonly stock: Chart;
  private readonly outcomesChart: Chart;
  private readonly pipelineChart: Chart;
  private readonly depth = ["Not yet durable", "To become orders", "To be given back"].map(() => new Series());
  private readonly table: OfferTable;
  private readonly dead = new DeadLetters();
  private readonly books: Reconciliation;
  private readonly body: HTMLElement;
  private readonly empty = make("section.card.empty", { hidden: true });
  private offers: Offers | undefined;
  private activity: Activity | undefined;
  private chosen: string | undefined;
  private ordered = 0;

  constructor(
    private readonly outcomes: Outcomes,
    private readonly changed: () => void,
  ) {
    const unknown = { name: "All offers", style: "first", series: new Series() };
    this.stock = new Chart("Remaining", "units", [unknown], count, true);
    this.outcomesChart = new Chart("Outcomes", "per second, all of this server", outcomes.curves, rate);
    this.pipelineChart = new Chart(
      "Pipeline",
      "reservations",
      [
        { name: "Not yet durable", style: "third", series: this.depth[0] as Series },
        { name: "To become orders", style: "first", series: this.depth[1] as Series },
        { name: "To be given back", style: "fourth", series: this.depth[2] as Series },
      ],
      count,
    );
    this.stock.note("Choose an offer in the table to see it alone.");
    this.books = new Reconciliation(outcomes);
    this.table = new OfferTable((sku) => this.choose(sku));
    const facts = make("dl.facts");
    for (const name of ["Taken per second", "Reserved units", "Ordered units", "Orders", "Dead letters"]) {
      const figure = make("dd", {}, "–");
      this.figures.set(name, figure);
      facts.append(make("div", {}, make("dt", {}, name), figure));
    }
    const hero = make(
      "section.card.hero",
      { "aria-label": "Stock" },
      make("div", {}, make("p.label", {}, "Remaining"), this.remaining, this.of),
      make("span.bar", { "aria-hidden": "true" }, this.bar),
      facts,
    );
    this.body = make(
      "div.body",
      { hidden: true },
      make(
        "header.sale-head",
        {},
        make("div", {}, make("div.name", {}, this.title, this.badge), make("p", {}, this.id, " · ", this.when)),
        this.buttons,
      ),
      this.advice,
      hero,
      make("div.charts", {}, this.stock.element, this.outcomesChart.element, this.pipelineChart.element),
      this.table.element,
      make("div.checks", {}, this.dead.element, this.books.element),
    );
    this.element.append(this.empty, this.body);
  }

  /** Shows another activity. */
  open(id: string, activity: Activity | undefined, offers: Offers): void {
    [this.offers, this.activity] = [offers, undefined];
    show(this.empty, false);
    show(this.body, true);
    say(this.title, activity?.title || id);
    say(this.id, id);
    this.buttons.replaceChildren();
    this.depth.forEach((series) => {
      series.times.length = 0;
      series.values.length = 0;
    });
    this.dead.open(id);
    this.books.open(id);
    this.table.replace(offers);
    this.choose(undefined);
    if (activity) this.describe(activity);
  }

  /** Whoever looks is another one now. */
  forget(): void {
    this.dead.forget();
    this.books.forget();
    if (this.offers) {
      show(this.empty, false);
      show(this.body, true);
    }
  }

  describe(activity: Activity): void {
    const before = this.activity;
    this.activity = activity;
    say(this.title, activity.title || activity.activityId);
    badge(this.badge, activity);
    say(this.when, times(activity));
    if (before?.state !== activity.state) this.buttons.replaceChildren(...this.actions(activity));
    this.advise(activity);
  }

  listOffers(): void {
    this.table.list();
    this.table.update();
  }

  pipeline(status: GetPipelineStatusResponse, now: number): void {
    const { unacked, outboxPending, outboxReleasing, outboxDead } = status;
    [unacked, outboxPending, outboxReleasing].forEach((figure, nth) => {
      if (figure !== undefined) this.depth[nth]?.add(now, Number(figure));
    });
    const known = (figure: bigint | undefined): string => (figure === undefined ? "–" : count(figure));
    this.figure("Orders", known(status.orders));
    this.figure("Dead letters", known(outboxDead), (outboxDead ?? 0n) > 0n);
    const age = status.oldestPendingAge;
    const waits = age && outboxPending ? `; the oldest has waited ${span(durationMs(age) / 1000)}` : "";
    this.pipelineChart.note(`Rows with work to do now: ${known(status.outboxDue)}${waits}.`);
    this.dead.count(outboxDead === undefined ? undefined : Number(outboxDead));
    if (this.activity) this.advise(this.activity);
  }

  draw(now: number): void {
    const offers = this.offers;
    if (this.body.hidden || !offers) return;
    const known = offers.isKnown;
    say(this.remaining, known ? count(offers.remaining) : "–");
    say(this.of, ` of ${count(offers.total)} units${known ? `, ${share(offers.remaining, offers.total)}` : ""}`);
    const part = known && offers.total > 0 ? offers.remaining / offers.total : 0;
    const scale = `scaleX(${part.toFixed(3)})`;
    if (this.bar.style.transform !== scale) this.bar.style.transform = scale;
    this.figure("Reserved units", known ? count(offers.reserved) : "–");
    this.figure("Ordered units", count(offers.sold));
    this.figure("Taken per second", known ? pace(offers.taken.perSecond(now)) : "–");
    if (known) {
      const title = this.activity?.activityId ?? "";
      const text = `${count(offers.remaining)} left · ${title} · Seckill`;
      if (document.title !== text) document.title = text;
    }
    const drawn = this.chosen === undefined ? undefined : offers.all.get(this.chosen);
    const perSecond = (drawn ?? offers).taken.perSecond(now);
    this.stock.add(perSecond === undefined ? "" : `${rate(perSecond)} taken per second`);
    this.stock.update(now);
    this.outcomesChart.update(now);
    this.pipelineChart.update(now);
    const totals = this.outcomes.curves.map(({ name }, nth) => `${name} ${count(this.outcomes.totals[nth] ?? 0)}`);
    if (this.outcomes.totals.length > 0) this.outcomesChart.note(`Since its start: ${totals.join(" · ")}`);
    if (now - this.ordered >= ORDER_EVERY_MS) {
      this.ordered = now;
      this.table.list();
    }
    this.table.update(now);
    this.books.draw();
  }

  /** There is no activity at all. */
  nothing(): void {
    this.explain(
      "There is no activity yet",
      "Describe one in a file, as in examples/sale.yaml; then create, approve and warm it up:",
      "seckill activity create -f sale.yaml\nseckill activity approve ACTIVITY\nseckill warmup ACTIVITY",
    );
  }

  /** There is no activity of this name. */
  unknown(id: string): void {
    this.explain(
      `There is no activity ${id}`,
      "Choose one of the list, or see all of them with:",
      "seckill activity list",
    );
  }

  /** The server wants to know who looks. */
  stranger(ask: () => void): void {
    this.explain(
      "This server asks who you are",
      "Sign in with a token of the role viewer, or ops to pause, resume and end. An operator makes one with:",
      "seckill token new NAME --role viewer",
      make("button.main", { type: "button", click: ask }, "Sign in"),
    );
  }

  private explain(title: string, text: string, command: string, ...more: Node[]): void {
    if (!this.empty.hidden && this.empty.querySelector("h2")?.textContent === title) return;
    this.empty.replaceChildren(
      make("h2", {}, title),
      make("p", {}, text),
      make("pre", {}, make("code", {}, command)),
      ...more,
    );
    show(this.body, false);
    show(this.empty, true);
  }

  private choose(sku: string | undefined): void {
    const offers = this.offers;
    if (!offers) return;
    const offer = sku === undefined ? undefined : offers.all.get(sku);
    this.chosen = offer?.sku;
    this.stock.add("");
    this.stock.show(offer ? offer.sku : "All offers", offer?.series ?? offers.series);
  }

  private figure(name: string, text: string, bad = false): void {
    const element = this.figures.get(name);
    if (!element) return;
    say(element, text);
    element.classList.toggle("bad", bad);
  }

  /** What to do next, where the sale waits for somebody. */
  private advise(activity: Activity): void {
    const id = activity.activityId;
    const isCold = activity.offers.some(({ warmTime }) => warmTime === undefined);
    const advice: [string, string] | undefined =
      activity.state === ActivityState.PENDING_REVIEW
        ? ["It waits for its approval:", `seckill activity approve ${id}`]
        : activity.state === ActivityState.SCHEDULED && isCold
          ? ["It does not start before it is warmed up:", `seckill warmup ${id}`]
          : activity.state === ActivityState.ENDED
            ? ["Once the books agree, close them:", `seckill activity settle ${id}`]
            : undefined;
    const text = advice?.join(" ") ?? "";
    if (this.advice.textContent !== text) {
      this.advice.replaceChildren(...(advice ? [`${advice[0]} `, make("code", {}, advice[1])] : []));
    }
    show(this.advice, advice !== undefined);
  }

  private actions(activity: Activity): HTMLButtonElement[] {
    const id = activity.activityId;
    const request = (reason: string) => ({ activityId: id, reason });
    const pause: Question = {
      title: `Pause ${id}?`,
      text: `“${activity.title}” sells nothing until it is resumed. Releases and confirmations go on.`,
      act: `Pause ${id}`,
      grave: false,
      done: `${id} is paused.`,
      run: (reason) => admin.pauseActivity(request(reason), patience),
    };
    const resume: Question = {
      title: `Resume ${id}?`,
      text: `“${activity.title}” sells again at once.`,
      act: `Resume ${id}`,
      grave: false,
      done: `${id} is resumed.`,
      run: (reason) => admin.resumeActivity(request(reason), patience),
    };
    const end: Question = {
      title: `End ${id}?`,
      text: `“${activity.title}” sells nothing any more, and can't be opened again.`,
      act: `End ${id}`,
      grave: true,
      done: `${id} is ended.`,
      run: (reason) => admin.endActivity(request(reason), patience),
    };
    const button = (word: string, style: string, question: Question): HTMLButtonElement => {
      const run = async (reason: string): Promise<void> => {
        await question.run(reason);
        this.changed();
      };
      const ask = (): void => confirm({ ...question, run });
      return make("button", { type: "button", class: style, click: ask }, word);
    };
    switch (activity.state) {
      case ActivityState.ACTIVE:
        return [button("Pause", "", pause), button("End", "grave", end)];
      case ActivityState.PAUSED:
        return [button("Resume", "main", resume), button("End", "grave", end)];
      case ActivityState.SCHEDULED:
        return [button("End", "grave", end)];
      case ActivityState.UNSPECIFIED:
      case ActivityState.PENDING_REVIEW:
      case ActivityState.ENDED:
      case ActivityState.SETTLED:
        return [];
    }
  }
}
