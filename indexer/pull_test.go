package indexer

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestAckSequences compares with the library's reading of reply subjects.
func TestAckSequences(t *testing.T) {
	for _, reply := range []string{
		"$JS.ACK.KV.abc.1.2.3.4.5",
		"$JS.ACK.KV.abc.1.18446744073709551615.7.1764483247000000000.0",
		"$JS.ACK.hub.HASH.KV.abc.1.20.30.4.5",
		"$JS.ACK._.HASH.KV.abc.1.20.30.4.5.token",
	} {
		meta, err := (&nats.Msg{Reply: reply, Sub: &nats.Subscription{}}).Metadata()
		if err != nil {
			t.Fatal(err)
		}
		stream, consumer, ok := ackSequences(reply)
		if !ok || stream != meta.Sequence.Stream || consumer != meta.Sequence.Consumer {
			t.Errorf("%s: %d, %d, %v; want %d, %d", reply, stream, consumer, ok, meta.Sequence.Stream, meta.Sequence.Consumer)
		}
	}
	for _, reply := range []string{"", "_INBOX.a.b", "$JS.ACK.KV.abc.1.2.3.4", "$JS.ACK.KV.abc.1.two.3.4.5", "$JS.ACK.KV.abc.1..3.4.5", "$JS.ACK.KV.a.abc.1.2.3.4.5", strings.Repeat(".", 20)} {
		if stream, consumer, ok := ackSequences(reply); ok {
			t.Errorf("%q: %d, %d", reply, stream, consumer)
		}
	}
}
