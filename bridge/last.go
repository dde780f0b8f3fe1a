package bridge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// lastMessage returns the last record of a source; jetstream.ErrMsgNotFound if
// it has none. It asks the leader of the stream: any other server may be behind,
// and what it does not have yet would look as if it had never been written. It waits no
// longer than for a publish: an answer may be lost with its server.
func (b *Bridge) lastMessage(ctx context.Context, source event.Source) (*jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, b.cfg.PublishTimeout)
	defer cancel()
	subject := b.cfg.Log.Subject(source)
	request, err := json.Marshal(map[string]string{"last_by_subj": subject})
	if err != nil {
		return nil, err
	}
	reply, err := b.nc.RequestWithContext(ctx, event.APIPrefix(b.js)+"STREAM.MSG.GET."+b.cfg.Log.StreamOf(source), request)
	if err != nil {
		return nil, err
	}
	var got struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject  string    `json:"subject"`
			Sequence uint64    `json:"seq"`
			Header   []byte    `json:"hdrs"`
			Data     []byte    `json:"data"`
			Time     time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(reply.Data, &got); err != nil {
		return nil, fmt.Errorf("last message of %s: %w", subject, err)
	}
	switch {
	case got.Error != nil && got.Error.ErrorCode == codeMsgNotFound:
		return nil, jetstream.ErrMsgNotFound
	case got.Error != nil && got.Error.ErrorCode == codeStreamNotFound:
		err := b.ensureStream(ctx, source)
		if errors.Is(err, event.ErrLog) {
			return nil, err
		}
		return nil, errors.Join(jetstream.ErrMsgNotFound, err)
	case got.Error != nil:
		return nil, got.Error
	case got.Message == nil:
		return nil, fmt.Errorf("last message of %s: the answer has none", subject)
	}
	msg := &jetstream.RawStreamMsg{Subject: got.Message.Subject, Sequence: got.Message.Sequence, Data: got.Message.Data, Time: got.Message.Time}
	if len(got.Message.Header) > 0 {
		if msg.Header, err = nats.DecodeHeadersMsg(got.Message.Header); err != nil {
			return nil, fmt.Errorf("last message of %s: %w", subject, err)
		}
	}
	return msg, nil
}
