// Buys a unit of a flash sale, or watches the stock. See README.md.
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	mathrand "math/rand"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "inventory.seckill/gen/seckill/v1"
)

const (
	serviceConfigFile = "../../proto/seckill/v1/seckill_grpc_service_config.json"

	attemptLimit = 2 * time.Second // how long one call may take, the library's repeats included
	lateAfter    = 8 * time.Second // after so long, an attempt that nobody has seen wins no more
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 2 * time.Second
	silence      = 20 * time.Second // a stream says something every 15 seconds

	exitOK          = 0
	exitNo          = 1
	exitUsage       = 64
	exitUnavailable = 69
)

// giveUpAfter is how long all calls for one answer may take.
var giveUpAfter = seconds("SECKILL_GIVE_UP_S", 30*time.Second)

// seconds reads a variable.
func seconds(name string, otherwise time.Duration) time.Duration {
	if span, err := time.ParseDuration(os.Getenv(name) + "s"); err == nil {
		return span
	}
	return otherwise
}

// connect opens a connection whose library repeats calls by the service config.
func connect(address string) (*grpc.ClientConn, error) {
	config, err := os.ReadFile(serviceConfigFile)
	if err != nil {
		return nil, err
	}
	transport := insecure.NewCredentials()
	if file := os.Getenv("SECKILL_CA_FILE"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		authorities := x509.NewCertPool()
		if !authorities.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", file)
		}
		transport = credentials.NewTLS(&tls.Config{RootCAs: authorities})
	}
	reconnect := backoff.DefaultConfig
	reconnect.MaxDelay = maxBackoff
	return grpc.Dial(address,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(string(config)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: attemptLimit}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second}),
	)
}

// callContext carries the token, if there is one.
func callContext() context.Context {
	ctx := context.Background()
	if token := os.Getenv("SECKILL_TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	return ctx
}

// retryAfter is the wait that the server asks for, or nil.
func retryAfter(err error) *time.Duration {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			wait := info.GetRetryDelay().AsDuration()
			return &wait
		}
	}
	return nil
}

// waits between attempts: as long as the server says, or longer each time; then gives up.
type waits struct {
	giveUpAt time.Time
	backoff  time.Duration
	unclear  bool // an attempt went unanswered
}

func newWaits(limit time.Duration) *waits {
	return &waits{giveUpAt: time.Now().Add(limit), backoff: firstBackoff}
}

// wait is false when there is no time left.
func (w *waits) wait(named *time.Duration) bool {
	pause := time.Duration(float64(w.backoff) * (0.5 + mathrand.Float64()/2))
	if named != nil {
		pause = *named
	}
	if w.backoff *= 2; w.backoff > maxBackoff {
		w.backoff = maxBackoff
	}
	if time.Now().Add(pause).After(w.giveUpAt) {
		return false
	}
	time.Sleep(pause)
	return true
}

// isUnclear says that the outcome is unknown.
func isUnclear(err error) bool {
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.DeadlineExceeded
}

// isRefused says that nothing was decided, and that a repeat may help if the server names a time.
func isRefused(err error) bool {
	code := status.Code(err)
	return code == codes.ResourceExhausted || code == codes.Aborted
}

// ask calls until there is an answer. The request stays the same, so a repeat takes nothing twice.
func ask(call func(ctx context.Context) error) error {
	return askWith(newWaits(giveUpAfter), call)
}

func askWith(w *waits, call func(ctx context.Context) error) error {
	for {
		ctx, cancel := context.WithTimeout(callContext(), attemptLimit)
		err := call(ctx)
		cancel()
		if err == nil {
			return nil
		}
		named := retryAfter(err)
		w.unclear = w.unclear || isUnclear(err)
		// A message that is too large is RESOURCE_EXHAUSTED too, and has no RetryInfo.
		repeatable := isUnclear(err) || (isRefused(err) && named != nil)
		if !repeatable || !w.wait(named) {
			return err
		}
	}
}

