package cache

import "container/list"

// host is the blocks of the host tier, the least recently used one first.
type host struct {
	size   int
	blocks map[uint64]*list.Element // of *hostBlock, by sequence hash
	order  *list.List
}

type hostBlock struct {
	seq  uint64
	pins int // requests that load it
}

func newHost(size int) host {
	return host{size: size, blocks: map[uint64]*list.Element{}, order: list.New()}
}

func (h *host) has(seq uint64) bool { return h.blocks[seq] != nil }

// pin keeps a block, which there must be, until unpin.
func (h *host) pin(seq uint64) {
	at := h.blocks[seq]
	at.Value.(*hostBlock).pins++
	h.order.MoveToBack(at)
}

func (h *host) unpin(seq uint64) { h.blocks[seq].Value.(*hostBlock).pins-- }

func (h *host) unpinAll() {
	for _, at := range h.blocks {
		at.Value.(*hostBlock).pins = 0
	}
}

// put adds a block, and returns the one that has to go for it, if any. It fails
// if none can.
func (h *host) put(seq uint64) (gone uint64, evicted, ok bool) {
	if len(h.blocks) >= h.size {
		at := h.order.Front()
		for at != nil && at.Value.(*hostBlock).pins > 0 {
			at = at.Next()
		}
		if at == nil {
			return 0, false, false
		}
		gone, evicted = at.Value.(*hostBlock).seq, true
		delete(h.blocks, gone)
		h.order.Remove(at)
	}
	h.blocks[seq] = h.order.PushBack(&hostBlock{seq: seq})
	return gone, evicted, true
}

func (h *host) names() []uint64 {
	out := make([]uint64, 0, len(h.blocks))
	for seq := range h.blocks {
		out = append(out, seq)
	}
	return out
}
