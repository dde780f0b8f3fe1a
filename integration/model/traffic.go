package model

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
)

// Feature is something that traffic may do. Features add up with |.
type Feature uint32

// What an engine's dialect must be able to say.
const (
	Media     Feature = 1 << iota // stores in other tiers than the device, and in unknown media
	LoRA                          // prompts under adapters
	Salt                          // prompts under cache salts
	Groups                        // groups: 0 is main, 1 is not
	Kinds                         // kinds of groups: 1 is main too, by its stores, and 2 a sliding window
	Locality                      // blocks on other machines
	Remaining                     // removals that say how many copies are left
	Owners                        // blocks in the memory of a cache owner, and of owners that nobody knows
)

// What an engine may do in any dialect that can say it.
const (
	Tokenless Feature = 1 << (iota + 16) // host stores that only name blocks
	Aliases                              // which may name them by 32 bytes, under the profile vllm
	Chunks                               // host stores of two blocks under one name
	Copies                               // second copies of device blocks
	Clears                               // AllBlocksCleared, now and then
	Orphans                              // device stores before their parents
	Unknown                              // removals of what is not there
	Changes                              // a known hash comes back with another content
	Noise                                // well-formed events that mean nothing
	Bad                                  // values that are no events
)

// Everything is every feature there is.
const Everything = 1<<32 - 1

// TrafficOptions say what traffic an engine makes.
type TrafficOptions struct {
	Seed      uint64
	BlockSize int // of the index, in tokens
	Profile   Profile
	// CacheOwner says that the source has a cache owner.
	CacheOwner bool
	Events     int // most events a batch; 0 means 4
	Features   Feature
}

// Traffic invents what one rank of an engine may say. It believes to hold blocks
// and leans on that, so most of its events mean something, and it stays within
// what events can say without doubt: a store without tokens names blocks that
// are known, and leans on nothing from before a clear.
type Traffic struct {
	o       TrafficOptions
	rng     *rand.Rand
	prompts []Prompt
	lower   Tier // where blocks go that leave the host
	salt    uint64

	truth  *Source           // what the events so far mean
	held   [tiers][]holding  // one entry a copy
	stored map[Hash]Event    // how to say a block of index size again
	told   []Hash            // what a store without tokens may name, in order
	since  map[Hash]struct{} // hashes told since the last clear
}

type holding struct {
	hash  Hash
	group *int
	owner string
}

// NewTraffic returns the traffic of an engine over prompts, which it shares with
// others: their hashes differ, their content is the same. Prompts that need a
// feature which is off are left alone; where none is left, the engine has one of
// its own. Equal options and prompts make equal traffic.
func NewTraffic(o TrafficOptions, prompts []Prompt) *Traffic {
	if o.Events == 0 {
		o.Events = 4
	}
	t := &Traffic{o: o, rng: rand.New(rand.NewPCG(o.Seed, 2)), truth: New(o.BlockSize, o.Profile), stored: map[Hash]Event{}}
	t.truth.CacheOwner = o.CacheOwner
	for _, p := range prompts {
		if (p.LoRA == "" || t.has(LoRA)) && (p.Salt == "" || t.has(Salt)) && len(p.seqs) > 0 {
			t.prompts = append(t.prompts, p)
		}
	}
	if len(t.prompts) == 0 {
		t.prompts = Prompts(PromptOptions{Seed: o.Seed, BlockSize: o.BlockSize})
	}
	t.Restart()
	return t
}

// Restart begins a new life of the engine: it holds nothing but what is in the
// memory of a cache owner, and names blocks anew, or as before if there are such.
func (t *Traffic) Restart() {
	t.truth.Restart()
	t.forget()
	kept := false
	for tier := range tiers {
		t.held[tier] = slices.DeleteFunc(t.held[tier], func(h holding) bool { return h.owner != cacheOwner })
		for _, h := range t.held[tier] {
			kept = true
			t.told = append(t.told, h.hash)
			t.since[h.hash] = struct{}{}
		}
	}
	t.lower = Disk + Tier(t.rng.IntN(2))
	if !kept || t.rng.IntN(2) == 0 {
		t.salt = t.rng.Uint64()
		t.stored = map[Hash]Event{}
	}
}

