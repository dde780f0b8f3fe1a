package indexer

import (
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Serves tells whether a partition is one that this Indexer holds: of a model
// that its configuration names, or any if it names none.
func (x *Indexer) Serves(p event.Partition) bool {
	return len(x.models) == 0 || x.models[p.Model]
}

// other is a source of a partition that this Indexer does not hold. It is
// followed only as far as it says which records of the log are needed.
type other struct {
	name    event.Source
	keep    uint64 // log sequence of the oldest record that the state needs
	logSeq  uint64
	digests event.Digests
	next    int    // the chunk to come next of a checkpoint that is not complete
	first   uint64 // log sequence of the first of them
	asked   time.Time
	orphan  time.Time // since when its instance has no worker
}

// elsewhere is an instance of a partition that this Indexer does not hold.
type elsewhere struct {
	event.Partition
	instance string
}

// registeredElsewhere remembers that a worker of such a partition is registered,
// or is no longer. Called with mu held.
func (x *Indexer) registeredElsewhere(s event.Source, there bool) {
	in := elsewhere{s.Partition(), s.Instance}
	if x.abroad[in] == nil {
		x.abroad[in] = map[uint32]bool{}
	}
	if there {
		x.abroad[in][s.Rank] = true
	} else {
		delete(x.abroad[in], s.Rank)
	}
	if len(x.abroad[in]) == 0 {
		delete(x.abroad, in)
	}
}

// tidyOthers remembers since when sources have no worker. Called with mu held.
func (x *Indexer) tidyOthers(now time.Time) {
	for _, o := range x.others {
		if x.abroad[elsewhere{o.name.Partition(), o.name.Instance}] != nil {
			o.orphan = time.Time{}
		} else if o.orphan.IsZero() {
			o.orphan = now
		}
	}
}

// needed tells whether anybody still needs the records of a source.
func (x *Indexer) needed(o *other) bool {
	return o.orphan.IsZero() || time.Since(o.orphan) < x.cfg.Grace
}

// askOthers asks the sources that need records before a log sequence for
// checkpoints, so many at most. Called with mu held.
func (x *Indexer) askOthers(before uint64, most int) {
	for _, o := range x.others {
		if most == 0 {
			return
		}
		if o.keep >= before || !x.needed(o) || time.Since(o.asked) < askInterval {
			continue
		}
		most--
		o.asked = time.Now()
		if err := x.nc.Publish(event.CheckpointSubject(o.name.Key()), event.CheckpointRequest(o.logSeq+1)); err != nil {
			x.log.Debug("checkpoint not asked for", "error", err)
		}
	}
}

// skip takes in a record of a source that this Indexer does not hold. Called by
// the reader; x.dec has been given the record, unless err says why not.
func (x *Indexer) skip(name event.Source, seq uint64, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	defer x.advance(seq)
	if err != nil {
		return // those who hold it count it
	}
	o := x.others[name]
	if o == nil {
		o = &other{name: name, keep: seq}
		x.others[name] = o
	}
	o.logSeq = seq
	more := x.dec.Next()
	if more && x.dec.Op.Kind == event.OpCheckpoint {
		o.chunk(seq, x.dec.Op.Chunk, x.dec.Op.Chunks)
	} else {
		o.next = 0
	}
	for ; more; more = x.dec.Next() {
		switch x.dec.Op.Kind {
		case event.OpReset:
			o.keep = seq
		case event.OpDigest:
			o.digests = x.dec.Op.Digests
		case event.OpRetired:
			delete(x.others, name)
		}
	}
}

// chunk counts the chunks of a checkpoint.
func (o *other) chunk(seq uint64, chunk, chunks int) {
	if chunk == 0 {
		o.next, o.first = 0, seq
	}
	if chunk != o.next {
		o.next = 0
		return
	}
	if o.next++; o.next == chunks {
		o.keep, o.next = o.first, 0
	}
}
