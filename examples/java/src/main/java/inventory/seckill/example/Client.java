package inventory.seckill.example;

import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.RetryInfo;
import inventory.seckill.v1.ConfirmOutcome;
import inventory.seckill.v1.ConfirmRequest;
import inventory.seckill.v1.GetReservationRequest;
import inventory.seckill.v1.ReleaseOutcome;
import inventory.seckill.v1.ReleaseRequest;
import inventory.seckill.v1.Reservation;
import inventory.seckill.v1.ReservationKey;
import inventory.seckill.v1.ReservationState;
import inventory.seckill.v1.ReserveOutcome;
import inventory.seckill.v1.ReserveRequest;
import inventory.seckill.v1.ReserveResponse;
import inventory.seckill.v1.SeckillGrpc;
import inventory.seckill.v1.WatchStockRequest;
import inventory.seckill.v1.WatchStockResponse;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.EnumSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/** Buys a unit of a flash sale, or watches the stock. See README.md. */
public final class Client {
  private static final Path SERVICE_CONFIG =
      Path.of("../../proto/seckill/v1/seckill_grpc_service_config.json");

  /** How long one call may take, the library's repeats included. */
  private static final Duration ATTEMPT = Duration.ofSeconds(2);

  /** How long all calls for one answer may take. */
  private static final Duration GIVE_UP =
      Duration.ofSeconds(Long.parseLong(System.getenv().getOrDefault("SECKILL_GIVE_UP_S", "30")));

  /** After so long, an attempt that nobody has seen wins no more. */
  private static final Duration LATE = Duration.ofSeconds(8);

  private static final Duration FIRST_BACKOFF = Duration.ofMillis(100);
  private static final Duration MAX_BACKOFF = Duration.ofSeconds(2);

  /** A stream says something every 15 seconds. */
  private static final Duration SILENCE = Duration.ofSeconds(20);

  private static final int OK = 0;
  private static final int NO = 1;
  private static final int USAGE = 64;
  private static final int UNAVAILABLE = 69;

  /** After these the outcome is unknown. */
  private static final Set<Status.Code> UNCLEAR =
      EnumSet.of(Status.Code.UNAVAILABLE, Status.Code.DEADLINE_EXCEEDED);

  /** After these nothing was decided, if the server says when a repeat can help. */
  private static final Set<Status.Code> REFUSED =
      EnumSet.of(Status.Code.RESOURCE_EXHAUSTED, Status.Code.ABORTED);

  /** Outcomes of Reserve that come before those of the request. */
  private static final Set<ReserveOutcome> STATE_OF_THE_SALE =
      EnumSet.of(
          ReserveOutcome.RESERVE_OUTCOME_NOT_STARTED,
          ReserveOutcome.RESERVE_OUTCOME_PAUSED,
          ReserveOutcome.RESERVE_OUTCOME_ENDED);

  private static final Set<ReservationState> HOLDS_NOTHING =
      EnumSet.of(
          ReservationState.RESERVATION_STATE_RELEASED, ReservationState.RESERVATION_STATE_REFUSED);

  private static final Set<ReleaseOutcome> GIVEN_BACK =
      EnumSet.of(
          ReleaseOutcome.RELEASE_OUTCOME_RELEASED, ReleaseOutcome.RELEASE_OUTCOME_ALREADY_RELEASED);

  private final SeckillGrpc.SeckillBlockingStub stub;

