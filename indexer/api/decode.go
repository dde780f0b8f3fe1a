package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
)

// decodeBody reads a request's body, which has to be one JSON object. Errors wrap
// errRequest, or say that the body is too large.
func decodeBody(body io.Reader, into any) error {
	data, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	return decodeJSON(data, into)
}

func decodeJSON(data []byte, into any) error {
	data = bytes.TrimLeft(data, " \t\r\n")
	if len(data) == 0 {
		return fmt.Errorf("%w: the body is empty, want a JSON object", errRequest)
	}
	if data[0] != '{' {
		return fmt.Errorf("%w: the body is no JSON object", errRequest)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%w: %w", errRequest, explain(err))
	}
	return nil
}

// explain says what is wrong with JSON in the words of the request instead of
// those of Go.
func explain(err error) error {
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		return fmt.Errorf("%s: a %s does not fit here", wrongType.Field, wrongType.Value)
	}
	return err
}

// instanceID is an instance id: a string or an integer in JSON.
type instanceID struct {
	text    string
	integer bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (id *instanceID) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		id.integer = false
		return json.Unmarshal(b, &id.text)
	}
	if _, err := strconv.ParseUint(string(b), 10, 64); err != nil {
		if _, err := strconv.ParseInt(string(b), 10, 64); err != nil {
			return fmt.Errorf("instance_id: want a string or an integer of 64 bits, got %.40s", b)
		}
	}
	id.text, id.integer = string(b), true
	return nil
}

// MarshalJSON implements json.Marshaler.
func (id instanceID) MarshalJSON() ([]byte, error) {
	if id.integer {
		return []byte(id.text), nil
	}
	return json.Marshal(id.text)
}

// tokenIDs is a list of token ids: integers from 0 to 2^32-1.
type tokenIDs []uint32

// UnmarshalJSON implements json.Unmarshaler.
func (t *tokenIDs) UnmarshalJSON(b []byte) error {
	out := (*t)[:0]
	if cap(out) == 0 {
		out = make([]uint32, 0, len(b)/4)
	}
	err := eachNumber(b, "token_ids", func(text []byte) error {
		v, err := strconv.ParseUint(string(text), 10, 32)
		if err != nil {
			return fmt.Errorf("token_ids: %.40s is no integer from 0 to %d", text, uint32(math.MaxUint32))
		}
		out = append(out, uint32(v))
		return nil
	})
	*t = out
	return err
}

// blockHashes is a list of hashes of 64 bits: integers, signed or unsigned, or
// decimal strings of such.
type blockHashes []uint64

// UnmarshalJSON implements json.Unmarshaler.
func (h *blockHashes) UnmarshalJSON(b []byte) error {
	out := make([]uint64, 0, len(b)/16)
	err := eachNumber(b, "block_hashes", func(text []byte) error {
		digits := string(bytes.Trim(text, `"`))
		v, err := strconv.ParseUint(digits, 10, 64)
		if err != nil {
			signed, err := strconv.ParseInt(digits, 10, 64)
			if err != nil {
				return fmt.Errorf("block_hashes: %.40s is no integer of 64 bits", text)
			}
			v = uint64(signed)
		}
		out = append(out, v)
		return nil
	})
	*h = out
	return err
}

// eachNumber calls f with each element of a JSON array of scalars, which has
// been found to be well-formed. null is an empty array.
func eachNumber(b []byte, name string, f func([]byte) error) error {
	if string(b) == "null" {
		return nil
	}
	if len(b) < 2 || b[0] != '[' {
		return fmt.Errorf("%s: want an array, got %.40s", name, b)
	}
	b = b[1 : len(b)-1]
	for len(b) > 0 {
		item := b
		if i := bytes.IndexByte(b, ','); i >= 0 {
			item, b = b[:i], b[i+1:]
		} else {
			b = nil
		}
		if item = bytes.TrimSpace(item); len(item) == 0 {
			continue // of an empty array with space in it
		}
		if err := f(item); err != nil {
			return err
		}
	}
	return nil
}