func buy(client pb.SeckillClient, wanted *pb.ReserveRequest, paymentFails bool) (int, error) {
	var answer *pb.ReserveResponse
	w := newWaits(giveUpAfter)
	err := askWith(w, func(ctx context.Context) (err error) {
		answer, err = client.Reserve(ctx, wanted)
		return err
	})
	if err != nil {
		return exitNo, err
	}
	outcome := strings.TrimPrefix(answer.GetOutcome().String(), "RESERVE_OUTCOME_")
	var reservation *pb.Reservation
	again := answer.GetReplayed()
	switch answer.GetOutcome() {
	case pb.ReserveOutcome_RESERVE_OUTCOME_RESERVED:
		reservation = answer.GetReservation()
	case pb.ReserveOutcome_RESERVE_OUTCOME_NOT_STARTED,
		pb.ReserveOutcome_RESERVE_OUTCOME_PAUSED,
		pb.ReserveOutcome_RESERVE_OUTCOME_ENDED:
		reservation, err = wonBefore(client, wanted, w.unclear)
		if err != nil {
			return exitNo, err
		}
		again = true
		if reservation.GetState() == pb.ReservationState_RESERVATION_STATE_HELD {
			fmt.Printf("reserve: %s, and an earlier attempt is not decided\n", outcome)
			return exitUnavailable, nil
		}
	}
	if reservation == nil {
		fmt.Printf("reserve: %s\n", outcome)
		return exitNo, nil
	}
	word := ""
	if again {
		word = " again"
	}
	fmt.Printf("reserve: RESERVED%s, order %s\n", word, reservation.GetOrderNo())

	if paymentFails {
		fmt.Println("payment: failed")
		released, err := release(client, wanted, reservation, "payment failed")
		if err != nil || !isGivenBack(released) {
			return exitNo, err
		}
		return exitOK, nil
	}
	fmt.Println("payment: paid")
	confirmed, err := confirm(client, &pb.ConfirmRequest{
		ActivityId:    wanted.GetActivityId(),
		SkuId:         wanted.GetSkuId(),
		UserId:        wanted.GetUserId(),
		ReservationId: reservation.GetReservationId(),
	})
	if err != nil {
		return exitNo, err
	}
	fmt.Printf("confirm: %s\n", strings.TrimPrefix(confirmed.String(), "CONFIRM_OUTCOME_"))
	switch confirmed {
	case pb.ConfirmOutcome_CONFIRM_OUTCOME_CONFIRMED:
		return exitOK, nil
	case pb.ConfirmOutcome_CONFIRM_OUTCOME_NOT_ORDERED_YET:
		// It still holds its units: whoever refunds first gives away what was paid.
		released, err := release(client, wanted, reservation, "not ordered in time")
		if err != nil {
			return exitNo, err
		}
		if released == pb.ReleaseOutcome_RELEASE_OUTCOME_CONFIRMED {
			return exitOK, nil // meanwhile, so the buyer has what was paid
		}
		if !isGivenBack(released) {
			fmt.Println("payment: kept; somebody must look")
			return exitNo, nil
		}
	}
	fmt.Println("payment: refunded")
	return exitNo, nil
}

