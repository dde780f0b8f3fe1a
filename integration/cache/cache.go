// Package cache is the block cache of an inference engine without the engine:
// prefix caching with reference counts and least-recently-used eviction on a
// device, and a host tier behind it that blocks are copied to and from in time.
//
// A Cache says what it does in the events that an engine would publish, and
// nothing else: a reader that follows the events knows what the cache holds.
// In particular
//
//   - a prompt's blocks are announced before they are referenced by another one,
//     in a run behind their parent, and with tokens on the device;
//   - a block of which a second copy is made is announced again, and each copy
//     removed by itself;
//   - a host copy is announced without tokens, when its transfer ends: often after
//     the device copy was removed, which it may outlive by far;
//   - a prompt that continues on the host waits until its blocks are loaded, and
//     then stores them on the device anew, while the host keeps its copies;
//   - at least the last token of a prompt is computed, so a prompt that is held
//     whole hits all but its last block.
//
// Time is the caller's: nothing happens between calls. A Cache is not safe for
// concurrent use.
package cache

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Errors of a Cache. None of them changes what it holds.
var (
	// ErrFull: too many blocks are referenced; it may work when a request ends.
	ErrFull = errors.New("cache: no room")
	// ErrTooLong: the request needs more blocks than the device has.
	ErrTooLong = errors.New("cache: longer than the device")
	// ErrBusy: a cache with requests can not be cleared.
	ErrBusy = errors.New("cache: requests are running")
)

// Options say how a Cache works.
type Options struct {
	BlockSize int // tokens; 0: 16
	Device    int // blocks of the device; 0: 4096
	Host      int // blocks of the host tier; 0: there is none
	// Transfer is how long one block takes between device and host. Each
	// direction is a queue.
	Transfer time.Duration
	// WriteThrough copies a block to the host when it is stored; otherwise that
	// is done when its last device copy is evicted.
	WriteThrough bool
	// ClearHost has Clear empty the host as well.
	ClearHost bool
	// GroupRemoved puts the blocks that are evicted together into one event, as
	// SGLang does; otherwise each is an event, as in vLLM.
	GroupRemoved bool
	// Medium is the name of the host tier on the wire; empty: CPU.
	Medium string
	// Owner, if not empty, is whose memory the host tier is: it goes into the
	// field ownership of its events.
	Owner string
	// Seed sets the engine's names of blocks apart from those of others.
	Seed uint64
}

func (o *Options) defaults() error {
	if o.BlockSize == 0 {
		o.BlockSize = 16
	}
	if o.Device == 0 {
		o.Device = 4096
	}
	if o.Medium == "" {
		o.Medium = "CPU"
	}
	if o.BlockSize < 1 || o.Device < 1 || o.Host < 0 || o.Transfer < 0 {
		return fmt.Errorf("cache: block size %d, device %d, host %d or transfer %v is out of range", o.BlockSize, o.Device, o.Host, o.Transfer)
	}
	return nil
}

// Prompt is what a request computes on.
type Prompt struct {
	Tokens []uint32
	LoRA   string // adapter; empty: none
	Salt   string // cache salt; empty: none
}

// Cache is the blocks of one engine rank.
type Cache struct {
	o        Options
	device   device
	host     host
	stores   []store // to the host, by when they end
	storing  map[uint64]bool
	loads    []*Request // from the host, by when they end
	storeEnd time.Time  // of the last transfer of each direction
	loadEnd  time.Time
	clock    time.Time // the latest time that a caller has named
	running  int
	events   []model.Event
}

// New returns an empty Cache.
func New(o Options) (*Cache, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	return &Cache{o: o, device: newDevice(o.Device), host: newHost(o.Host), storing: map[uint64]bool{}}, nil
}

// Request is a request that the cache has blocks for.
type Request struct {
	// HitDevice and HitHost are how many tokens of the prompt were held: from
	// its beginning on the device, and from there on the host.
	HitDevice, HitHost int
	// Ready is when its blocks have come from the host, and computing may begin.
	Ready time.Time

	lora, salt string
	seed       uint64
	tokens     int      // in all
	seqs       []uint64 // sequence hashes of its whole blocks
	slots      []int32  // one a begun block
	committed  int      // blocks that other requests can hit
	fresh      []uint32 // tokens behind the committed blocks
	loading    bool
	done       bool
}

// Hit returns how many tokens of the prompt were held anywhere.
func (r *Request) Hit() int { return r.HitDevice + r.HitHost }

