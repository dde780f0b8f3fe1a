package load

import (
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// chunk is part of a state.
type chunk struct {
	ops []byte
	n   int
}

// answer tells a replica this one's state, and those of the dead, whom it can't
// ask.
func (s *Shared) answer(to string) {
	type told struct {
		about  string
		seq    uint64
		chunks []chunk
	}
	var all []told
	s.mu.Lock()
	s.tellings++
	number := s.tellings
	for _, p := range s.order {
		if p == s.self || p.dead {
			all = append(all, told{p.id, p.seq, s.state(p)})
		}
	}
	s.mu.Unlock()
	for _, t := range all {
		for i, c := range t.chunks {
			data := appendHead(make([]byte, 0, len(c.ops)+128), 6, kindState, s.self.id)
			data = mpack.AppendStr(data, t.about)
			data = mpack.AppendUint(data, t.seq)
			data = mpack.AppendUint(data, number)
			data = mpack.AppendUint(data, uint64(i))
			data = mpack.AppendUint(data, uint64(len(t.chunks)))
			data = append(mpack.AppendArray(data, c.n), c.ops...)
			if s.publish(subjectTo(s.cfg.Group, to), data) != nil {
				return // it asks again
			}
		}
	}
}

// state returns all that a replica has told, as operations.
func (s *Shared) state(p *peer) []chunk {
	now, most := time.Now(), s.most()
	out := []chunk{{}}
	c := &out[0]
	added := func(b []byte) {
		c.ops = b
		c.n++
		if len(b) >= most {
			out = append(out, chunk{})
			c = &out[len(out)-1]
		}
	}
	for _, r := range p.reservations {
		added(appendAdd(c.ops, r, s.workers[r.slot].key, now))
	}
	for key, m := range p.marks {
		added(appendMark(c.ops, key, m, now))
	}
	for id, e := range s.sessions {
		if e.writer == p.id || p == s.self && s.peers[e.writer] == nil {
			added(appendSession(c.ops, id, e, now))
		}
	}
	return out
}

// state is a part of a state, as it was read.
type state struct {
	about   string
	seq     uint64
	number  uint64
	i, n    uint64
	content []operation
}

func readState(r *mpack.Reader) (s state, err error) {
	s = state{about: string(r.Str()), seq: r.Uint(), number: r.Uint(), i: r.Uint(), n: r.Uint()}
	if r.Err() != nil || s.n == 0 || s.n > 1<<16 || s.i >= s.n || s.about == "" || len(s.about) > MaxID {
		return s, fmt.Errorf("%w: state", ErrMessage)
	}
	s.content, err = readOps(r)
	return s, err
}

// takeState takes in a part of a state: the sender's own, or that of a dead
// replica, as the sender knows it.
func (s *Shared) takeState(from *peer, st *state) error {
	if st.about == s.self.id {
		return nil // of a time when we seemed to be dead
	}
	p := from
	if st.about != from.id {
		p = s.peers[st.about]
		if p != nil && (!p.dead || p.seq >= st.seq) {
			return nil // we know better
		}
		if p == nil {
			p = s.meet(st.about)
			p.dead = true // until it says something
		}
	}
	y := &p.sync
	this := telling{from.id, st.number, st.seq}
	if st.seq < p.seq || y.chunks != nil && y.telling.from == from.id && st.number < y.telling.n {
		return nil // of before
	}
	if y.chunks == nil || y.telling != this || uint64(len(y.chunks)) != st.n {
		y.telling, y.chunks, y.have = this, make([][]operation, st.n), 0
	}
	if y.chunks[st.i] == nil {
		y.chunks[st.i] = st.content
		y.have++
	}
	if uint64(y.have) < st.n {
		return nil
	}
	chunks := y.chunks
	y.chunks, y.have = nil, 0
	s.restore(p, st.seq, chunks)
	return nil
}

// restore puts a state in the place of what was known of a replica.
func (s *Shared) restore(p *peer, seq uint64, all [][]operation) {
	now := time.Now()
	reservations, marks := map[string]*operation{}, map[markKey]*operation{}
	for _, ops := range all {
		for i := range ops {
			switch o := &ops[i]; o.kind {
			case opAdd:
				reservations[o.r.key] = o
			case opMark:
				marks[o.key] = o
			case opSession:
				s.apply(p, o)
			}
		}
	}
	// What the state has not is over, marks on it too. What it has anew or
	// otherwise is put in its place; marks of others on it stand.
	for key, r := range p.reservations {
		if o := reservations[key]; o == nil || o.r.stamp != r.stamp {
			s.drop(r)
		}
	}
	for _, q := range s.order {
		for key := range q.marks {
			if key.owner == p.id && key.stamp <= seq && (reservations[key.id] == nil || reservations[key.id].r.stamp != key.stamp) {
				delete(q.marks, key)
			}
		}
	}
	p.seq = max(p.seq, seq)
	for key, o := range reservations {
		if r := p.reservations[key]; r != nil {
			r.done, r.outputs, r.decay, r.deadline = o.r.done, o.r.outputs, o.r.decay, o.r.deadline
			s.weigh(r)
		} else {
			s.apply(p, o)
		}
	}
	for key := range p.marks {
		if marks[key] == nil {
			delete(p.marks, key)
			s.marked(key)
		}
	}
	for _, o := range marks {
		s.apply(p, o)
	}
	s.forgetEarly(p)
	y := &p.sync
	y.behind, y.since = false, time.Time{}
	if p.dead {
		s.bury(p, now)
		return
	}
	s.catchUp(p)
	if len(y.early) > 0 {
		s.missing(p)
	}
}

// forgetEarly drops what came early of a replica and is in its state already.
func (s *Shared) forgetEarly(p *peer) {
	y := &p.sync
	for first, data := range y.early {
		if _, n := opsOf(data); first+n-1 <= p.seq {
			delete(y.early, first)
			y.bytes -= len(data)
		}
	}
}

// opsOf returns a reader at the operations of a message that was taken before,
// and how many they are.
func opsOf(data []byte) (r mpack.Reader, n uint64) {
	r = mpack.NewReader(data)
	r.Array()
	r.Uint()
	r.Uint()
	r.Str()
	r.Uint()
	return r, r.Uint()
}
