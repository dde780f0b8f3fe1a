package model

import (
	"math"
	"slices"
	"strings"

	"github.com/kvmesh/kvmesh/indexer/hash"
)

// Tier is where copies of a block are, in the order in which tiers continue
// each other.
type Tier uint8

// Tiers, fastest first.
const (
	Device Tier = iota
	Host
	Disk
	External
	tiers
)

// String returns the name of the tier.
func (t Tier) String() string {
	return [...]string{"device", "host", "disk", "external", "none"}[min(t, tiers)]
}

// tierOf returns the tier that a medium means, false if it means none.
func tierOf(medium string) (Tier, bool) {
	switch strings.ToUpper(medium) {
	case "", "GPU", "DEVICE":
		return Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return Host, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE":
		return Disk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return External, true
	}
	return tiers, false
}

// Source is what one rank of one engine instance has announced.
type Source struct {
	// CacheOwner says that the source has a cache owner. It is set before the
	// first event.
	CacheOwner bool

	blockSize int
	profile   Profile

	blocks map[Hash]block // every block that is known, wherever its copies are
	copies map[place]int  // never 0
	main   map[int]bool   // groups that stores gave a kind
}

// block is the content of an engine block.
type block struct {
	parent Hash
	locals []uint64 // one for each index block in it
	behind []uint64 // sequence hash of the block before, if that went with an earlier life
}

// place is where copies are counted.
type place struct {
	tier  Tier
	owner string
	group group
	hash  Hash
}

// group is a cache group, or that none was said.
type group struct {
	said  bool
	index int
}

// New returns an empty Source. blockSize is that of the index, in tokens.
func New(blockSize int, p Profile) *Source {
	s := &Source{blockSize: blockSize, profile: p}
	s.Reset()
	return s
}

// Reset forgets everything.
func (s *Source) Reset() {
	s.blocks = map[Hash]block{}
	s.copies = map[place]int{}
	s.main = map[int]bool{}
}

// Restart begins a new life of the engine: what is left is the memory of the cache
// owner, and where in their prompts the blocks in it are.
func (s *Source) Restart() {
	kept, done := New(s.blockSize, s.profile), map[Hash][]uint64{}
	for p, n := range s.copies {
		if p.owner == cacheOwner {
			kept.copies[p] = n
			kept.blocks[p.hash] = s.blocks[p.hash]
		}
	}
	for h, b := range kept.blocks {
		if _, known := kept.blocks[b.parent]; !known && !b.parent.IsZero() && s.Knows(h) {
			b.behind = b.before(s.sequence(b.parent, done))
			b.parent = Hash{}
			kept.blocks[h] = b
		}
	}
	if len(kept.copies) > 0 {
		kept.main = s.main
	}
	s.blocks, s.copies, s.main = kept.blocks, kept.copies, kept.main
}

// before returns the sequence hash that a block follows: the last one of its
// parent's, or what it was in an earlier life.
func (b *block) before(parent []uint64) []uint64 {
	if b.behind != nil {
		return b.behind
	}
	return parent[max(0, len(parent)-1):]
}

// Apply takes the next event of the engine.
func (s *Source) Apply(e Event) {
	switch e.Op {
	case Store:
		s.store(e)
	case Remove:
		s.remove(e)
	case Clear:
		owner, ok := s.owner(e)
		for p := range s.copies {
			if ok && p.owner == owner && (owner == cacheOwner || s.profile != VLLM || p.tier == Device) {
				s.setCopies(p, 0)
			}
		}
	}
}

