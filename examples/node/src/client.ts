/** Buys a unit of a flash sale, or watches the stock. See README.md. */

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

import * as grpc from "@grpc/grpc-js";

import { RetryInfo } from "../gen/google/rpc/error_details.js";
import { Status as RpcStatus } from "../gen/google/rpc/status.js";
import {
  ConfirmOutcome,
  ConfirmRequest,
  GetReservationRequest,
  GetReservationResponse,
  ReleaseOutcome,
  ReleaseRequest,
  ReserveOutcome,
  ReserveRequest,
  ReserveResponse,
  SeckillClient,
  WatchStockRequest,
  WatchStockResponse,
  confirmOutcomeToJSON,
  releaseOutcomeToJSON,
  reserveOutcomeToJSON,
} from "../gen/seckill/v1/seckill.js";
import { Reservation, ReservationState } from "../gen/seckill/v1/types.js";

const SERVICE_CONFIG = new URL(
  "../../../../proto/seckill/v1/seckill_grpc_service_config.json", // from dist/src
  import.meta.url,
);

const ATTEMPT_MS = 2_000; // how long one call may take, the library's repeats included
/** How long all calls for one answer may take. */
const GIVE_UP_MS = Number(process.env.SECKILL_GIVE_UP_S ?? 30) * 1_000;
const LATE_MS = 8_000; // after so long, an attempt that nobody has seen wins no more
const FIRST_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2_000;
const SILENCE_MS = 20_000; // a stream says something every 15 seconds

const OK = 0;
const NO = 1;
const UNAVAILABLE = 69;

/** After these the outcome is unknown. */
const UNCLEAR = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED];
/** After these nothing was decided, if the server says when a repeat can help. */
const REFUSED = [grpc.status.RESOURCE_EXHAUSTED, grpc.status.ABORTED];

/** Outcomes of Reserve that come before those of the request. */
const STATE_OF_THE_SALE = [
  ReserveOutcome.RESERVE_OUTCOME_NOT_STARTED,
  ReserveOutcome.RESERVE_OUTCOME_PAUSED,
  ReserveOutcome.RESERVE_OUTCOME_ENDED,
];
const HOLDS_NOTHING = [
  ReservationState.RESERVATION_STATE_RELEASED,
  ReservationState.RESERVATION_STATE_REFUSED,
];
const GIVEN_BACK = [
  ReleaseOutcome.RELEASE_OUTCOME_RELEASED,
  ReleaseOutcome.RELEASE_OUTCOME_ALREADY_RELEASED,
];

/** A client whose library repeats calls by the service config. */
function connect(address: string): SeckillClient {
  const ca = process.env.SECKILL_CA_FILE;
  const credentials = ca
    ? grpc.credentials.createSsl(readFileSync(ca))
    : grpc.credentials.createInsecure();
  return new SeckillClient(address, credentials, {
    "grpc.service_config": readFileSync(fileURLToPath(SERVICE_CONFIG), "utf8"),
    "grpc.max_reconnect_backoff_ms": 2_000,
    "grpc.keepalive_time_ms": 30_000,
  });
}

function metadata(): grpc.Metadata {
  const metadata = new grpc.Metadata();
  const token = process.env.SECKILL_TOKEN;
  if (token) metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}

/** The wait that the server asks for, if it names one. */
function retryAfterMs(error: grpc.ServiceError): number | undefined {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!(packed instanceof Buffer)) return undefined;
  const detail = RpcStatus.decode(packed).details.find((any) =>
    any.typeUrl.endsWith("/google.rpc.RetryInfo"),
  );
  const delay = detail && RetryInfo.decode(detail.value).retryDelay;
  return delay && Number(delay.seconds) * 1_000 + delay.nanos / 1e6;
}

/** Waits between attempts: as long as the server says, or longer each time; then gives up. */
class Waits {
  /** An attempt went unanswered. */
  unclear = false;
  private readonly giveUpAt: number;
  private backoffMs = FIRST_BACKOFF_MS;

  constructor(limitMs = GIVE_UP_MS) {
    this.giveUpAt = Date.now() + limitMs;
  }

  /** False when there is no time left. */
  async wait(namedMs?: number): Promise<boolean> {
    const waitMs = namedMs ?? this.backoffMs * (0.5 + Math.random() / 2);
    this.backoffMs = Math.min(this.backoffMs * 2, MAX_BACKOFF_MS);
    if (Date.now() + waitMs > this.giveUpAt) return false;
    await sleep(waitMs);
    return true;
  }
}

