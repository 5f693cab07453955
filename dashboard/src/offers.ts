// The offers of an activity: what is known of each, and a table in pages.

import { make, mark, say, show } from "./dom.js";
import { count, plural, rate, share } from "./format.js";
import type { OfferPipeline } from "./gen/seckill/v1/admin_pb.js";
import type { WatchStockResponse } from "./gen/seckill/v1/seckill_pb.js";
import type { Offer as OfferMessage } from "./gen/seckill/v1/types_pb.js";
import { Rate } from "./rate.js";
import { Series } from "./series.js";

/** What a page of the table shows. */
const PAGE = 50;

export interface Offer {
  sku: string;
  title: string;
  warm: boolean;
  total: number;
  /** Of the engine; unknown until the stream told it. */
  remaining: number | undefined;
  reserved: number | undefined;
  sold: number;
  pending: number;
  dead: number;
  frozen: boolean;
  series: Series;
  /** Which rebuild of its stock the figures belong to. */
  epoch: bigint;
  taken: Rate;
}

/** All offers of one activity, and their sums. */
export class Offers {
  readonly all = new Map<string, Offer>();
  readonly series = new Series();
  readonly taken = new Rate();
  remaining = 0;
  reserved = 0;
  total = 0;
  sold = 0;
  private known = 0;

  /** What the database has of them. */
  describe(offers: OfferMessage[]): void {
    for (const message of offers) {
      const offer = this.of(message.skuId);
      offer.title = message.title;
      offer.warm = message.warmTime !== undefined;
      offer.sold = Number(message.sold);
      if (offer.remaining === undefined) offer.total = Number(message.total);
    }
    this.add();
  }

  /** What the stream tells. */
  stock(message: WatchStockResponse, now: number): void {
    const offer = this.of(message.skuId);
    const [remaining, reserved] = [Number(message.remaining), Number(message.reserved)];
    this.take(offer, message, now);
    if (offer.remaining === undefined) this.known += 1;
    this.remaining += remaining - (offer.remaining ?? 0);
    this.reserved += reserved - (offer.reserved ?? 0);
    this.total += Number(message.total) - offer.total;
    offer.total = Number(message.total);
    [offer.remaining, offer.reserved] = [remaining, reserved];
    offer.series.add(now, remaining);
    if (this.isKnown) this.series.add(now, this.remaining);
  }

  /** Nothing is heard of the stock: nobody knows how fast it goes. */
  silence(): void {
    this.taken.forget();
    for (const offer of this.all.values()) offer.taken.forget();
  }

  /** What lies between reservations and orders. */
  pipeline(offers: OfferPipeline[]): void {
    for (const message of offers) {
      const offer = this.of(message.skuId);
      offer.sold = Number(message.sold);
      offer.pending = Number(message.pending);
      offer.dead = Number(message.dead);
      offer.frozen = message.frozen;
    }
    this.add();
  }

  /** Whether the stock of every offer was told. */
  get isKnown(): boolean {
    return this.known > 0 && this.known === this.all.size;
  }

  private of(sku: string): Offer {
    let offer = this.all.get(sku);
    if (!offer) {
      offer = {
        sku,
        title: "",
        warm: false,
        total: 0,
        remaining: undefined,
        reserved: undefined,
        sold: 0,
        pending: 0,
        dead: 0,
        frozen: false,
        series: new Series(),
        epoch: 0n,
        taken: new Rate(),
      };
      this.all.set(sku, offer);
    }
    return offer;
  }

  /** Counts what was taken since the figure before, which is before this one is written down. */
  private take(offer: Offer, message: WatchStockResponse, now: number): void {
    const grown = Number(message.reserved) - (offer.reserved ?? 0);
    if (message.snapshot) {
      // Of a stream: what was sold while nobody listened was not sold just now.
      offer.taken.begin(now);
      this.taken.begin(now);
    } else if (message.epoch !== offer.epoch) {
      // A rebuild counts anew.
      offer.taken.begin(now);
    } else {
      // More units of an offer, or fewer, are no sales, so it is not what remains that counts.
      offer.taken.add(now, grown);
      this.taken.add(now, grown);
    }
    offer.epoch = message.epoch;
  }

