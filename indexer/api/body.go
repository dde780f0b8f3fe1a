package api

import (
	"errors"
	"fmt"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// maxPrompts is how many prompts one call may ask about.
const maxPrompts = 1024

// prompt is what is asked about one prompt. A name that was not given is nil.
type prompt struct {
	model, group, lora, salt []byte

	tokens []uint32       // of /query
	hashes []uint64       // of /query_by_hash
	given  bool           // that of the two is given
	min    event.Position // zero: any
	top    uint64         // how many instances to answer with; 0: all
	err    error          // the first thing that was found wrong
}

// fail notes what is wrong with a member.
func (p *prompt) fail(name string, err error) {
	if p.err == nil {
		p.err = fmt.Errorf("%w: %s: %w", errRequest, name, err)
	}
}

// values is a cursor over the values of a body, whatever its format. What is of
// another type than asked for is not read, but for an error of syntax: that
// is sticky, and end returns it.
type values interface {
	// object and array read the head of one. n is for next.
	object() (n int, ok bool)
	array() (n int, ok bool)
	// next moves before the i-th member or element, counted from 0, of an
	// object or array of n, and behind that if there is none.
	next(i, n int, bracket byte) bool
	key() []byte
	null() bool
	text() (v []byte, ok bool)
	uint() (v uint64, ok bool)
	// tokens and hashes append the elements of an array to dst. The error says
	// that it is none, or which of its elements does not fit.
	tokens(dst []uint32) ([]uint32, error)
	hashes(dst []uint64) ([]uint64, error)
	// seqs is as those, for integers from 0 on, but reads the value in any case.
	seqs(dst []uint64) ([]uint64, error)
	skip()
	end() error
}

// What members have to be.
var (
	errObject = errors.New("want an object")
	errArray  = errors.New("want an array")
	errText   = errors.New("want a string")
	errUint   = errors.New("want an integer from 0 to 2^64-1")
	errSalt   = errors.New("has no meaning here: the block hashes are made with it")
	errMany   = fmt.Errorf("more than %d prompts", maxPrompts)
	errBoth   = errors.New("give it, or token_ids or block_hashes")
)

// parse reads the body of a call. The error is one of syntax: nothing is known of
// the call then.
func (w *work) parse(v values) error {
	if n, ok := v.object(); ok {
		w.members(&w.outer, v, n)
	} else {
		w.outer.fail("the body", errObject)
		v.skip()
	}
	if w.batch && w.outer.given {
		w.outer.fail("queries", errBoth)
	}
	return v.end()
}

// members reads the members of an object into p. Of members of one name the last
// counts, null is as good as nothing, and what is not known is skipped.
func (w *work) members(p *prompt, v values, n int) {
	var alias []byte
	for i := 0; v.next(i, n, '}'); i++ {
		switch string(v.key()) {
		case "model_name":
			p.model = p.text(v, "model_name")
		case "model":
			alias = p.text(v, "model")
		case "routing_group":
			p.group = p.text(v, "routing_group")
		case "lora_name":
			p.lora = p.text(v, "lora_name")
		case "cache_salt":
			p.salt = w.readSalt(p, v)
		case "min_log_seq":
			p.min.LogSeq = p.uint(v, "min_log_seq")
		case "min_log_seqs":
			p.min.LogSeqs = w.readSeqs(p, v)
		case "top":
			p.top = p.uint(v, "top")
		case w.content: // token_ids or block_hashes
			w.readContent(p, v)
		case "queries":
			w.readQueries(p, v)
		default:
			v.skip()
		}
	}
	if len(p.model) == 0 {
		p.model = alias
	}
}

func (p *prompt) text(v values, name string) []byte {
	if v.null() {
		return nil
	}
	text, ok := v.text()
	if !ok {
		p.fail(name, errText)
		v.skip()
	}
	return text
}

func (p *prompt) uint(v values, name string) uint64 {
	if v.null() {
		return 0
	}
	n, ok := v.uint()
	if !ok {
		p.fail(name, errUint)
		v.skip()
	}
	return n
}

// readSeqs reads log sequences, one a shard.
func (w *work) readSeqs(p *prompt, v values) []uint64 {
	if v.null() {
		return nil
	}
	from := len(w.seqs)
	seqs, err := v.seqs(w.seqs)
	if w.seqs = seqs; err != nil {
		p.fail("min_log_seqs", err)
	}
	return w.seqs[from:]
}

// appendUints is seqs for a cursor that has arrays.
func appendUints(dst []uint64, v values) ([]uint64, error) {
	n, ok := v.array()
	if !ok {
		v.skip()
		return dst, errArray
	}
	var err error
	for i := 0; v.next(i, n, ']'); i++ {
		seq, ok := v.uint()
		if !ok {
			if err == nil {
				err = fmt.Errorf("element %d: %w", i, errUint)
			}
			v.skip()
		}
		dst = append(dst, seq)
	}
	return dst, err
}

func (w *work) readSalt(p *prompt, v values) []byte {
	if w.content == tokenIDs {
		return p.text(v, "cache_salt")
	}
	if !v.null() {
		p.fail("cache_salt", errSalt)
		v.skip()
	}
	return nil
}

func (w *work) readContent(p *prompt, v values) {
	p.tokens, p.hashes, p.given = nil, nil, !v.null()
	if !p.given {
		return
	}
	var err error
	if w.content == tokenIDs {
		from := len(w.tokens)
		w.tokens, err = v.tokens(w.tokens)
		p.tokens = w.tokens[from:]
	} else {
		from := len(w.hashes)
		w.hashes, err = v.hashes(w.hashes)
		p.hashes = w.hashes[from:]
	}
	if err != nil {
		p.fail(w.content, err)
		v.skip()
	}
}

// readQueries reads the prompts of a call that asks about several.
func (w *work) readQueries(p *prompt, v values) {
	if p != &w.outer { // a query of queries
		v.skip()
		return
	}
	w.prompts, w.batch = w.prompts[:0], !v.null()
	if !w.batch {
		return
	}
	n, ok := v.array()
	if !ok {
		p.fail("queries", errArray)
		v.skip()
	}
	for i := 0; ok && v.next(i, n, ']'); i++ {
		if i >= maxPrompts {
			p.fail("queries", errMany)
			v.skip()
			continue
		}
		w.prompts = append(w.prompts, prompt{})
		q := &w.prompts[i]
		if members, ok := v.object(); ok {
			w.members(q, v, members)
		} else {
			q.fail("queries", errObject)
			v.skip()
		}
	}
}

// inherit gives p what is said for all prompts of the call, and not for p.
func (p *prompt) inherit(outer *prompt) {
	if p.model == nil {
		p.model = outer.model
	}
	if p.group == nil {
		p.group = outer.group
	}
	if p.lora == nil {
		p.lora = outer.lora
	}
	if p.salt == nil {
		p.salt = outer.salt
	}
	if p.min.Zero() {
		p.min = outer.min
	}
	if p.top == 0 {
		p.top = outer.top
	}
}