type Method<Request, Response> = (
  request: Request,
  metadata: grpc.Metadata,
  options: Partial<grpc.CallOptions>,
  callback: (error: grpc.ServiceError | null, response: Response) => void,
) => grpc.ClientUnaryCall;

/** Calls until there is an answer. The request stays the same, so a repeat takes nothing twice. */
async function ask<Request, Response>(
  client: SeckillClient,
  method: Method<Request, Response>,
  request: Request,
  waits = new Waits(),
): Promise<Response> {
  for (;;) {
    try {
      return await new Promise<Response>((resolve, reject) => {
        const deadline = Date.now() + ATTEMPT_MS;
        method.call(client, request, metadata(), { deadline }, (error, response) =>
          error ? reject(error) : resolve(response),
        );
      });
    } catch (thrown) {
      const error = thrown as grpc.ServiceError;
      const namedMs = retryAfterMs(error);
      // A message that is too large is RESOURCE_EXHAUSTED too, and has no RetryInfo.
      const unclear = UNCLEAR.includes(error.code);
      waits.unclear ||= unclear;
      const repeatable = unclear || (REFUSED.includes(error.code) && namedMs !== undefined);
      if (!repeatable || !(await waits.wait(namedMs))) throw error;
    }
  }
}

interface Wanted {
  activityId: string;
  skuId: string;
  userId: string;
  requestId: string;
}

async function buy(client: SeckillClient, wanted: Wanted, paymentFails: boolean): Promise<number> {
  const request = ReserveRequest.fromPartial(wanted);
  const waits = new Waits();
  const reserve = client.reserve as Method<ReserveRequest, ReserveResponse>;
  const answer = await ask(client, reserve, request, waits);
  const outcome = reserveOutcomeToJSON(answer.outcome).replace("RESERVE_OUTCOME_", "");
  let reservation: Reservation | undefined;
  let again = answer.replayed;
  if (answer.outcome === ReserveOutcome.RESERVE_OUTCOME_RESERVED) {
    reservation = answer.reservation;
  } else if (STATE_OF_THE_SALE.includes(answer.outcome)) {
    reservation = await wonBefore(client, wanted, waits.unclear);
    again = true;
    if (reservation?.state === ReservationState.RESERVATION_STATE_HELD) {
      console.log(`reserve: ${outcome}, and an earlier attempt is not decided`);
      return UNAVAILABLE;
    }
  }
  if (!reservation) {
    console.log(`reserve: ${outcome}`);
    return NO;
  }
  console.log(`reserve: RESERVED${again ? " again" : ""}, order ${reservation.orderNo}`);

  const { activityId, skuId, userId } = wanted;
  const names = { activityId, skuId, userId, reservationId: reservation.reservationId };
  if (paymentFails) {
    console.log("payment: failed");
    return GIVEN_BACK.includes(await release(client, names, "payment failed")) ? OK : NO;
  }
  console.log("payment: paid");
  const confirmed = await confirm(client, ConfirmRequest.fromPartial(names));
  console.log(`confirm: ${confirmOutcomeToJSON(confirmed).replace("CONFIRM_OUTCOME_", "")}`);
  if (confirmed === ConfirmOutcome.CONFIRM_OUTCOME_CONFIRMED) return OK;
  if (confirmed === ConfirmOutcome.CONFIRM_OUTCOME_NOT_ORDERED_YET) {
    // It still holds its units: whoever refunds first gives away what was paid.
    const released = await release(client, names, "not ordered in time");
    // Meanwhile, so the buyer has what was paid.
    if (released === ReleaseOutcome.RELEASE_OUTCOME_CONFIRMED) return OK;
    if (!GIVEN_BACK.includes(released)) {
      console.log("payment: kept; somebody must look");
      return NO;
    }
  }
  console.log("payment: refunded");
  return NO;
}

/**
 * What an attempt of this request won before; it is HELD while that is open.
 *
 * Reserve tells the state of the sale first. The attempt may be one of the library, or of a process
 * before this one, so this asks in any case.
 */
