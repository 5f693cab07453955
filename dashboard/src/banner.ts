// The top of the page: whether the figures are live, and who looks.

import { sentence, token } from "./api.js";
import { signIn } from "./dialogs.js";
import { announce, make, mark, say, show } from "./dom.js";
import type { Line } from "./feed.js";

export class Banner {
  readonly element: HTMLElement;
  private readonly dot = make("i.dot", { "aria-hidden": "true" });
  private readonly text = make("span", {}, "Connecting");
  private readonly again: HTMLButtonElement;
  private readonly who: HTMLButtonElement;
  private nextAt: number | undefined;
  private lostAt: number | undefined;
  private why = "";
  private state = "wait";

  constructor(
    retry: () => void,
    private readonly identify: (token: string) => void,
  ) {
    this.again = make("button.quiet", { type: "button", hidden: true, click: retry }, "Try now");
    this.who = make("button", { type: "button", click: () => this.press() });
    const logo = make("img", { src: "/icon.svg", alt: "", width: "24", height: "24" });
    this.element = make(
      "div.banner",
      {},
      make("h1", {}, logo, "Seckill"),
      make("div.line", {}, this.dot, this.text, this.again),
      this.who,
    );
    this.forget();
  }

  /** Until when the figures are known. */
  get knownUntil(): number {
    return this.state === "lost" && this.lostAt !== undefined ? this.lostAt : Date.now();
  }

  /** Opens the question for a token. */
  ask(): void {
    signIn(this.identify);
  }

  /** Who looks may have changed. */
  forget(): void {
    say(this.who, token.get() ? "Forget token" : "Sign in");
    this.set("wait", "Connecting");
  }

  line(line: Line): void {
    switch (line.kind) {
      case "calling":
        if (this.state !== "lost") this.set("wait", "Connecting");
        break;
      case "live":
        if (this.state === "lost") announce("Connected again.");
        this.set("live", "Live");
        break;
      case "settled":
        this.set("live", "Settled: nothing more will change");
        break;
      case "lost":
        if (this.state !== "lost") {
          this.lostAt = Date.now();
          announce(`The connection is lost. ${line.why}`);
        }
        [this.why, this.nextAt] = [line.why, line.at];
        this.set("lost", "");
        this.tick();
        break;
      case "refused":
        // It stays until something else is asked for, whatever else is answered.
        this.failed(sentence(line.error));
        this.set("refused", "");
        break;
    }
  }

  /** A call was answered: so the server is there. */
  answered(): void {
    if (this.state === "wait" || this.state === "failed") this.set("live", "Connected");
  }

  failed(why: string): void {
    if (this.state === "lost") return;
    if (this.text.textContent !== why) announce(why);
    this.set("failed", why);
  }

  /** Counts down. */
  tick(): void {
    if (this.state !== "lost" || this.nextAt === undefined) return;
    const seconds = Math.ceil((this.nextAt - Date.now()) / 1000);
    say(this.text, `${this.why} ${seconds > 0 ? `Trying again in ${seconds} s.` : "Trying again."}`);
  }

  private set(state: string, text: string): void {
    this.state = state;
    mark(this.dot, "data-state", state);
    if (text) say(this.text, text);
    show(this.again, state === "lost");
  }

  private press(): void {
    if (token.get()) this.identify("");
    else this.ask();
  }
}
