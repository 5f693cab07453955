// The page: which activity is looked at, what is known of it, and when to ask again.

import { admin, asksForToken, isOutdated, isUnknown, patience, sentence, token } from "./api.js";
import { ActivityList } from "./activities.js";
import { Banner } from "./banner.js";
import { announce } from "./dom.js";
import { Feed, type Line } from "./feed.js";
import { stage } from "./format.js";
import type { GetPipelineStatusResponse } from "./gen/seckill/v1/admin_pb.js";
import { type Activity, ActivityState } from "./gen/seckill/v1/types_pb.js";
import { Offers } from "./offers.js";
import { Outcomes } from "./outcomes.js";
import { Sale } from "./sale.js";

const ACTIVITIES_EVERY_MS = 5_000;
const PIPELINE_EVERY_MS = 2_000;
const OUTCOMES_EVERY_MS = 1_000;
const DRAW_EVERY_MS = 250;
/** How long a page that nobody sees goes on listening: a browser opens six connections to a server,
 * for all its tabs. */
const UNSEEN_MS = 10_000;
const PAGE_SIZE = 100;

class Dashboard {
  private readonly outcomes = new Outcomes();
  private readonly banner = new Banner(
    () => this.feed?.retry() ?? void this.listActivities(),
    (value) => this.identify(value),
  );
  private readonly list = new ActivityList(
    (id) => this.open(id),
    () => this.more(),
  );
  private readonly sale = new Sale(this.outcomes, () => void this.refresh());
  private offers = new Offers();
  private feed: Feed | undefined;
  private id: string | undefined;
  private activity: Activity | undefined;
  private activities: Activity[] = [];
  private pages = 1;
  private seen = true;

  start(): void {
    (document.getElementById("top") as Element).append(this.banner.element);
    (document.getElementById("activities") as Element).append(this.list.element);
    (document.getElementById("main") as Element).append(this.sale.element);
    this.id = new URLSearchParams(location.hash.slice(1)).get("activity") ?? undefined;
    if (this.id !== undefined) this.open(this.id);
    this.repeat(ACTIVITIES_EVERY_MS, () => this.listActivities());
    this.repeat(PIPELINE_EVERY_MS, () => this.readPipeline());
    this.repeat(OUTCOMES_EVERY_MS, () => this.readOutcomes());
    setInterval(() => this.draw(), DRAW_EVERY_MS);
    addEventListener("hashchange", () => {
      const id = new URLSearchParams(location.hash.slice(1)).get("activity");
      if (id && id !== this.id) this.open(id);
    });
    let unseen: ReturnType<typeof setTimeout> | undefined;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(unseen);
      if (document.hidden) unseen = setTimeout(() => this.leave(), UNSEEN_MS);
      else if (!this.seen) this.comeBack();
    });
  }

  /** Calls again and again, the less often the longer it takes. */
  private repeat(everyMs: number, act: () => Promise<void>): void {
    const once = async (): Promise<void> => {
      const begun = performance.now();
      if (this.seen) await act();
      setTimeout(() => void once(), Math.max(everyMs, 4 * (performance.now() - begun)));
    };
    void once();
  }

  private leave(): void {
    this.seen = false;
    this.feed?.stop();
  }

  private comeBack(): void {
    this.seen = true;
    void this.refresh();
    this.listen();
  }

  private identify(value: string): void {
    token.set(value);
    announce(value ? "Signed in." : "The token is forgotten.");
    this.banner.forget();
    this.sale.forget();
    void this.refresh();
    this.listen();
  }

  private async refresh(): Promise<void> {
    await Promise.all([this.listActivities(), this.describe(), this.readPipeline()]);
  }

  private async more(): Promise<void> {
    this.pages += 1;
    await this.listActivities();
  }

  private async listActivities(): Promise<void> {
    try {
      const activities: Activity[] = [];
      let pageToken = "";
      for (let page = 0; page < this.pages; page += 1) {
        const answer = await admin.listActivities({ pageSize: PAGE_SIZE, pageToken }, patience);
        activities.push(...answer.activities);
        pageToken = answer.nextPageToken;
        if (!pageToken) break;
      }
      this.activities = activities;
      this.banner.answered();
      this.list.update(activities, this.id, pageToken !== "");
      if (this.id === undefined) {
        const first = activities.find(({ state }) => state === ActivityState.ACTIVE) ?? activities[0];
        if (first) this.open(first.activityId);
        else this.sale.nothing();
      }
    } catch (error) {
      this.failed(error);
    }
  }

  private open(id: string): void {
    const known = this.activities.find(({ activityId }) => activityId === id);
    [this.id, this.activity, this.offers] = [id, known, new Offers()];
    history.replaceState(null, "", `#${new URLSearchParams({ activity: id })}`);
    this.list.update(this.activities, id);
    this.sale.open(id, known, this.offers);
    void this.describe().then(() => this.listen());
    void this.readPipeline();
  }

  private listen(): void {
    this.feed?.stop();
    this.feed = undefined;
    const id = this.id;
    if (id === undefined || !this.seen) return;
    const offers = this.offers;
    offers.silence();
    this.feed = new Feed(id, offers.all.size, {
      line: (line) => this.heard(line),
      stock: (message) => {
        offers.stock(message, Date.now());
        if (this.activity && this.activity.state !== message.state) {
          this.activity = { ...this.activity, state: message.state };
          announce(`${id} is ${stage(message.state).word.toLowerCase()}.`);
          this.sale.describe(this.activity);
          void this.refresh();
        }
      },
    });
  }

  private heard(line: Line): void {
    if (line.kind === "lost" || line.kind === "refused") this.offers.silence();
    if (line.kind === "refused" && asksForToken(line.error)) this.failed(line.error);
    else this.banner.line(line);
  }

  /** What the database has of the activity: titles, times, what was ordered. */
  private async describe(): Promise<void> {
    const id = this.id;
    if (id === undefined) return;
    const offers = this.offers;
    try {
      const { activity } = await admin.getActivity({ activityId: id }, patience);
      if (!activity || this.id !== id) return;
      const before = this.activity;
      this.activity = activity;
      offers.describe(activity.offers);
      this.sale.describe(activity);
      this.sale.listOffers();
      if (before && before.state !== activity.state) {
        announce(`${id} is ${stage(activity.state).word.toLowerCase()}.`);
      }
    } catch (error) {
      if (this.id !== id) return;
      if (isUnknown(error)) this.sale.unknown(id);
      this.failed(error);
    }
  }

  private async readPipeline(): Promise<void> {
    const id = this.id;
    try {
      const request = id === undefined ? {} : { activityId: id };
      const status: GetPipelineStatusResponse = await admin.getPipelineStatus(request, patience);
      if (this.id !== id) return;
      this.offers.pipeline(status.offers);
      this.list.stores(status, this.outcomes);
      this.sale.pipeline(status, Date.now());
    } catch (error) {
      // The line of the stream tells of a server that is away, and this one of who may not look.
      if (asksForToken(error)) this.failed(error);
    }
  }

  private async readOutcomes(): Promise<void> {
    try {
      await this.outcomes.look();
    } catch {
      // The same server: its line tells.
    }
  }

  private failed(error: unknown): void {
    if (isOutdated(error)) return;
    if (asksForToken(error)) this.sale.stranger(() => this.banner.ask());
    this.banner.failed(sentence(error));
  }

  private draw(): void {
    if (document.hidden) return;
    this.banner.tick();
    // Nobody knows what happens meanwhile, so no curve goes on.
    this.sale.draw(this.banner.knownUntil);
  }
}

new Dashboard().start();
