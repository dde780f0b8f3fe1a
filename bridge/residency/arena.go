package residency

import "unsafe"

// arena has cells by number, from 1 on. It grows a chunk at a time: a slice that grows
// as a whole would have its source wait while millions of cells are copied, and a
// quarter of it would be spare room.
type arena struct {
	chunks []*[chunkCells]cell
	n      uint32 // cells; 0 is no cell, but has room
}

// chunkCells is 4 KiB of cells: most sources of a large fleet may have few.
const chunkCells = 64

func (a *arena) at(id uint32) *cell { return &a.chunks[id/chunkCells][id%chunkCells] }

// add returns the number of the first of k new cells in a row.
func (a *arena) add(k int) uint32 {
	a.n = max(a.n, 1)
	id := a.n
	a.n += uint32(k)
	for len(a.chunks)*chunkCells < int(a.n) {
		a.chunks = append(a.chunks, new([chunkCells]cell))
	}
	return id
}

// bytes returns how much memory the arena takes.
func (a *arena) bytes() int {
	return len(a.chunks)*chunkCells*int(unsafe.Sizeof(cell{})) + cap(a.chunks)*int(unsafe.Sizeof(a.chunks[0]))
}
