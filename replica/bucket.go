package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// bucket is a NATS key-value bucket that is followed. It is read by a consumer of
// its own, and not by the library's watcher: that one takes up to 11 s to heal
// when a server is lost, and waits for ever for a bucket that was made anew.
type bucket struct {
	js     jetstream.JetStream
	config jetstream.KeyValueConfig
	log    *slog.Logger
}

// change is a new value of a key, or that it has none any more.
type change struct {
	key      string
	value    []byte
	revision uint64
	gone     bool
	expired  bool // gone because its time was over
}

// follower is told what is in a bucket, from one goroutine. After begin comes
// what there is, a key at a time, then whole, then every change. It begins again
// whenever something was wrong.
type follower interface {
	// begin: created tells one bucket from another of the same name.
	begin(kv jetstream.KeyValue, created time.Time)
	each(c change)
	whole()
}

const (
	bucketTimeout   = 2 * time.Second
	bucketHeartbeat = 500 * time.Millisecond
)

// follow tells f of the bucket until ctx ends.
func (b *bucket) follow(ctx context.Context, f follower) {
	backoff := 50 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		switch err := b.read(ctx, f); {
		case ctx.Err() != nil:
		case errors.Is(err, nats.ErrReconnectBufExceeded): // not connected, which whoever owns the connection is told of
			b.log.Debug("following a bucket waits for NATS", "bucket", b.config.Bucket)
		default:
			b.log.Warn("following a bucket failed, trying again", "bucket", b.config.Bucket, "error", err)
		}
		if time.Since(began) > 10*time.Second {
			backoff = 50 * time.Millisecond
		}
		select {
		case <-time.After(backoff):
		case <-ctx.Done():
		}
		backoff = min(2*backoff, time.Second)
	}
}

// open returns the bucket, which is made if it is not there.
func (b *bucket) open(ctx context.Context) (jetstream.KeyValue, error) {
	kv, err := b.js.KeyValue(ctx, b.config.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = b.js.CreateKeyValue(ctx, b.config)
	}
	var status jetstream.KeyValueStatus
	if err == nil {
		status, err = kv.Status(ctx)
	}
	if err == nil && status.LimitMarkerTTL() == 0 { // made by an earlier version
		kv, err = b.js.UpdateKeyValue(ctx, b.config)
	}
	if errors.Is(err, jetstream.ErrLimitMarkerTTLNotSupported) {
		return nil, fmt.Errorf("bucket %s: NATS 2.11 or later is needed: %w", b.config.Bucket, err)
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", b.config.Bucket, err)
	}
	return kv, nil
}

func (b *bucket) stream() string { return "KV_" + b.config.Bucket }

// read follows the bucket until something is wrong.
func (b *bucket) read(ctx context.Context, f follower) error {
	opening, cancel := context.WithTimeout(ctx, bucketTimeout)
	defer cancel()
	kv, err := b.open(opening)
	if err != nil {
		return err
	}
	stream, err := b.js.Stream(opening, b.stream())
	if err != nil {
		return fmt.Errorf("bucket %s: %w", b.config.Bucket, err)
	}
	consumer, err := stream.CreateConsumer(opening, jetstream.ConsumerConfig{
		DeliverPolicy:     jetstream.DeliverLastPerSubjectPolicy,
		FilterSubject:     "$KV." + b.config.Bucket + ".>",
		AckPolicy:         jetstream.AckNonePolicy,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: 10 * time.Second,
	})
	if err != nil {
		return fmt.Errorf("bucket %s: create a consumer: %w", b.config.Bucket, err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bucketHeartbeat)
		defer cancel()
		if err := b.js.DeleteConsumer(ctx, b.stream(), consumer.CachedInfo().Name); err != nil {
			b.log.Debug("consumer not deleted, it will go by itself", "error", err)
		}
	}()
	messages, err := consumer.Messages(jetstream.PullMaxMessages(2000), jetstream.PullHeartbeat(bucketHeartbeat), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return fmt.Errorf("bucket %s: %w", b.config.Bucket, err)
	}
	defer messages.Stop()
	stop := context.AfterFunc(ctx, messages.Stop)
	defer stop()
	// A server that started again has forgotten the consumer, which would be
	// noticed only after a while.
	back := b.js.Conn().StatusChanged(nats.CONNECTED)
	defer b.js.Conn().RemoveStatusListener(back)
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-back:
			messages.Stop()
		case <-done:
		}
	}()
	f.begin(kv, stream.CachedInfo().Created)
	return b.tell(f, messages, consumer.CachedInfo().NumPending)
}

// tell tells f what comes; so many keys are there already.
func (b *bucket) tell(f follower, messages jetstream.MessagesContext, there uint64) error {
	if there == 0 {
		f.whole()
	}
	initial := there > 0
	delivered := uint64(0)
	for {
		msg, err := messages.Next()
		if err != nil {
			return fmt.Errorf("bucket %s: %w", b.config.Bucket, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("bucket %s: %w", b.config.Bucket, err)
		}
		if delivered++; meta.Sequence.Consumer != delivered {
			return fmt.Errorf("bucket %s: message %d came as number %d", b.config.Bucket, delivered, meta.Sequence.Consumer)
		}
		f.each(b.change(msg, meta.Sequence.Stream))
		if initial && meta.NumPending == 0 {
			initial = false
			f.whole()
		}
	}
}

func (b *bucket) change(msg jetstream.Msg, revision uint64) change {
	c := change{key: msg.Subject()[len("$KV."+b.config.Bucket+"."):], value: msg.Data(), revision: revision}
	h := msg.Headers()
	switch h.Get("KV-Operation") {
	case "DEL", "PURGE":
		c.gone = true
	}
	if reason := h.Get(jetstream.MarkerReasonHeader); reason != "" {
		c.gone, c.expired = true, reason == "MaxAge"
	}
	return c
}

// put sets a key that has the given revision, 0 for none, for no longer than
// ttl unless that is 0. It returns the new revision; jetstream.ErrKeyExists if
// the key has another one.
func (b *bucket) put(ctx context.Context, key string, value []byte, revision uint64, ttl time.Duration) (uint64, error) {
	options := []jetstream.PublishOpt{
		jetstream.WithExpectLastSequencePerSubject(revision),
		jetstream.WithExpectStream(b.stream()),
		jetstream.WithRetryAttempts(0),
	}
	if ttl > 0 {
		options = append(options, jetstream.WithMsgTTL(ttl))
	}
	ack, err := b.js.Publish(ctx, b.subject(key), value, options...)
	if err != nil {
		var api *jetstream.APIError
		if errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant) {
			return 0, fmt.Errorf("%w: %s", jetstream.ErrKeyExists, key)
		}
		return 0, err
	}
	return ack.Sequence, nil
}

// subject returns the subject that a key is put on.
func (b *bucket) subject(key string) string {
	o := b.js.Options()
	prefix := ""
	if o.Domain != "" {
		prefix = "$JS." + o.Domain + ".API."
	} else if o.APIPrefix != "" {
		prefix = o.APIPrefix + "."
	}
	if prefix == jetstream.DefaultAPIPrefix {
		prefix = ""
	}
	return prefix + "$KV." + b.config.Bucket + "." + key
}
