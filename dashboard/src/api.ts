// The calls of the page: gRPC-Web to the port that the page came from.

import { Code, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { SeckillAdmin } from "./gen/seckill/v1/admin_pb.js";
import { Seckill } from "./gen/seckill/v1/seckill_pb.js";

const KEY = "seckill-token";
/** How long an answer may take. */
const PATIENCE_MS = 10_000;

/** Ends what was asked by whoever looks now, when somebody else does. */
let looker = new AbortController();

/** The token that somebody typed in: kept for this tab alone, until it is closed. */
export const token = {
  get: (): string => sessionStorage.getItem(KEY) ?? "",
  /** Whatever was asked before is answered to nobody. */
  set: (value: string): void => {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    const before = looker;
    looker = new AbortController();
    before.abort();
  },
};

/** In the place of every answer, and of every failure, that comes after its token was forgotten or
 * replaced: nobody is told of it. */
const OUTDATED = new Error("the token was forgotten");
const outdated = (): ConnectError =>
  new ConnectError(OUTDATED.message, Code.Canceled, undefined, undefined, OUTDATED);

export const isOutdated = (error: unknown): boolean => ConnectError.from(error).cause === OUTDATED;

/** Every call of the page goes through here, with the token of this moment, or with none. */
const withToken: Interceptor = (next) => async (request) => {
  const { signal } = looker;
  const value = token.get();
  if (value) request.header.set("authorization", `Bearer ${value}`);
  try {
    // The server, too, need not go on.
    const answer = await next({ ...request, signal: AbortSignal.any([request.signal, signal]) });
    if (signal.aborted) throw outdated();
    return answer.stream ? { ...answer, message: until(signal, answer.message) } : answer;
  } catch (error) {
    throw signal.aborted ? outdated() : error;
  }
};

/** These messages, for as long as their token is the one. */
async function* until<T>(signal: AbortSignal, messages: AsyncIterable<T>): AsyncGenerator<T> {
  try {
    for await (const message of messages) {
      if (signal.aborted) throw outdated();
      yield message;
    }
  } catch (error) {
    throw signal.aborted ? outdated() : error;
  }
}

const transport = createGrpcWebTransport({
  baseUrl: location.origin,
  interceptors: [withToken],
  // A redirect or a cached answer would be somebody else's.
  fetch: (input, init) => fetch(input, { ...init, redirect: "error", cache: "no-store" }),
});

export const seckill = createClient(Seckill, transport);
export const admin = createClient(SeckillAdmin, transport);
export const patience = { timeoutMs: PATIENCE_MS };

/** Whether repeating a call can help: nobody decided it. */
export function isPassing(error: unknown): boolean {
  const passing = [
    Code.Unavailable,
    Code.Unknown,
    Code.DeadlineExceeded,
    Code.Canceled,
    Code.ResourceExhausted,
    Code.Internal,
    Code.Aborted,
  ];
  return passing.includes(ConnectError.from(error).code);
}

export const isUnknown = (error: unknown): boolean =>
  ConnectError.from(error).code === Code.NotFound;

export const asksForToken = (error: unknown): boolean =>
  ConnectError.from(error).code === Code.Unauthenticated;

/** What a failed call says, as a sentence for people. */
export function sentence(error: unknown): string {
  if (isOutdated(error)) return "The token was forgotten before the server had answered.";
  const { code, rawMessage } = ConnectError.from(error);
  const text = rawMessage.replace(/\.$/, "");
  switch (code) {
    case Code.Unauthenticated:
      return token.get()
        ? `The server does not know this token (${text}).`
        : "The server asks who you are: sign in with a token.";
    case Code.PermissionDenied:
      return `The server refused: ${text}.`;
    case Code.Unknown:
    case Code.Canceled:
      return "The server does not answer.";
    case Code.DeadlineExceeded:
      return `The server did not answer within ${PATIENCE_MS / 1000} s.`;
    case Code.Unavailable:
      return `The server can't serve this now: ${text}.`;
    default:
      return `The server refused: ${text}.`;
  }
}
