package engine

import (
	"math"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// Decoder reads the payloads of one engine. It may be used again and again, by
// one goroutine at a time.
type Decoder struct {
	profile Profile
	media   *Media

	// What is being read, empty outside of Decode.
	r  mpack.Reader
	b  *Batch
	ev draft
}

// NewDecoder returns a Decoder for an engine with the given profile, with the
// tiers of media.
func NewDecoder(p Profile, media *Media) *Decoder {
	return &Decoder{profile: p, media: media}
}

// Decode reads a payload into b.
//
// An event that can't be taken is counted in b.Dropped and left out; the
// others are in b.Events in their order. A payload that breaks off half way
// keeps the events in front of the break and sets b.Partial. Bytes behind the
// batch are counted and ignored, and so are elements and keys that no release
// is known to send.
//
// An error means that not one event could be read: ErrBatch, or an error of
// mpack if the bytes are no MessagePack, announce more than they hold, or are
// nested deeper than mpack.MaxDepth. b.Dropped still counts the events that
// were dropped before. Decode allocates nothing once b has grown to the size
// of the batches, and never more than a small multiple of the payload.
//
// The events are valid until the next Decode into b and as long as payload is
// left as it is.
func (d *Decoder) Decode(payload []byte, b *Batch) error {
	b.reset()
	d.b, d.r = b, mpack.NewReader(payload)
	err := d.batch()
	if err == nil {
		err = d.r.Err()
	}
	left := d.r.Len()
	d.r, d.b, d.ev = mpack.Reader{}, nil, draft{} // holds on to nobody's memory

	switch {
	case err == nil && left > 0:
		b.Dropped[Trailing]++
	case err != nil && len(b.Events) > 0:
		b.Partial = true
		b.Dropped[Broken]++
		return nil
	}
	return err
}

func (d *Decoder) batch() error {
	switch d.r.Next() {
	case mpack.KindArray:
		return d.arrayBatch()
	case mpack.KindMap:
		return d.mapBatch()
	}
	if d.r.Skip(); d.r.Err() != nil {
		return d.r.Err()
	}
	return ErrBatch
}

// arrayBatch reads [ts, events, rank, publisher, ...]; the first release had
// no rank, and only a few have more.
func (d *Decoder) arrayBatch() error {
	n := d.r.Array()
	if d.r.Err() == nil && n < 2 {
		return ErrBatch
	}
	d.timestamp()
	if err := d.events(); err != nil {
		return err
	}
	for i := 2; i < n; i++ {
		switch i {
		case 2:
			d.rank()
		case 3:
			d.publisher()
		default:
			d.r.Skip()
		}
	}
	return nil
}

func (d *Decoder) mapBatch() error {
	start, events := d.b.mark(), false
	for range d.r.Map() {
		switch string(key(&d.r)) {
		case "ts":
			d.timestamp()
		case "events":
			events = true
			d.b.rollback(start) // of a repeated key the last one counts
			if err := d.events(); err != nil {
				return err
			}
		case "data_parallel_rank":
			d.rank()
		case "publisher_id":
			d.publisher()
		default:
			d.r.Skip()
		}
	}
	if d.r.Err() == nil && !events {
		return ErrBatch
	}
	return nil
}

// key reads the key of a map. One that is not a string is nobody's name.
func key(r *mpack.Reader) []byte {
	if r.Next() == mpack.KindStr {
		return r.Str()
	}
	r.Skip()
	return nil
}

func (d *Decoder) timestamp() {
	d.b.TS = 0
	switch d.r.Next() {
	case mpack.KindInt, mpack.KindFloat:
		d.b.TS = d.r.Number()
	default:
		d.r.Skip()
	}
}

func (d *Decoder) rank() {
	d.b.Rank, d.b.HasRank = 0, false
	switch d.r.Next() {
	case mpack.KindNil:
		d.r.Nil()
		return
	case mpack.KindInt:
		if v, negative := d.r.Bits(); !negative && v <= math.MaxUint32 {
			d.b.Rank, d.b.HasRank = uint32(v), d.r.Err() == nil
			return
		}
	default:
		d.r.Skip()
	}
	if d.r.Err() == nil {
		d.b.Dropped[BadRank]++
	}
}

func (d *Decoder) publisher() {
	d.b.Publisher = nil
	switch d.r.Next() {
	case mpack.KindStr:
		d.b.Publisher = d.r.Str()
	case mpack.KindBin:
		d.b.Publisher = d.r.Bin()
	default:
		d.r.Skip()
	}
}

func (d *Decoder) events() error {
	if d.r.Nil() {
		return nil
	}
	if d.r.Next() != mpack.KindArray {
		if d.r.Skip(); d.r.Err() != nil {
			return d.r.Err()
		}
		return ErrBatch
	}
	for range d.r.Array() {
		start, before := d.r, d.b.mark()
		reason := d.readEvent(before)
		if reason == taken {
			continue
		}
		d.b.rollback(before)
		d.r = start
		if d.r.Skip(); d.r.Err() != nil {
			return d.r.Err()
		}
		d.b.Dropped[reason]++
	}
	return nil
}
