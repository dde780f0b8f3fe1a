package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// decodeBody reads a request's body, which has to be one JSON object. Errors wrap
// errRequest, or say that the body is too large.
func decodeBody(body io.Reader, into any) error {
	data, err := io.ReadAll(body)
	if err != nil {
		return fmt.Errorf("%w: %w", errRead, err)
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