  private add(): void {
    [this.total, this.sold] = [0, 0];
    for (const offer of this.all.values()) {
      this.total += offer.total;
      this.sold += offer.sold;
    }
  }
}

type Order = "sku" | "least" | "most" | "fastest";

/** What was taken in a second, in words that fit a cell. */
export const pace = (perSecond: number | undefined): string =>
  perSecond === undefined ? "–" : rate(perSecond);

interface Row {
  row: HTMLTableRowElement;
  choose: HTMLButtonElement;
  title: HTMLElement;
  bar: HTMLElement;
  remaining: HTMLElement;
  share: HTMLElement;
  taken: HTMLElement;
  total: HTMLElement;
  reserved: HTMLElement;
  sold: HTMLElement;
  pending: HTMLElement;
  dead: HTMLElement;
  notes: HTMLElement;
  sku: string;
}

export class OfferTable {
  readonly element: HTMLElement;
  private readonly filter = make("input", {
    type: "search",
    placeholder: "SKU or title",
    "aria-label": "Show offers whose SKU or title has",
    autocomplete: "off",
    input: () => this.turn(0),
  });
  private readonly order = make(
    "select",
    { "aria-label": "Order of the offers", change: () => this.turn(0) },
    make("option", { value: "sku" }, "By SKU"),
    make("option", { value: "least" }, "Least left first"),
    make("option", { value: "most" }, "Most left first"),
    make("option", { value: "fastest" }, "Fastest first"),
  );
  private readonly body = make("tbody");
  private readonly place = make("span", { role: "status" });
  private readonly back = make("button.quiet", { type: "button", click: () => this.turn(this.page - 1) }, "Back");
  private readonly next = make("button.quiet", { type: "button", click: () => this.turn(this.page + 1) }, "Next");
  private readonly foot = make("div.foot", {}, this.place, this.back, this.next);
  private readonly rows: Row[] = [];
  private page = 0;
  private chosen: string | undefined;
  private offers = new Offers();
  /** In order; made anew when the order may have changed. */
  private listed: Offer[] = [];
  private now = Date.now();

  constructor(private readonly choose: (sku: string | undefined) => void) {
    const head = make("tr");
    const columns: [string, string, string?][] = [
      ["SKU", ""],
      ["Remaining", "number"],
      ["Left", "number"],
      ["Taken/s", "number", "Taken per second"],
      ["Total", "number wide"],
      ["Reserved", "number wide"],
      ["Ordered", "number"],
      ["Pending", "number wide"],
      ["Dead", "number wide"],
      ["Notes", "wide"],
    ];
    for (const [name, style, whole] of columns) {
      head.append(make("th", { scope: "col", class: style, "aria-label": whole ?? false }, name));
    }
    const table = make("table", { "aria-labelledby": "offers-title" }, make("thead", {}, head), this.body);
    this.element = make(
      "section.card.offers",
      {},
      make("div.head", {}, make("h3", { id: "offers-title" }, "Offers"), this.filter, this.order),
      make("div.scroll", { tabindex: "0", role: "region", "aria-label": "Table of offers" }, table),
      this.foot,
    );
  }

  /** The offers of another activity. */
  replace(offers: Offers): void {
    [this.offers, this.chosen] = [offers, undefined];
    this.filter.value = "";
    this.turn(0);
  }

  private turn(page: number): void {
    this.page = page;
    this.list();
    this.update();
  }

