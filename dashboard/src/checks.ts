// What an operator looks at after trouble: dead letters, and whether the books agree.

import { timestampMs } from "@bufbuild/protobuf/wkt";
import { admin, patience, sentence } from "./api.js";
import { announce, make, say, show } from "./dom.js";
import { clock, count, plain, plural } from "./format.js";
import { DifferenceKind, type ReconcileReport } from "./gen/seckill/v1/admin_pb.js";
import type { Outcomes } from "./outcomes.js";

/** How many are listed; the command lists all. */
const LISTED = 20;
/** A comparison reads every reservation. */
const COMPARISON = { timeoutMs: 60_000 };

/** Who looks, or at which activity, may have changed when an answer comes: only the last question that
 * was not dropped is answered here. */
class Asked {
  private last = 0;

  /** Asks; tells whether the answer to it is still wanted. */
  begin(): () => boolean {
    const question = (this.last += 1);
    return () => question === this.last;
  }

  drop(): void {
    this.last += 1;
  }
}

export class DeadLetters {
  readonly element: HTMLElement;
  private readonly text = make("p");
  private readonly items = make("ul.list");
  private readonly button: HTMLButtonElement;
  private readonly asked = new Asked();
  private id = "";

  constructor() {
    this.button = make("button", { type: "button", hidden: true, click: () => void this.list() }, "Show them");
    this.element = make(
      "section.card",
      { "aria-labelledby": "dead-title" },
      make("h3", { id: "dead-title" }, "Dead letters"),
      this.text,
      this.items,
      this.button,
    );
  }

  open(id: string): void {
    this.id = id;
    say(this.text, "–");
    this.forget();
  }

  forget(): void {
    this.asked.drop();
    this.button.disabled = false;
    this.items.replaceChildren();
  }

  count(dead: number | undefined): void {
    if (dead === undefined) return;
    const some = `${plural(dead, "reservation")} could not become an order and ${dead === 1 ? "waits" : "wait"} for you.`;
    say(this.text, dead === 0 ? "None: every reservation became an order, or is on its way." : some);
    show(this.button, dead > 0);
    if (dead === 0) this.forget();
  }

  private async list(): Promise<void> {
    const isWanted = this.asked.begin();
    this.button.disabled = true;
    try {
      const request = { activityId: this.id, pageSize: LISTED };
      const { deadLetters, nextPageToken } = await admin.listDeadLetters(request, patience);
      if (!isWanted()) return;
      const items = deadLetters.map(({ reservation, attempts, lastError }) =>
        make(
          "li",
          {},
          make("code", {}, reservation?.reservationId ?? ""),
          ` of ${reservation?.skuId ?? ""}, ${plural(attempts, "attempt")}: ${lastError}`,
        ),
      );
      if (nextPageToken) items.push(make("li", {}, "More are in ", make("code", {}, `seckill dead-letters list ${this.id}`)));
      items.push(
        make("li", {}, "When the cause is mended: ", make("code", {}, "seckill dead-letters retry RESERVATION")),
      );
      this.items.replaceChildren(...items);
    } catch (error) {
      if (!isWanted()) return;
      this.items.replaceChildren(make("li.problem", { role: "alert" }, sentence(error)));
    }
    this.button.disabled = false;
  }
}

export class Reconciliation {
  readonly element: HTMLElement;
  private readonly text = make("p");
  private readonly items = make("ul.list");
  private readonly button: HTMLButtonElement;
  private readonly asked = new Asked();
  private id = "";
  private told = false;

  constructor(private readonly outcomes: Outcomes) {
    this.button = make("button", { type: "button", click: () => void this.compare() }, "Compare now");
    this.element = make(
      "section.card",
      { "aria-labelledby": "books-title" },
      make("h3", { id: "books-title" }, "Reconciliation"),
      this.text,
      this.items,
      this.button,
    );
  }

  open(id: string): void {
    this.id = id;
    this.forget();
  }

  forget(): void {
    this.asked.drop();
    this.button.disabled = false;
    this.told = false;
    this.items.replaceChildren();
    this.draw();
  }

  /** Until somebody asks here: what the last comparison of each activity listed. */
  draw(): void {
    if (this.told) return;
    const { differences } = this.outcomes;
    say(
      this.text,
      differences > 0
        ? `The last comparisons on this server listed ${plural(differences, "contradiction")}, of all activities together.`
        : "Engine, outbox and orders were not compared from this page yet.",
    );
  }

  private async compare(): Promise<void> {
    const isWanted = this.asked.begin();
    this.button.disabled = true;
    this.told = true;
    this.items.replaceChildren();
    say(this.text, "Comparing …");
    try {
      const { report } = await admin.reconcile({ activityId: this.id, repair: false }, COMPARISON);
      if (!isWanted()) return;
      if (report) this.tell(report);
    } catch (error) {
      if (!isWanted()) return;
      say(this.text, "");
      this.items.replaceChildren(make("li.problem", { role: "alert" }, sentence(error)));
    }
    this.button.disabled = false;
  }

  private tell(report: ReconcileReport): void {
    const at = report.observeTime ? ` at ${clock(timestampMs(report.observeTime))}` : "";
    const found = Number(report.differenceCount);
    const [offers, flying] = [plural(report.offersChecked, "offer"), report.unacked + report.pending + report.releasing];
    const summary =
      found === 0
        ? `Engine, outbox and orders of ${offers} agree${at}: nothing oversold, nothing lost.`
        : `${plural(found, "contradiction")} in ${offers}${at}.`;
    const way = flying > 0n ? ` ${count(flying)} on the way.` : "";
    say(this.text, summary + way);
    announce(summary);
    const items = report.differences.slice(0, LISTED).map((difference) =>
      make(
        "li.problem",
        {},
        make("b", {}, difference.skuId),
        ` ${plain(DifferenceKind[difference.kind] ?? "")}, ${count(difference.actual)} where ${count(difference.expected)} should be. ${difference.detail}`,
      ),
    );
    if (found > 0) items.push(make("li", {}, "All of it: ", make("code", {}, `seckill reconcile ${this.id}`)));
    this.items.replaceChildren(...items);
  }
}