func (s *Source) store(e Event) {
	if e.Kind != nil && e.Group != nil {
		s.main[*e.Group] = isMain(*e.Kind)
	}
	tier, ok := tierOf(e.Medium)
	_, owned := s.owner(e)
	if !ok || !owned || !local(e) || !s.counts(e) || len(e.Hashes) == 0 {
		return
	}
	hashes := s.names(e.Hashes)
	if len(e.Tokens) == 0 {
		if !slices.ContainsFunc(hashes, func(h Hash) bool { return !s.Knows(h) }) {
			s.addCopies(tier, e, hashes)
		}
		return
	}
	parent := e.Parent.under(s.profile)
	if !distinct(append(slices.Clone(hashes), parent)) {
		return
	}
	contents := s.contents(e)
	if len(contents) == 0 {
		return
	}
	for i, h := range hashes {
		before, known := s.blocks[h]
		if known && before.parent == parent && before.behind == nil && slices.Equal(before.locals, contents[i]) {
			parent = h // it is there already, as most are that a long prompt is told again of
			continue
		}
		if s.Knows(h) && s.behind(parent, h) { // it can't be its own ancestor
			hashes = hashes[:i]
			break
		}
		placed := before.behind != nil && !parent.IsZero() && !s.Knows(parent) && slices.Equal(before.locals, contents[i])
		if !placed { // else it is where it was, in a life that told its parent
			s.blocks[h] = block{parent: parent, locals: contents[i]}
		}
		parent = h
	}
	s.addCopies(tier, e, hashes)
}

// behind tells whether a block is another one, or follows it.
func (s *Source) behind(h, from Hash) bool {
	path, _, _ := s.path(h, nil)
	return slices.Contains(path, from)
}

// contents returns the local hashes of each engine block of a store, nil if its
// tokens do not fill its blocks exactly.
func (s *Source) contents(e Event) [][]uint64 {
	size, over := s.blockSize, 0
	if e.BlockSize != nil {
		size = *e.BlockSize
	}
	if e.Pairs {
		over = 1
	}
	if size <= 0 || size%s.blockSize != 0 || size > len(e.Tokens) || size*len(e.Hashes) != len(e.Tokens)-over {
		return nil
	}
	tokens := make([]uint32, len(e.Tokens))
	for i, t := range e.Tokens {
		if t < 0 || t > math.MaxUint32 {
			return nil
		}
		tokens[i] = uint32(t)
	}
	seed := hash.SeedOf(e.LoRA, e.Salt)
	out := make([][]uint64, len(e.Hashes))
	for i := range out {
		var mm []uint64
		if i < len(e.MM) {
			mm = e.MM[i]
		}
		for at := i * size; at < (i+1)*size; at += s.blockSize {
			out[i] = append(out[i], hash.Local(tokens[at:at+s.blockSize+over], seed, mm))
		}
	}
	return out
}

func (s *Source) remove(e Event) {
	tier, ok := tierOf(e.Medium)
	owner, owned := s.owner(e)
	if !ok || !owned || !local(e) || !s.counts(Event{Group: e.Group}) {
		return
	}
	for i, h := range s.names(e.Hashes) {
		p := place{tier, owner, groupOf(e), h}
		n := s.copies[p]
		switch {
		case n == 0: // of nothing: it leaves no debt
		case i < len(e.Remaining):
			s.setCopies(p, e.Remaining[i])
		default:
			s.setCopies(p, n-1)
		}
	}
}

func (s *Source) addCopies(t Tier, e Event, hashes []Hash) {
	owner, _ := s.owner(e)
	for _, h := range hashes {
		s.copies[place{t, owner, groupOf(e), h}]++
	}
}

func (s *Source) setCopies(p place, n int) {
	if n > 0 {
		s.copies[p] = n
		return
	}
	delete(s.copies, p)
	if s.Knows(p.hash) {
		return
	}
	for other := range s.copies {
		if other.hash == p.hash {
			return
		}
	}
	delete(s.blocks, p.hash) // it waits for a parent, and nobody holds it any more
}

// counts tells whether an event is of a main attention group.
func (s *Source) counts(e Event) bool {
	if e.Kind != nil {
		return isMain(*e.Kind)
	}
	if e.Group == nil {
		return true
	}
	main, learned := s.main[*e.Group]
	return main || !learned && *e.Group == 0
}

