package prefix

import (
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// members are the holders.
type members struct {
	list   []*member // by Holder; nil where there is none
	free   []Holder
	roster *roster // of list; nil if it has changed
}

// member is one holder.
type member struct {
	source *event.Source
	shown  bool
	gone   bool
	held   [event.Tiers]int
	pages  []uint32 // that it has blocks in, and others that it had some in
	limit  int      // length of pages at which the others are taken out
}

// roster is the holders as queries see them.
type roster struct {
	shown   []uint64 // bit set, by Holder
	sources []*event.Source
}

func (r *roster) shows(h Holder) bool { return r.shown[h/64]>>(h%64)&1 == 1 }

func (m *members) snapshot() *roster {
	if m.roster != nil {
		return m.roster
	}
	r := &roster{shown: make([]uint64, len(m.list)/64+1), sources: make([]*event.Source, len(m.list))}
	for h, at := range m.list {
		if at == nil {
			continue
		}
		r.sources[h] = at.source
		if at.shown {
			r.shown[h/64] |= 1 << (h % 64)
		}
	}
	m.roster = r
	return r
}

const minPages = 32

// Add returns a new holder for a source. It has nothing, and queries don't see it
// before it is shown.
func (w Writer) Add(source *event.Source) Holder {
	m := &w.x.members
	m.roster = nil
	at := &member{source: source, limit: minPages}
	if n := len(m.free); n > 0 {
		h := m.free[n-1]
		m.free = m.free[:n-1]
		m.list[h] = at
		return h
	}
	m.list = append(m.list, at)
	return Holder(len(m.list) - 1)
}

// Show has queries see a holder, or not.
func (w Writer) Show(h Holder, shown bool) {
	if m := w.x.members.list[h]; m.shown != shown {
		m.shown = shown
		w.x.members.roster = nil
	}
}

// Drop takes a holder away, with all that it has. Queries see that at once; the
// memory is given back by and by.
func (w Writer) Drop(h Holder) {
	w.Show(h, false)
	w.x.members.list[h].gone = true
	w.x.leaving = append(w.x.leaving, h)
}

// joins notes that a holder has something in a page.
func (x *Index) joins(h Holder, id uint32) {
	m := x.members.list[h]
	if n := len(m.pages); n > 0 && m.pages[n-1] == id {
		return
	}
	if len(m.pages) >= m.limit {
		m.pages = x.pagesOf(m.pages, h)
		m.limit = max(minPages, 2*len(m.pages))
	}
	m.pages = append(m.pages, id)
}

// pagesOf takes out of a list what is in it twice, and pages that the holder has
// nothing in.
func (x *Index) pagesOf(list []uint32, h Holder) []uint32 {
	slices.Sort(list)
	list = slices.Compact(list)
	return slices.DeleteFunc(list, func(id uint32) bool {
		p := x.pages.get(id)
		return p == nil || x.pages.state[id].retired || !p.holds(h)
	})
}
