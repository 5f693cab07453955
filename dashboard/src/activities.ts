// The activities to choose from, and what the server runs on.

import { timestampMs } from "@bufbuild/protobuf/wkt";
import { make, mark, say, show } from "./dom.js";
import { between, plural, stage } from "./format.js";
import type { GetPipelineStatusResponse } from "./gen/seckill/v1/admin_pb.js";
import type { Activity } from "./gen/seckill/v1/types_pb.js";
import type { Outcomes } from "./outcomes.js";

const NARROW = "(max-width: 60rem)";

interface Entry {
  item: HTMLLIElement;
  button: HTMLButtonElement;
  title: HTMLElement;
  id: HTMLElement;
  badge: HTMLElement;
}

/** The word of a state, in its colour. */
export function badge(element: HTMLElement, activity: Activity): void {
  const { word, style } = stage(activity.state);
  say(element, word);
  mark(element, "class", `badge ${style}`);
}

/** When an activity begins and ends. */
export function times(activity: Activity): string {
  const [start, end] = [activity.startTime, activity.endTime];
  if (!start || !end) return "";
  return between(timestampMs(start), timestampMs(end));
}

export class ActivityList {
  readonly element: HTMLElement;
  private readonly entries: Entry[] = [];
  private readonly items = make("ul.activities");
  private readonly summary = make("summary", {}, "Activities");
  private readonly rest: HTMLButtonElement;
  private readonly engine = make("dd", {}, "–");
  private readonly database = make("dd", {}, "–");
  private readonly frozen = make("dd", {}, "–");
  private readonly version = make("dd", {}, "–");
  private readonly fold: HTMLDetailsElement;
  private ids: string[] = [];

  constructor(
    private readonly choose: (id: string) => void,
    more: () => void,
  ) {
    this.rest = make("button.quiet", { type: "button", hidden: true, click: more }, "Show more");
    const narrow = matchMedia(NARROW);
    this.fold = make("details", { open: !narrow.matches }, this.summary, this.items, this.rest);
    narrow.addEventListener("change", () => (this.fold.open = !narrow.matches));
    this.element = make(
      "div",
      {},
      this.fold,
      make(
        "section.server",
        { "aria-label": "Server" },
        make("h2", {}, "This server"),
        make(
          "dl",
          {},
          make("dt", {}, "Engine"),
          this.engine,
          make("dt", {}, "Database"),
          this.database,
          make("dt", {}, "Frozen offers"),
          this.frozen,
          make("dt", {}, "Version"),
          this.version,
          make("dt", {}, "Address"),
          make("dd", {}, location.host),
        ),
      ),
    );
  }

  update(activities: Activity[], chosen: string | undefined, more?: boolean): void {
    this.ids = activities.map(({ activityId }) => activityId);
    while (this.entries.length < activities.length) this.entries.push(this.entry());
    this.entries.forEach((entry, nth) => {
      const activity = activities[nth];
      show(entry.item, activity !== undefined);
      if (!activity) return;
      say(entry.title, activity.title || activity.activityId);
      say(entry.id, activity.activityId);
      badge(entry.badge, activity);
      if (activity.activityId === chosen) mark(entry.button, "aria-current", "true");
      else entry.button.removeAttribute("aria-current");
    });
    say(this.summary, activities.length ? plural(activities.length, "activity", "activities") : "Activities");
    if (more !== undefined) show(this.rest, more);
  }

  stores(status: GetPipelineStatusResponse, outcomes: Outcomes): void {
    const store = (element: HTMLElement, kind: string, healthy: boolean): void => {
      say(element, `${kind}, ${healthy ? "answers" : "does not answer"}`);
      element.classList.toggle("bad", !healthy);
    };
    store(this.engine, status.engineKind, status.engineHealthy);
    store(this.database, status.databaseKind, status.databaseHealthy);
    say(this.frozen, `${outcomes.frozen}`);
    this.frozen.classList.toggle("bad", outcomes.frozen > 0);
    say(this.version, outcomes.version || "–");
  }

  private entry(): Entry {
    const [title, id, mark] = [make("b"), make("code"), make("span.badge")];
    const nth = this.entries.length;
    const button = make("button", { type: "button" }, title, mark, id);
    button.addEventListener("click", () => {
      const chosen = this.ids[nth];
      if (chosen === undefined) return;
      if (matchMedia(NARROW).matches) this.fold.open = false;
      this.choose(chosen);
    });
    const item = make("li", {}, button);
    this.items.append(item);
    return { item, button, title, id, badge: mark };
  }
}