// wonBefore is what an attempt of this request won before, HELD while that is open, or nil.
//
// Reserve tells the state of the sale first. The attempt may be one of the library, or of a process
// before this one, so this asks in any case.
func wonBefore(client pb.SeckillClient, wanted *pb.ReserveRequest, unclear bool) (*pb.Reservation, error) {
	request := &pb.GetReservationRequest{By: &pb.GetReservationRequest_Key{Key: &pb.ReservationKey{
		ActivityId: wanted.GetActivityId(),
		SkuId:      wanted.GetSkuId(),
		UserId:     wanted.GetUserId(),
		RequestId:  wanted.GetRequestId(),
	}}}
	w, late := newWaits(giveUpAfter), newWaits(lateAfter)
	for {
		var answer *pb.GetReservationResponse
		err := ask(func(ctx context.Context) (err error) {
			answer, err = client.GetReservation(ctx, request)
			return err
		})
		if status.Code(err) == codes.NotFound {
			// What was not answered may still arrive.
			if !unclear || !late.wait(nil) {
				return nil, nil
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		reservation := answer.GetReservation()
		switch reservation.GetState() {
		case pb.ReservationState_RESERVATION_STATE_RELEASED, pb.ReservationState_RESERVATION_STATE_REFUSED:
			return nil, nil
		case pb.ReservationState_RESERVATION_STATE_HELD:
			if w.wait(nil) {
				continue
			}
		}
		return reservation, nil
	}
}

func release(
	client pb.SeckillClient, wanted *pb.ReserveRequest, reservation *pb.Reservation, reason string,
) (pb.ReleaseOutcome, error) {
	request := &pb.ReleaseRequest{
		ActivityId:    wanted.GetActivityId(),
		SkuId:         wanted.GetSkuId(),
		UserId:        wanted.GetUserId(),
		ReservationId: reservation.GetReservationId(),
		Reason:        reason,
	}
	var answer *pb.ReleaseResponse
	err := ask(func(ctx context.Context) (err error) {
		answer, err = client.Release(ctx, request)
		return err
	})
	if err != nil {
		return pb.ReleaseOutcome_RELEASE_OUTCOME_UNSPECIFIED, err
	}
	fmt.Printf("release: %s\n", strings.TrimPrefix(answer.GetOutcome().String(), "RELEASE_OUTCOME_"))
	return answer.GetOutcome(), nil
}

func isGivenBack(outcome pb.ReleaseOutcome) bool {
	return outcome == pb.ReleaseOutcome_RELEASE_OUTCOME_RELEASED ||
		outcome == pb.ReleaseOutcome_RELEASE_OUTCOME_ALREADY_RELEASED
}

// confirm asks again while the order is not made: that takes a moment after the reservation.
func confirm(client pb.SeckillClient, request *pb.ConfirmRequest) (pb.ConfirmOutcome, error) {
	w := newWaits(giveUpAfter)
	for {
		var answer *pb.ConfirmResponse
		err := ask(func(ctx context.Context) (err error) {
			answer, err = client.Confirm(ctx, request)
			return err
		})
		if err != nil {
			return pb.ConfirmOutcome_CONFIRM_OUTCOME_UNSPECIFIED, err
		}
		early := answer.GetOutcome() == pb.ConfirmOutcome_CONFIRM_OUTCOME_NOT_ORDERED_YET
		if !early || !w.wait(nil) {
			return answer.GetOutcome(), nil
		}
	}
}

// watch reads streams, one after the other, until the activity is settled.
func watch(client pb.SeckillClient, activity string) (int, error) {
	w := newWaits(giveUpAfter)
	for {
		err := readStream(client, activity, func() { w = newWaits(giveUpAfter) })
		if err == nil {
			return exitOK, nil // it ends by itself only when the activity is settled
		}
		code := status.Code(err)
		// Canceled is ours: nothing came for too long.
		if !isUnclear(err) && !isRefused(err) && code != codes.Unknown && code != codes.Canceled {
			return exitNo, err
		}
		fmt.Fprintf(os.Stderr, "the stream ended (%s); calling again\n", code)
		if !w.wait(retryAfter(err)) {
			return exitUnavailable, nil
		}
	}
}

// readStream prints the messages of a stream; one that says nothing for too long is cancelled.
func readStream(client pb.SeckillClient, activity string, alive func()) error {
	ctx, cancel := context.WithCancel(callContext())
	defer cancel()
	timer := time.AfterFunc(silence, cancel)
	defer timer.Stop()
	stream, err := client.WatchStock(ctx, &pb.WatchStockRequest{ActivityId: activity})
	if err != nil {
		return err
	}
	for {
		update, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		alive()
		timer.Reset(silence)
		if !update.GetHeartbeat() {
			fmt.Printf("%s remaining=%d reserved=%d\n",
				update.GetSkuId(), update.GetRemaining(), update.GetReserved())
		}
	}
}

func newRequestID() string {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		panic(err)
	}
	return hex.EncodeToString(id[:])
}

func usage() int {
	fmt.Fprintln(os.Stderr, "usage: client buy [-payment-fails] [-request-id ID] ADDRESS ACTIVITY SKU USER")
	fmt.Fprintln(os.Stderr, "       client watch ADDRESS ACTIVITY")
	return exitUsage
}

func run(arguments []string) int {
	if len(arguments) == 0 {
		return usage()
	}
	flags := flag.NewFlagSet(arguments[0], flag.ExitOnError)
	paymentFails := flags.Bool("payment-fails", false, "release instead of confirming")
	requestID := flags.String("request-id", newRequestID(), "go on with an earlier attempt")
	_ = flags.Parse(arguments[1:]) // it exits by itself
	names := flags.Args()
	isBuy, isWatch := arguments[0] == "buy" && len(names) == 4, arguments[0] == "watch" && len(names) == 2
	if !isBuy && !isWatch {
		return usage()
	}
	connection, err := connect(names[0])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitUsage
	}
	defer connection.Close()
	client := pb.NewSeckillClient(connection)
	var code int
	if isWatch {
		code, err = watch(client, names[1])
	} else {
		code, err = buy(client, &pb.ReserveRequest{
			ActivityId: names[1], SkuId: names[2], UserId: names[3], RequestId: *requestID,
		}, *paymentFails)
	}
	if err == nil {
		return code
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", status.Code(err), status.Convert(err).Message())
	if isUnclear(err) || isRefused(err) {
		return exitUnavailable
	}
	return exitNo
}

func main() {
	os.Exit(run(os.Args[1:]))
}