func (s *Source) names(hashes []Hash) []Hash {
	out := make([]Hash, len(hashes))
	for i, h := range hashes {
		out[i] = h.under(s.profile)
	}
	return out
}

// Knows tells whether the block and all its ancestors have been announced and
// not been forgotten, whoever holds them.
func (s *Source) Knows(h Hash) bool {
	_, _, ok := s.path(h.under(s.profile), nil)
	return ok && !h.IsZero()
}

// path returns the blocks from h up to, and without, the first one in done, and
// that one; up to the root if none is. It fails if an ancestor is unknown.
func (s *Source) path(h Hash, done map[Hash][]uint64) (path []Hash, end Hash, ok bool) {
	for !h.IsZero() && done[h] == nil {
		b, known := s.blocks[h]
		if !known || len(path) == len(s.blocks) { // or it is its own ancestor
			return nil, Hash{}, false
		}
		path = append(path, h)
		h = b.parent
	}
	return path, h, true
}

// sequence returns the sequence hashes of an engine block, nil while one of its
// ancestors is unknown. done holds the results of earlier calls.
func (s *Source) sequence(h Hash, done map[Hash][]uint64) []uint64 {
	path, end, ok := s.path(h, done)
	if !ok {
		return nil
	}
	seqs := done[end]
	for _, h := range slices.Backward(path) {
		b := s.blocks[h]
		seqs = extend(b.before(seqs), b.locals)
		done[h] = seqs
	}
	return seqs
}

// extend returns the sequence hashes of blocks that follow those named by
// prefix, which is empty at the start of a prompt.
func extend(prefix, locals []uint64) []uint64 {
	var out []uint64
	for _, l := range locals {
		if n := len(prefix); n > 0 {
			l = hash.Next(prefix[n-1], l)
		}
		out = append(out, l)
		prefix = out
	}
	return out
}

// Resident returns the sequence hashes that each tier holds; a tier that holds
// nothing has no entry.
func (s *Source) Resident() map[Tier]map[uint64]bool {
	out := map[Tier]map[uint64]bool{}
	done := map[Hash][]uint64{}
	for p := range s.copies {
		for _, seq := range s.sequence(p.hash, done) {
			if out[p.tier] == nil {
				out[p.tier] = map[uint64]bool{}
			}
			out[p.tier][seq] = true
		}
	}
	return out
}

// Digest is the count of the resident blocks of a tier and the wrapping sum of
// their mixes.
type Digest struct {
	Count, Sum uint64
}

// Digest returns the digest of each tier that holds anything. mix mixes a
// sequence hash with its tier.
func (s *Source) Digest(mix func(seq uint64, t Tier) uint64) map[Tier]Digest {
	out := map[Tier]Digest{}
	for t, seqs := range s.Resident() {
		var d Digest
		for seq := range seqs {
			d.Count++
			d.Sum += mix(seq, t)
		}
		out[t] = d
	}
	return out
}

// cacheOwner is the owner of memory that outlives the engine.
const cacheOwner = "kvcr"

// owner returns whose memory an event is about, false if nobody's.
func (s *Source) owner(e Event) (string, bool) {
	switch {
	case e.Owner == "" || e.Owner == "framework" || e.Owner == cacheOwner && !s.CacheOwner:
		return "", true
	case e.Owner == cacheOwner:
		return cacheOwner, true
	}
	return "", false
}

func groupOf(e Event) group {
	if e.Group == nil {
		return group{}
	}
	return group{said: true, index: *e.Group}
}

func isMain(kind string) bool {
	return kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention"
}

func local(e Event) bool { return e.Locality == "" || e.Locality == "LOCAL" }

func distinct(hashes []Hash) bool {
	seen := map[Hash]bool{}
	for _, h := range hashes {
		if seen[h] {
			return false
		}
		seen[h] = true
	}
	return true
}