// Batch returns the events of the next batch.
func (t *Traffic) Batch() []Event {
	var out []Event
	for range 1 + t.rng.IntN(t.o.Events) {
		e := t.event()
		t.truth.Apply(e)
		out = append(out, e)
	}
	return out
}

// Truth returns what the events so far mean. The caller only reads it.
func (t *Traffic) Truth() *Source { return t.truth }

func (t *Traffic) has(f Feature) bool { return t.o.Features&f != 0 }

func (t *Traffic) event() Event {
	p := t.prompts[t.rng.IntN(len(t.prompts))]
	switch x := t.rng.Float64(); {
	case x < 0.44:
		return t.store(p, Device)
	case x < 0.56 && t.has(Media):
		return t.lowerStore(p)
	case x < 0.88:
		return t.remove(p)
	case x < 0.93 && t.has(Copies):
		return t.again(p, false)
	case x < 0.94 && t.has(Changes) && !t.o.CacheOwner: // whose names outlive what they were told with
		return t.again(p, true)
	case x < 0.944 && t.has(Clears):
		return t.clear()
	case x < 0.98 && t.has(Noise):
		return t.noise(p)
	case t.has(Bad):
		return t.bad()
	}
	return t.store(p, Device)
}

// name is the engine's hash of block i of a prompt, in chunks of so many blocks.
func (t *Traffic) name(p Prompt, i, chunk int) Hash {
	return Int(Mix(p.seqs[i] ^ t.salt ^ uint64(chunk)*0x1234567))
}

// store tells blocks of a prompt: mostly the first that are missing.
func (t *Traffic) store(p Prompt, tier Tier) Event {
	n, at := len(p.seqs), 0
	switch x := t.rng.Float64(); {
	case x < 0.7:
		for at < n-1 && t.holds(tier, t.name(p, at, 1)) {
			at++
		}
	case x > 0.85:
		at = t.rng.IntN(n)
	}
	if at > 0 && !(tier == Device && t.has(Orphans)) && !t.known(t.name(p, at-1, 1)) {
		at = 0
	}
	e := t.blocks(p, at, min(n, at+1+t.rng.IntN(6)), 1, tier)
	for i, h := range e.Hashes {
		single := e
		single.Hashes, single.Tokens = e.Hashes[i:i+1], t.tokens(p, at+i, at+i+1)
		if i > 0 {
			single.Parent = e.Hashes[i-1]
		}
		t.stored[h] = single
		if _, again := t.since[h]; !again {
			t.told = append(t.told, h)
		}
		t.since[h] = struct{}{}
	}
	return e
}

// blocks is the store of blocks from at to end of a prompt, counted in chunks.
func (t *Traffic) blocks(p Prompt, at, end, chunk int, tier Tier) Event {
	e := Event{Tokens: t.tokens(p, at*chunk, end*chunk), Medium: t.medium(tier), LoRA: p.LoRA, Salt: p.Salt, Pairs: p.Pairs}
	if chunk > 1 {
		e.BlockSize = new(chunk * t.o.BlockSize)
	}
	if at > 0 {
		e.Parent = t.name(p, at*chunk-1, chunk)
	}
	for i := at; i < end; i++ {
		e.Hashes = append(e.Hashes, t.name(p, (i+1)*chunk-1, chunk))
	}
	t.sayGroup(&e)
	t.sayOwner(tier, &e)
	t.hold(tier, e)
	return e
}

// sayOwner puts a store into somebody's memory: below the device mostly that of the
// cache owner, who knows the engine's blocks too.
func (t *Traffic) sayOwner(tier Tier, e *Event) {
	e.Owner = ""
	if !t.has(Owners) {
		return
	}
	x := t.rng.Float64()
	if tier == Device {
		x *= 4
	}
	switch {
	case x < 0.6:
		e.Owner = cacheOwner
	case x < 0.7:
		e.Owner = "framework"
	}
}

// sayGroup puts a store in a main group, or in none.
func (t *Traffic) sayGroup(e *Event) {
	if !t.has(Groups) || t.rng.Float64() < 0.5 {
		return
	}
	e.Group = new(0)
	if t.has(Kinds) {
		e.Group, e.Kind = new(t.rng.IntN(2)), new("full_attention")
		if _, learned := t.truth.main[*e.Group]; learned && t.rng.Float64() < 0.5 {
			e.Kind = nil
		}
	}
}