async function wonBefore(
  client: SeckillClient,
  key: Wanted,
  unclear: boolean,
): Promise<Reservation | undefined> {
  type Get = Method<GetReservationRequest, GetReservationResponse>;
  const request = GetReservationRequest.fromPartial({ key });
  const waits = new Waits();
  const late = new Waits(LATE_MS);
  for (;;) {
    try {
      const { reservation } = await ask(client, client.getReservation as Get, request);
      if (!reservation || HOLDS_NOTHING.includes(reservation.state)) return undefined;
      const held = reservation.state === ReservationState.RESERVATION_STATE_HELD;
      if (!held || !(await waits.wait())) return reservation;
    } catch (thrown) {
      if ((thrown as grpc.ServiceError).code !== grpc.status.NOT_FOUND) throw thrown;
      // What was not answered may still arrive.
      if (!unclear || !(await late.wait())) return undefined;
    }
  }
}

async function release(
  client: SeckillClient,
  names: Partial<ReleaseRequest>,
  reason: string,
): Promise<ReleaseOutcome> {
  type Release = Method<ReleaseRequest, { outcome: ReleaseOutcome }>;
  const request = ReleaseRequest.fromPartial({ ...names, reason });
  const { outcome } = await ask(client, client.release as Release, request);
  console.log(`release: ${releaseOutcomeToJSON(outcome).replace("RELEASE_OUTCOME_", "")}`);
  return outcome;
}

/** The order is made a moment after the reservation. */
async function confirm(client: SeckillClient, request: ConfirmRequest): Promise<ConfirmOutcome> {
  type Answer = { outcome: ConfirmOutcome };
  const waits = new Waits();
  for (;;) {
    const { outcome } = await ask(client, client.confirm as Method<ConfirmRequest, Answer>, request);
    const early = outcome === ConfirmOutcome.CONFIRM_OUTCOME_NOT_ORDERED_YET;
    if (!early || !(await waits.wait())) return outcome;
  }
}

/** Reads streams, one after the other, until the activity is settled. */
async function watch(client: SeckillClient, activityId: string): Promise<number> {
  const request = WatchStockRequest.fromPartial({ activityId });
  let waits = new Waits();
  for (;;) {
    try {
      await readStream(client.watchStock(request, metadata()), () => (waits = new Waits()));
      return OK; // it ends by itself only when the activity is settled
    } catch (thrown) {
      const error = thrown as grpc.ServiceError;
      // CANCELLED is ours: nothing came for too long.
      const passing = [...UNCLEAR, ...REFUSED, grpc.status.UNKNOWN, grpc.status.CANCELLED];
      if (!passing.includes(error.code)) throw error;
      console.error(`the stream ended (${grpc.status[error.code]}); calling again`);
      if (!(await waits.wait(retryAfterMs(error)))) return UNAVAILABLE;
    }
  }
}

/** Prints the messages of a stream; one that says nothing for too long is cancelled. */
async function readStream(
  stream: grpc.ClientReadableStream<WatchStockResponse>,
  alive: () => void,
): Promise<void> {
  let timer = setTimeout(() => stream.cancel(), SILENCE_MS);
  try {
    for await (const update of stream as AsyncIterable<WatchStockResponse>) {
      alive();
      clearTimeout(timer);
      timer = setTimeout(() => stream.cancel(), SILENCE_MS);
      const { skuId, remaining, reserved, heartbeat } = update;
      if (!heartbeat) console.log(`${skuId} remaining=${remaining} reserved=${reserved}`);
    }
  } finally {
    clearTimeout(timer);
  }
}

const USAGE = `usage: client buy ADDRESS ACTIVITY SKU USER [--payment-fails] [--request-id ID]
       client watch ADDRESS ACTIVITY`;

async function main(): Promise<number> {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: { "payment-fails": { type: "boolean" }, "request-id": { type: "string" } },
  });
  const [command, address, activityId, skuId, userId] = positionals;
  if (!address || !activityId || !["buy", "watch"].includes(command ?? "")) {
    console.error(USAGE);
    return 64;
  }
  const client = connect(address);
  try {
    if (command === "watch") return await watch(client, activityId);
    if (!skuId || !userId) {
      console.error(USAGE);
      return 64;
    }
    const requestId = values["request-id"] ?? randomUUID();
    const wanted = { activityId, skuId, userId, requestId };
    return await buy(client, wanted, values["payment-fails"] ?? false);
  } catch (thrown) {
    const error = thrown as grpc.ServiceError;
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    return [...UNCLEAR, ...REFUSED].includes(error.code) ? UNAVAILABLE : NO;
  } finally {
    client.close();
  }
}

process.exitCode = await main();