  private Client(ManagedChannel channel) {
    Metadata headers = new Metadata();
    String token = System.getenv("SECKILL_TOKEN");
    if (token != null) {
      headers.put(
          Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
    }
    stub =
        SeckillGrpc.newBlockingStub(channel)
            .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  /** A channel whose library repeats calls by the service config. */
  private static ManagedChannel connect(String address) throws IOException {
    @SuppressWarnings("unchecked")
    Map<String, ?> config = new Gson().fromJson(Files.readString(SERVICE_CONFIG), Map.class);
    String ca = System.getenv("SECKILL_CA_FILE");
    ChannelCredentials credentials =
        ca == null
            ? InsecureChannelCredentials.create()
            : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
    return Grpc.newChannelBuilder(address, credentials)
        .defaultServiceConfig(config)
        .enableRetry()
        .keepAliveTime(30, TimeUnit.SECONDS)
        .build();
  }

  /** The wait that the server asks for, if it names one. */
  private static Optional<Duration> retryAfter(StatusRuntimeException error) {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status == null) {
      return Optional.empty();
    }
    for (Any detail : status.getDetailsList()) {
      if (detail.is(RetryInfo.class)) {
        try {
          var delay = detail.unpack(RetryInfo.class).getRetryDelay();
          return Optional.of(Duration.ofSeconds(delay.getSeconds(), delay.getNanos()));
        } catch (InvalidProtocolBufferException broken) {
          return Optional.empty();
        }
      }
    }
    return Optional.empty();
  }

  /** Waits between attempts: as long as the server says, or longer each time; then gives up. */
  private static final class Waits {
    /** An attempt went unanswered. */
    boolean unclear = false;

    private final Instant giveUpAt;
    private Duration backoff = FIRST_BACKOFF;

    Waits(Duration limit) {
      giveUpAt = Instant.now().plus(limit);
    }

    /** False when there is no time left. */
    boolean await(Optional<Duration> named) throws InterruptedException {
      double share = ThreadLocalRandom.current().nextDouble(0.5, 1);
      Duration wait = named.orElse(Duration.ofMillis((long) (backoff.toMillis() * share)));
      backoff = backoff.multipliedBy(2);
      if (backoff.compareTo(MAX_BACKOFF) > 0) {
        backoff = MAX_BACKOFF;
      }
      if (Instant.now().plus(wait).isAfter(giveUpAt)) {
        return false;
      }
      Thread.sleep(wait.toMillis());
      return true;
    }
  }

  /** Calls until there is an answer. The request stays the same: a repeat takes nothing twice. */
  private <T> T ask(Function<SeckillGrpc.SeckillBlockingStub, T> call)
      throws InterruptedException {
    return ask(new Waits(GIVE_UP), call);
  }

  private <T> T ask(Waits waits, Function<SeckillGrpc.SeckillBlockingStub, T> call)
      throws InterruptedException {
    while (true) {
      try {
        return call.apply(stub.withDeadlineAfter(ATTEMPT.toMillis(), TimeUnit.MILLISECONDS));
      } catch (StatusRuntimeException error) {
        Status.Code code = error.getStatus().getCode();
        Optional<Duration> named = retryAfter(error);
        boolean unclear = UNCLEAR.contains(code);
        waits.unclear |= unclear;
        // A message that is too large is RESOURCE_EXHAUSTED too, and has no RetryInfo.
        boolean repeatable = unclear || (REFUSED.contains(code) && named.isPresent());
        if (!repeatable || !waits.await(named)) {
          throw error;
        }
      }
    }
  }

  private int buy(ReserveRequest wanted, boolean paymentFails) throws InterruptedException {
    Waits waits = new Waits(GIVE_UP);
    ReserveResponse answer = ask(waits, stub -> stub.reserve(wanted));
    String outcome = answer.getOutcome().name().replace("RESERVE_OUTCOME_", "");
    Optional<Reservation> won = Optional.empty();
    boolean again = answer.getReplayed();
    if (answer.getOutcome() == ReserveOutcome.RESERVE_OUTCOME_RESERVED) {
      won = Optional.of(answer.getReservation());
    } else if (STATE_OF_THE_SALE.contains(answer.getOutcome())) {
      won = wonBefore(wanted, waits.unclear);
      again = true;
      if (won.isPresent() && won.get().getState() == ReservationState.RESERVATION_STATE_HELD) {
        System.out.println("reserve: " + outcome + ", and an earlier attempt is not decided");
        return UNAVAILABLE;
      }
    }
    if (won.isEmpty()) {
      System.out.println("reserve: " + outcome);
      return NO;
    }
    Reservation reservation = won.get();
    String word = again ? " again" : "";
    System.out.println("reserve: RESERVED" + word + ", order " + reservation.getOrderNo());

    if (paymentFails) {
      System.out.println("payment: failed");
      return GIVEN_BACK.contains(release(wanted, reservation, "payment failed")) ? OK : NO;
    }
    System.out.println("payment: paid");
    ConfirmOutcome confirmed =
        confirm(
            ConfirmRequest.newBuilder()
                .setActivityId(wanted.getActivityId())
                .setSkuId(wanted.getSkuId())
                .setUserId(wanted.getUserId())
                .setReservationId(reservation.getReservationId())
                .build());
    System.out.println("confirm: " + confirmed.name().replace("CONFIRM_OUTCOME_", ""));
    if (confirmed == ConfirmOutcome.CONFIRM_OUTCOME_CONFIRMED) {
      return OK;
    }
    if (confirmed == ConfirmOutcome.CONFIRM_OUTCOME_NOT_ORDERED_YET) {
      // It still holds its units: whoever refunds first gives away what was paid.
      ReleaseOutcome released = release(wanted, reservation, "not ordered in time");
      if (released == ReleaseOutcome.RELEASE_OUTCOME_CONFIRMED) {
        return OK; // meanwhile, so the buyer has what was paid
      }
      if (!GIVEN_BACK.contains(released)) {
        System.out.println("payment: kept; somebody must look");
        return NO;
      }
    }
    System.out.println("payment: refunded");
    return NO;
  }

  /**
   * What an attempt of this request won before; it is HELD while that is open.
   *
   * <p>Reserve tells the state of the sale first. The attempt may be one of the library, or of a
   * process before this one, so this asks in any case.
   */
  private Optional<Reservation> wonBefore(ReserveRequest wanted, boolean unclear)
      throws InterruptedException {
    ReservationKey key =
        ReservationKey.newBuilder()
            .setActivityId(wanted.getActivityId())
            .setSkuId(wanted.getSkuId())
            .setUserId(wanted.getUserId())
            .setRequestId(wanted.getRequestId())
            .build();
    GetReservationRequest request = GetReservationRequest.newBuilder().setKey(key).build();
    Waits waits = new Waits(GIVE_UP);
    Waits late = new Waits(LATE);
    while (true) {
      try {
        Reservation reservation = ask(stub -> stub.getReservation(request)).getReservation();
        if (HOLDS_NOTHING.contains(reservation.getState())) {
          return Optional.empty();
        }
        boolean held = reservation.getState() == ReservationState.RESERVATION_STATE_HELD;
        if (!held || !waits.await(Optional.empty())) {
          return Optional.of(reservation);
        }
      } catch (StatusRuntimeException error) {
        if (error.getStatus().getCode() != Status.Code.NOT_FOUND) {
          throw error;
        }
        // What was not answered may still arrive.
        if (!unclear || !late.await(Optional.empty())) {
          return Optional.empty();
        }
      }
    }
  }

  private ReleaseOutcome release(ReserveRequest wanted, Reservation reservation, String reason)
      throws InterruptedException {
    ReleaseRequest request =
        ReleaseRequest.newBuilder()
            .setActivityId(wanted.getActivityId())
            .setSkuId(wanted.getSkuId())
            .setUserId(wanted.getUserId())
            .setReservationId(reservation.getReservationId())
            .setReason(reason)
            .build();
    ReleaseOutcome outcome = ask(stub -> stub.release(request)).getOutcome();
    System.out.println("release: " + outcome.name().replace("RELEASE_OUTCOME_", ""));
    return outcome;
  }

  /** The order is made a moment after the reservation. */
  private ConfirmOutcome confirm(ConfirmRequest request) throws InterruptedException {
    Waits waits = new Waits(GIVE_UP);
    while (true) {
      ConfirmOutcome outcome = ask(stub -> stub.confirm(request)).getOutcome();
      boolean early = outcome == ConfirmOutcome.CONFIRM_OUTCOME_NOT_ORDERED_YET;
      if (!early || !waits.await(Optional.empty())) {
        return outcome;
      }
    }
  }

  /** Reads streams, one after the other, until the activity is settled. */
  private int watch(String activity) throws InterruptedException {
    WatchStockRequest request = WatchStockRequest.newBuilder().setActivityId(activity).build();
    ScheduledExecutorService clock =
        Executors.newSingleThreadScheduledExecutor(
            work -> {
              Thread thread = new Thread(work);
              thread.setDaemon(true);
              return thread;
            });
    Waits waits = new Waits(GIVE_UP);
    while (true) {
      try (Context.CancellableContext context = Context.current().withCancellation()) {
        Context before = context.attach();
        ScheduledFuture<?> timer = silent(clock, context);
        try {
          Iterator<WatchStockResponse> updates = stub.watchStock(request);
          while (updates.hasNext()) {
            WatchStockResponse update = updates.next();
            waits = new Waits(GIVE_UP);
            timer.cancel(false);
            timer = silent(clock, context);
            if (!update.getHeartbeat()) {
              System.out.printf(
                  "%s remaining=%d reserved=%d%n",
                  update.getSkuId(), update.getRemaining(), update.getReserved());
            }
          }
          return OK; // it ends by itself only when the activity is settled
        } finally {
          timer.cancel(false);
          context.detach(before);
        }
      } catch (StatusRuntimeException error) {
        Status.Code code = error.getStatus().getCode();
        // CANCELLED is ours: nothing came for too long.
        boolean passing =
            UNCLEAR.contains(code)
                || REFUSED.contains(code)
                || code == Status.Code.UNKNOWN
                || code == Status.Code.CANCELLED;
        if (!passing) {
          throw error;
        }
        System.err.println("the stream ended (" + code + "); calling again");
        if (!waits.await(retryAfter(error))) {
          return UNAVAILABLE;
        }
      }
    }
  }

  /** Cancels a stream that says nothing for too long. */
  private static ScheduledFuture<?> silent(
      ScheduledExecutorService clock, Context.CancellableContext context) {
    return clock.schedule(
        () -> context.cancel(null), SILENCE.toMillis(), TimeUnit.MILLISECONDS);
  }

  private static int usage() {
    System.err.println(
        "usage: client buy ADDRESS ACTIVITY SKU USER [--payment-fails] [--request-id ID]\n"
            + "       client watch ADDRESS ACTIVITY");
    return USAGE;
  }

  private static int run(String[] arguments) throws IOException, InterruptedException {
    List<String> names = new ArrayList<>();
    boolean paymentFails = false;
    String requestId = UUID.randomUUID().toString();
    for (int at = 0; at < arguments.length; at++) {
      if (arguments[at].equals("--payment-fails")) {
        paymentFails = true;
      } else if (arguments[at].equals("--request-id") && at + 1 < arguments.length) {
        requestId = arguments[++at];
      } else {
        names.add(arguments[at]);
      }
    }
    boolean isBuy = names.size() == 5 && names.get(0).equals("buy");
    boolean isWatch = names.size() == 3 && names.get(0).equals("watch");
    if (!isBuy && !isWatch) {
      return usage();
    }
    ManagedChannel channel = connect(names.get(1));
    try {
      Client client = new Client(channel);
      if (isWatch) {
        return client.watch(names.get(2));
      }
      ReserveRequest wanted =
          ReserveRequest.newBuilder()
              .setActivityId(names.get(2))
              .setSkuId(names.get(3))
              .setUserId(names.get(4))
              .setRequestId(requestId)
              .build();
      return client.buy(wanted, paymentFails);
    } catch (StatusRuntimeException error) {
      Status status = error.getStatus();
      System.err.println(status.getCode() + ": " + status.getDescription());
      boolean unclear = UNCLEAR.contains(status.getCode()) || REFUSED.contains(status.getCode());
      return unclear ? UNAVAILABLE : NO;
    } finally {
      channel.shutdownNow();
    }
  }

  public static void main(String[] arguments) throws IOException, InterruptedException {
    System.exit(run(arguments));
  }
}