func (t *Traffic) lowerStore(p Prompt) Event {
	x := t.rng.Float64()
	if x < 0.45 && t.has(Tokenless) {
		if e, ok := t.tokenless(); ok {
			return e
		}
	}
	if n := len(p.seqs) / 2; x < 0.7 && n > 0 && t.has(Chunks) {
		at := t.rng.IntN(n)
		if at > 0 && !t.known(t.name(p, 2*at-1, 2)) {
			at = 0
		}
		e := t.blocks(p, at, min(n, at+1+t.rng.IntN(3)), 2, Host)
		for _, h := range e.Hashes {
			t.since[h] = struct{}{}
		}
		return e
	}
	if x < 0.9 {
		return t.store(p, Host)
	}
	return t.store(p, t.lower)
}

// tokenless is a store that only names blocks the engine has told of.
func (t *Traffic) tokenless() (Event, bool) {
	tier := Host
	if t.rng.Float64() < 0.2 {
		tier = t.lower
	}
	e := Event{Tokens: []int64{}, BlockSize: new(0), Medium: t.medium(tier)}
	for range min(12, len(t.told)) {
		h := t.told[t.rng.IntN(len(t.told))]
		if t.truth.Knows(h) && !slices.Contains(e.Hashes, h) && len(e.Hashes) < 4 {
			e.Hashes = append(e.Hashes, h)
		}
	}
	if len(e.Hashes) == 0 {
		return e, false
	}
	t.sayOwner(tier, &e)
	t.hold(tier, e)
	t.alias(e.Hashes)
	return e, true
}

// alias gives hashes their long names, or not.
func (t *Traffic) alias(hashes []Hash) {
	if !t.has(Aliases) || t.o.Profile != VLLM || t.rng.Float64() < 0.5 {
		return
	}
	for i, h := range hashes {
		b := binary.BigEndian.AppendUint64(make([]byte, 0, 32), Mix(h.bits))
		b = binary.BigEndian.AppendUint64(b, Mix(h.bits+1))
		b = binary.BigEndian.AppendUint64(b, Mix(h.bits+2))
		hashes[i] = Bytes(binary.BigEndian.AppendUint64(b, h.bits))
	}
}

// again stores a device block a second time: another copy, or another content
// under the same name.
func (t *Traffic) again(p Prompt, changed bool) Event {
	held := t.held[Device]
	if len(held) == 0 {
		return t.store(p, Device)
	}
	h := held[t.rng.IntN(len(held))]
	e, ok := t.stored[h.hash]
	if !ok {
		return t.remove(p)
	}
	e.Medium, e.Group, e.Kind = t.medium(Device), h.group, nil
	if changed {
		e.Tokens = slices.Clone(e.Tokens)
		e.Tokens[0] = (e.Tokens[0] + 1) % Vocab
		t.stored[h.hash] = e
	}
	t.sayOwner(Device, &e)
	t.hold(Device, e)
	return e
}

// remove drops copies of one tier and group; an engine that holds nothing stores.
func (t *Traffic) remove(p Prompt) Event {
	if t.has(Unknown) && t.rng.Float64() < 0.02 {
		return Event{Op: Remove, Hashes: []Hash{Int(t.rng.Uint64())}}
	}
	var full []Tier
	for tier := range tiers {
		if len(t.held[tier]) > 0 {
			full = append(full, tier)
		}
	}
	if len(full) == 0 {
		return t.store(p, Device)
	}
	tier := full[t.rng.IntN(len(full))]
	first := t.drop(tier, t.rng.IntN(len(t.held[tier])))
	e := Event{Op: Remove, Hashes: []Hash{first.hash}, Medium: t.medium(tier), Group: first.group, Owner: first.owner}
	if t.has(Remaining) && t.rng.Float64() < 0.2 {
		e.Remaining = []int{t.rng.IntN(2)}
		t.keep(tier, first, e.Remaining[0])
		return e
	}
	for range []int{0, 0, 0, 1, 2, 7}[t.rng.IntN(6)] {
		if n := len(t.held[tier]); n > 0 {
			if at := t.rng.IntN(n); t.held[tier][at].with(first) {
				e.Hashes = append(e.Hashes, t.drop(tier, at).hash)
			}
		}
	}
	if tier == Host {
		t.alias(e.Hashes)
	}
	return e
}

