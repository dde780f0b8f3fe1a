package engine

// Batch is what one payload says. Decode fills it anew each time and reuses its
// memory, so the events have to be used before the next one, and while the
// payload is left as it is. The zero Batch is ready for use. Sources that take
// turns can share one.
type Batch struct {
	TS      float64 // as sent: seconds, or milliseconds from some engines; 0 if absent
	Rank    uint32  // data-parallel rank
	HasRank bool
	// Publisher identifies the life of the engine process; a change means that
	// it was started again. Nil for engines that don't send it.
	Publisher []byte
	Events    []Event

	// Partial: the payload breaks off or turns to nonsense behind Events. What
	// the engine said there is lost, so its state is uncertain from here on.
	Partial bool
	// Dropped counts what was not taken, by Reason.
	Dropped [Reasons]int

	// What the slices of the events point into. A slice keeps pointing into the
	// older array when one of these grows.
	hashes    []Hash
	tokens    []uint32
	mm        []uint64
	mmEnds    []uint32
	remaining []uint64
}

// What a Batch keeps of its memory for the next one, in elements. An ordinary
// batch needs less, and many sources can't all keep their worst.
const (
	keepEvents = 1 << 12
	keepHashes = 1 << 14
	keepTokens = 1 << 18
)

func (b *Batch) reset() {
	b.rollback(mark{})
	*b = Batch{
		Events:    emptied(b.Events, keepEvents),
		hashes:    emptied(b.hashes, keepHashes),
		tokens:    emptied(b.tokens, keepTokens),
		mm:        emptied(b.mm, keepHashes),
		mmEnds:    emptied(b.mmEnds, keepHashes),
		remaining: emptied(b.remaining, keepHashes),
	}
}

func emptied[T any](s []T, keep int) []T {
	if cap(s) > keep {
		return nil
	}
	return s[:0]
}

// mark is how full a Batch is, so that an event can be taken back.
type mark struct{ events, hashes, tokens, mm, mmEnds, remaining int }

func (b *Batch) mark() mark {
	return mark{len(b.Events), len(b.hashes), len(b.tokens), len(b.mm), len(b.mmEnds), len(b.remaining)}
}

// rollback also lets go of the payload that was pointed into.
func (b *Batch) rollback(m mark) {
	clear(b.Events[m.events:])
	clear(b.hashes[m.hashes:])
	b.Events = b.Events[:m.events]
	b.hashes = b.hashes[:m.hashes]
	b.tokens = b.tokens[:m.tokens]
	b.mm = b.mm[:m.mm]
	b.mmEnds = b.mmEnds[:m.mmEnds]
	b.remaining = b.remaining[:m.remaining]
}
