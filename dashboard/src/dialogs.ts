// What is asked before something is done: a token, and whether an activity is really meant.

import { sentence } from "./api.js";
import { announce, make, say, show } from "./dom.js";

let last = 0;

function dialog(title: string, ...content: Node[]): HTMLDialogElement {
  const id = `dialog-${(last += 1)}`;
  const element = make(
    "dialog",
    { "aria-labelledby": id, close: () => element.remove() },
    make("h2", { id }, title),
    ...content,
  );
  document.body.append(element);
  return element;
}

export interface Question {
  /** As in `Pause double-11?`. */
  title: string;
  text: string;
  /** The word on the button. */
  act: string;
  grave: boolean;
  done: string;
  run: (reason: string) => Promise<unknown>;
}

/** Asks, acts, and tells what became of it. What fails stays open and says why. */
export function confirm(question: Question): void {
  const reason = make("input", { type: "text", maxlength: "200", autocomplete: "off", name: "reason" });
  const problem = make("p.problem", { role: "alert", hidden: true });
  const no = make("button", { type: "button", click: () => box.close() }, "Cancel");
  const yes = make("button", { type: "submit", class: question.grave ? "grave" : "main" }, question.act);
  const form = make(
    "form",
    {
      submit: (event) => {
        event.preventDefault();
        void act();
      },
    },
    make("p", {}, question.text),
    make("label", {}, "Reason, for the audit", reason),
    problem,
    make("div.buttons", {}, no, yes),
  );
  const act = async (): Promise<void> => {
    yes.disabled = true;
    try {
      await question.run(reason.value.trim());
      box.close();
      announce(question.done);
    } catch (error) {
      say(problem, sentence(error));
      show(problem, true);
    }
    yes.disabled = false;
  };
  const box = dialog(question.title, form);
  box.showModal();
  // Nothing is done by an Enter too many.
  no.focus();
}

/** Asks for a token. */
export function signIn(use: (token: string) => void): void {
  const input = make("input", {
    type: "password",
    required: true,
    maxlength: "512",
    autocomplete: "off",
    spellcheck: "false",
    name: "token",
  });
  const form = make(
    "form",
    {
      submit: (event) => {
        event.preventDefault();
        box.close();
        use(input.value.trim());
      },
    },
    make(
      "p",
      {},
      "The token of a viewer shows everything here; one of ops also pauses, resumes and ends. It is kept in this tab alone, until the tab is closed.",
    ),
    make("label", {}, "Token", input),
    make(
      "div.buttons",
      {},
      make("button", { type: "button", click: () => box.close() }, "Cancel"),
      make("button.main", { type: "submit" }, "Sign in"),
    ),
  );
  const box = dialog("Sign in", form);
  box.showModal();
  input.focus();
}
