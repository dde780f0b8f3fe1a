package event

import (
	"bytes"
	"errors"
	"slices"
	"testing"
)

func TestNames(t *testing.T) {
	seqs := []uint64{0, 1, 1 << 63, 1<<64 - 1}
	got, err := ParseNamesRequest(NamesRequest(seqs))
	if err != nil || !slices.Equal(got, seqs) {
		t.Errorf("request: %v, %v, want %v", got, err, seqs)
	}
	names := []EngineHash{{Bits: 1<<64 - 1}, {Name: []byte{1, 2, 3}}, {Name: []byte("text"), Text: true}, {Bits: 0}}
	back, err := ParseNames(AppendNames(nil, names))
	if err != nil || len(back) != len(names) {
		t.Fatalf("reply: %v, %v", back, err)
	}
	for i, n := range back {
		if n.Bits != names[i].Bits || n.Text != names[i].Text || !bytes.Equal(n.Name, names[i].Name) {
			t.Errorf("name %d: %+v, want %+v", i, n, names[i])
		}
	}
	if _, err := ParseNamesRequest(make([]byte, 7)); !errors.Is(err, ErrRecord) {
		t.Errorf("a request of 7 bytes: %v", err)
	}
	whole := AppendNames(nil, names)
	for n := range len(whole) {
		if _, err := ParseNames(whole[:n]); !errors.Is(err, ErrRecord) {
			t.Errorf("a reply cut after %d bytes: %v", n, err)
		}
	}
}