  /** Puts the offers in order; with `update` what is on the page changes, and nothing moves. */
  list(): void {
    const word = this.filter.value.trim().toLowerCase();
    const has = (text: string): boolean => text.toLowerCase().includes(word);
    this.listed = [...this.offers.all.values()].filter(
      (offer) => word === "" || has(offer.sku) || has(offer.title),
    );
    const order = this.order.value as Order;
    const left = (offer: Offer): number =>
      (offer.remaining ?? offer.total) / Math.max(offer.total, 1);
    const pace = (offer: Offer): number => offer.taken.perSecond(this.now) ?? -1;
    if (order === "sku") this.listed.sort((a, b) => (a.sku < b.sku ? -1 : 1));
    else if (order === "fastest") this.listed.sort((a, b) => pace(b) - pace(a));
    else this.listed.sort((a, b) => (left(a) - left(b)) * (order === "least" ? 1 : -1));
    this.page = Math.min(Math.max(this.page, 0), Math.max(Math.ceil(this.listed.length / PAGE) - 1, 0));
  }

  /** Shows what was known then. */
  update(now = this.now): void {
    this.now = now;
    const first = this.page * PAGE;
    const shown = this.listed.slice(first, first + PAGE);
    while (this.rows.length < shown.length) this.rows.push(this.row());
    this.rows.forEach((row, nth) => {
      const offer = shown[nth];
      show(row.row, offer !== undefined);
      if (offer) this.fill(row, offer);
    });
    const all = this.listed.length;
    const last = first + shown.length;
    say(
      this.place,
      all === 0 ? "No offer fits." : all <= PAGE ? plural(all, "offer") : `${first + 1} to ${last} of ${count(all)} offers`,
    );
    show(this.back, all > PAGE);
    show(this.next, all > PAGE);
    this.back.disabled = this.page === 0;
    this.next.disabled = last >= all;
  }

  private row(): Row {
    const cell = (style = ""): HTMLTableCellElement => make("td", style ? { class: style } : {});
    const choose = make("button.link", { type: "button" });
    const title = make("span.title");
    const bar = make("span.bar", { "aria-hidden": "true" }, make("i"));
    const row: Row = {
      row: make("tr"),
      choose,
      title,
      bar: bar.firstElementChild as HTMLElement,
      remaining: cell("number strong"),
      share: make("span"),
      taken: cell("number"),
      total: cell("number wide"),
      reserved: cell("number wide"),
      sold: cell("number"),
      pending: cell("number wide"),
      dead: cell("number wide"),
      notes: cell("wide"),
      sku: "",
    };
    choose.addEventListener("click", () => this.pick(row.sku));
    const left = make("td.number", {}, row.share, bar);
    row.row.append(
      make("th", { scope: "row" }, choose, title),
      row.remaining,
      left,
      row.taken,
      row.total,
      row.reserved,
      row.sold,
      row.pending,
      row.dead,
      row.notes,
    );
    this.body.append(row.row);
    return row;
  }

  private fill(row: Row, offer: Offer): void {
    row.sku = offer.sku;
    const known = (figure: number | undefined): string => (figure === undefined ? "–" : count(figure));
    say(row.choose, offer.sku);
    mark(row.choose, "aria-pressed", `${offer.sku === this.chosen}`);
    say(row.title, offer.title);
    say(row.remaining, known(offer.remaining));
    say(row.share, offer.remaining === undefined ? "–" : share(offer.remaining, offer.total));
    say(row.taken, pace(offer.taken.perSecond(this.now)));
    say(row.total, count(offer.total));
    say(row.reserved, known(offer.reserved));
    say(row.sold, count(offer.sold));
    say(row.pending, count(offer.pending));
    say(row.dead, count(offer.dead));
    const part = offer.total > 0 ? (offer.remaining ?? offer.total) / offer.total : 0;
    const scale = `scaleX(${part.toFixed(3)})`;
    if (row.bar.style.transform !== scale) row.bar.style.transform = scale;
    const notes = [
      offer.frozen ? "Frozen, being rebuilt" : "",
      offer.warm ? "" : "Not warmed up",
      offer.remaining === 0 ? "Sold out" : "",
    ].filter(Boolean);
    say(row.notes, notes.join(", "));
    row.row.classList.toggle("alarm", offer.frozen || offer.dead > 0);
    row.row.classList.toggle("chosen", offer.sku === this.chosen);
  }

  private pick(sku: string): void {
    this.chosen = this.chosen === sku ? undefined : sku;
    this.choose(this.chosen);
    this.update();
  }
}
