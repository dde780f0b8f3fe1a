package event

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/indexer/hash"
)

// A cache owner is memory that outlives the process of an engine. Its id is the
// same for every process that has the memory: the operator's, or derived from what
// the worker is and where, in the text form of Dynamo's KV state agents:
//
//	[cache semantics:routing scope]/data centre/slot
//
// of 32, 32, 16 and 32 hexadecimal digits in lower case.

// AutoOwner asks for the derived id instead of one of the operator's.
const AutoOwner = "auto"

// OwnerID returns the derived id of a worker's cache owner. The parts are
//
//	cache semantics: model and block size
//	routing scope:   routing group
//	data centre:     the label dc; 0 if there is none
//	slot:            endpoint, as it was registered, and rank
//
// each the XXH3 (of 128 bits, the data centre of 64) of its fields, and each field
// its length (u32, little-endian) and its text; numbers are decimal text.
func OwnerID(w *Worker) string {
	dc := "0000000000000000"
	if label := w.Labels["dc"]; label != "" {
		dc = fmt.Sprintf("%016x", hash.Text(label))
	}
	return fmt.Sprintf("[%s:%s]/%s/%s", wide(w.Model, fmt.Sprint(w.BlockSize)), wide(w.Group), dc, wide(w.Endpoint, fmt.Sprint(w.Rank)))
}

// wide returns the hash of fields as text.
func wide(fields ...string) string {
	var b []byte
	for _, f := range fields {
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(f))), f...)
	}
	sum := hash.Wide(b)
	return hex.EncodeToString(sum[:])
}

// OwnerTopic returns the topic of a worker with a cache owner, unless it is
// registered with another one. All are as long, so none is the beginning of another.
func OwnerTopic(id string) string { return "kvcr-" + wide(id) }

// Complete fills in what a registration leaves to be derived: the id of its cache
// owner, and its topic.
func (w *Worker) Complete() {
	if w.CacheOwner == AutoOwner {
		w.CacheOwner = OwnerID(w)
	}
	if w.CacheOwner != "" && w.Topic == "" {
		w.Topic = OwnerTopic(w.CacheOwner)
	}
}

// validateOwner checks what is asked of a worker with a cache owner: an endpoint may
// become part of an id, and is told to others, so it has to name one host.
func (w *Worker) validateOwner() error {
	if w.CacheOwner != AutoOwner && !isOwnerID(w.CacheOwner) {
		return fmt.Errorf("%w: cache_owner is %q, want auto, or an id such as %s: [32 hexadecimal digits:32]/16/32, in lower case", ErrWorker, w.CacheOwner, OwnerID(w))
	}
	at, err := ParseEndpoint(w.Endpoint)
	if err == nil && at.Bind {
		return fmt.Errorf("%w: endpoint %q has a wildcard host; a worker with a cache_owner is dialled, so name the host that it is on", ErrWorker, w.Endpoint)
	}
	return nil
}

func isOwnerID(s string) bool {
	rest := s
	for _, part := range []struct {
		before string
		digits int
	}{{"[", 32}, {":", 32}, {"]/", 16}, {"/", 32}} {
		after, ok := strings.CutPrefix(rest, part.before)
		if !ok || len(after) < part.digits || strings.Trim(after[:part.digits], "0123456789abcdef") != "" {
			return false
		}
		rest = after[part.digits:]
	}
	return rest == ""
}

// Confined returns an endpoint of the worker that means another thing on every host,
// such as one with a loopback address; "" if there is none.
func (w *Worker) Confined() string {
	for _, endpoint := range []string{w.Endpoint, w.ReplayEndpoint} {
		at, err := ParseEndpoint(endpoint)
		if err != nil {
			continue // it has no replay endpoint
		}
		host, _, _ := net.SplitHostPort(at.Address)
		ip, err := netip.ParseAddr(host)
		if at.Network == "unix" || strings.EqualFold(host, "localhost") || err == nil && ip.Unmap().IsLoopback() {
			return endpoint
		}
	}
	return ""
}

// Attachment is which worker a cache owner is attached to.
type Attachment struct {
	// Source has claimed the id.
	Source Source
	// Bridge has a slot for it, since then. Empty: it is detached.
	Bridge string
	Since  time.Time
}