// Start gives a prompt its blocks: those that are held, and new ones, for which
// others are evicted. The error wraps ErrFull or ErrTooLong.
func (c *Cache) Start(now time.Time, p Prompt) (*Request, error) {
	c.Tick(now)
	size := c.o.BlockSize
	r := &Request{lora: p.LoRA, salt: p.Salt, seed: hash.SeedOf(p.LoRA, p.Salt), tokens: len(p.Tokens), Ready: now}
	locals := hash.AppendLocals(nil, p.Tokens, size, 0, r.seed)
	r.seqs = hash.AppendSequence(locals[:0], locals)
	most := max(0, len(p.Tokens)-1) / size
	held := 0
	for held < most && c.device.has(r.seqs[held]) {
		held++
	}
	end := held
	for end < most && c.host.has(r.seqs[end]) {
		end++
	}
	need := (len(p.Tokens) + size - 1) / size
	if need > c.o.Device {
		return nil, fmt.Errorf("%w: %d blocks of %d", ErrTooLong, need, c.o.Device)
	}
	if !c.device.room(r.seqs[:held], need-held) {
		return nil, fmt.Errorf("%w: %d blocks", ErrFull, need-held)
	}
	r.HitDevice, r.HitHost = held*size, (end-held)*size
	for _, seq := range r.seqs[:held] {
		r.slots = append(r.slots, c.device.take(seq))
	}
	for _, seq := range r.seqs[held:end] {
		c.host.pin(seq)
	}
	c.grow(r, need)
	r.committed = held
	r.fresh = append(r.fresh, p.Tokens[held*size:]...)
	c.running++
	if end > held {
		r.loading = true
		c.loadEnd = later(c.loadEnd, now).Add(time.Duration(end-held) * c.o.Transfer)
		r.Ready = c.loadEnd
		c.loads = append(c.loads, r)
		c.Tick(now) // a transfer may take no time
		return r, nil
	}
	c.commit(now, r)
	return r, nil
}

// Append adds tokens that the request has generated. The error wraps ErrFull or
// ErrTooLong.
func (c *Cache) Append(now time.Time, r *Request, tokens []uint32) error {
	c.Tick(now)
	size := c.o.BlockSize
	need := (r.tokens + len(tokens) + size - 1) / size
	switch {
	case r.done:
		return fmt.Errorf("cache: the request has ended")
	case need > c.o.Device:
		return fmt.Errorf("%w: %d blocks of %d", ErrTooLong, need, c.o.Device)
	case !c.device.room(nil, need-len(r.slots)):
		return fmt.Errorf("%w: %d blocks", ErrFull, need-len(r.slots))
	}
	r.tokens += len(tokens)
	r.fresh = append(r.fresh, tokens...)
	at := (len(r.seqs) - r.committed) * size // tokens before the first block without a name
	for ; at+size <= len(r.fresh); at += size {
		local := hash.Local(r.fresh[at:at+size], r.seed, nil)
		if n := len(r.seqs); n > 0 {
			local = hash.Next(r.seqs[n-1], local)
		}
		r.seqs = append(r.seqs, local)
	}
	c.grow(r, need)
	if !r.loading {
		c.commit(now, r)
	}
	return nil
}

// Finish ends a request: its blocks stay until they are evicted, its last ones
// first. A request that still loads leaves nothing behind.
func (c *Cache) Finish(now time.Time, r *Request) {
	c.Tick(now)
	if r.done {
		return
	}
	if r.loading {
		c.unpin(r)
		for i, other := range c.loads {
			if other == r {
				c.loads = append(c.loads[:i], c.loads[i+1:]...)
				break
			}
		}
	}
	r.done = true
	c.running--
	for i := len(r.slots) - 1; i >= 0; i-- {
		c.device.release(r.slots[i])
	}
}

// Clear forgets every block of the device, and of the host if the options say
// so. The error is ErrBusy.
func (c *Cache) Clear(now time.Time) error {
	c.Tick(now)
	if c.running > 0 {
		return ErrBusy
	}
	c.device = newDevice(c.o.Device)
	if c.o.ClearHost {
		c.host = newHost(c.o.Host)
		c.stores, c.storing = nil, map[uint64]bool{}
		if c.o.Owner != "" {
			c.events = append(c.events, c.tag(model.Event{Op: model.Clear}))
		}
	}
	c.events = append(c.events, model.Event{Op: model.Clear})
	return nil
}

// Restart makes the cache that of a new process: nothing runs, and the device is
// empty, which no event says. The host stays if it is somebody else's memory.
func (c *Cache) Restart(now time.Time) {
	c.Tick(now)
	c.device = newDevice(c.o.Device)
	c.stores, c.storing, c.loads, c.running, c.events = nil, map[uint64]bool{}, nil, 0, nil
	if c.o.Owner == "" {
		c.host = newHost(c.o.Host)
	}
	c.host.unpinAll()
}

// Events takes the events since the last call, in their order. Times that are
// passed to the methods must not go back between calls.
func (c *Cache) Events() []model.Event {
	out := c.events
	c.events = nil
	return out
}

// Running returns how many requests have blocks.
func (c *Cache) Running() int { return c.running }

// Resident returns the sequence hashes of the blocks that are announced on the
// device and on the host, in no order.
func (c *Cache) Resident() (device, host []uint64) {
	return c.device.names(), c.host.names()
}

// name returns the engine's own name for a block.
func (c *Cache) name(seq uint64) model.Hash {
	x := seq + c.o.Seed*0x9E3779B97F4A7C15 + 1
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return model.Int(x ^ x>>31)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