func (t *Traffic) clear() Event {
	e := Event{Op: Clear}
	t.sayOwner(Host, &e)
	whose, _ := t.truth.owner(e)
	for tier := range tiers {
		if whose == cacheOwner || t.o.Profile != VLLM || tier == Device {
			t.held[tier] = slices.DeleteFunc(t.held[tier], func(h holding) bool {
				return h.owner == whose
			})
		}
	}
	t.forget()
	return e
}

// noise is an event that must change nothing.
func (t *Traffic) noise(p Prompt) Event {
	tokens := t.tokens(p, 0, 1)
	e := Event{Hashes: []Hash{Int(t.rng.Uint64())}, Tokens: tokens, Pairs: p.Pairs}
	switch x := t.rng.IntN(7); {
	case x == 6 && t.has(Owners):
		e.Owner = "somebody"
	case x == 0 && t.has(Media):
		e.Medium = "QUANTUM"
	case x == 1 && t.has(Locality):
		e.Locality = "REMOTE"
	case x == 2 && t.has(Kinds):
		e.Group, e.Kind = new(2), new("sliding_window")
	case x == 3 && t.has(Groups) && len(t.held[Device]) > 0: // the window's copy of a block goes
		held := t.held[Device][t.rng.IntN(len(t.held[Device]))]
		e = Event{Op: Remove, Hashes: []Hash{held.hash}, Group: new(2)}
	case x == 4:
		e.Hashes = nil
	default:
		e.Tokens = tokens[:len(tokens)-1]
		if len(e.Tokens) == 0 {
			e.Tokens = append(tokens, 1)
		}
	}
	return e
}

// bad is a value that is no event.
func (t *Traffic) bad() Event {
	values := []any{
		[]any{"NoSuchEvent", []any{1, 2}, nil},
		map[string]any{"type": "BlockStored", "block_hashes": 7},
		[]any{"BlockStored", 1},
		[]any{},
		"oops",
		-7,
		nil,
	}
	return Event{Op: Raw, Wire: Wire{Value: values[t.rng.IntN(len(values))]}}
}

func (t *Traffic) tokens(p Prompt, at, end int) []int64 {
	var out []int64
	for _, x := range p.Tokens[at*t.o.BlockSize : end*t.o.BlockSize+p.over()] {
		out = append(out, int64(x))
	}
	return out
}

// medium is what the engine calls a tier.
func (t *Traffic) medium(tier Tier) string {
	switch tier {
	case Host:
		if t.o.Profile == SGLang {
			return "CPU_PINNED"
		}
		return "CPU"
	case Disk:
		if t.o.Profile == SGLang {
			return "DISK"
		}
		return "STORAGE"
	case External:
		return "EXTERNAL"
	}
	return ""
}

// known tells whether a store may lean on a block.
func (t *Traffic) known(h Hash) bool {
	_, ok := t.since[h]
	return ok && t.truth.Knows(h)
}

func (t *Traffic) forget() {
	t.told = nil
	t.since = map[Hash]struct{}{}
}

func (t *Traffic) holds(tier Tier, h Hash) bool {
	return slices.ContainsFunc(t.held[tier], func(x holding) bool { return x.hash == h })
}

func (t *Traffic) hold(tier Tier, e Event) {
	owner, _ := t.truth.owner(e)
	for _, h := range e.Hashes {
		t.held[tier] = append(t.held[tier], holding{h, e.Group, owner})
	}
}

// drop lets go of one copy.
func (t *Traffic) drop(tier Tier, at int) holding {
	h := t.held[tier][at]
	t.held[tier] = slices.Delete(t.held[tier], at, at+1)
	return h
}

// keep leaves n copies of a block where there was at least one.
func (t *Traffic) keep(tier Tier, h holding, n int) {
	t.held[tier] = slices.DeleteFunc(t.held[tier], func(x holding) bool {
		return x.hash == h.hash && x.with(h)
	})
	for range n {
		t.held[tier] = append(t.held[tier], h)
	}
}

// with tells whether two copies are counted together.
func (h holding) with(o holding) bool {
	return h.owner == o.owner && (h.group == o.group || h.group != nil && o.group != nil && *h.group == *o.group)
}
