package engine

import "strings"

// Profile is what must be known about an engine because its events don't say
// it. The zero Profile is that of an unknown engine.
type Profile struct {
	// Name is the name of the engine in lower case, empty if unknown.
	Name string
	// ClearsOnlyDevice: AllBlocksCleared empties the device tier and leaves the
	// offloaded tiers as they are. For all other engines it empties all tiers of
	// the rank.
	ClearsOnlyDevice bool
	// ShortBytes: a block hash of 32 bytes names the same block as the integer in
	// its last 8 bytes, big-endian. The Decoder turns it into that integer.
	ShortBytes bool
}

// ProfileOf returns the profile of an engine by its name in any case: vllm,
// sglang, trtllm (or tensorrt-llm), dynamo, mooncake. The empty name is that of
// an unknown engine. Other names are not ok.
func ProfileOf(name string) (p Profile, ok bool) {
	switch name = strings.ToLower(name); name {
	case "vllm":
		return Profile{Name: name, ClearsOnlyDevice: true, ShortBytes: true}, true
	case "", "sglang", "trtllm", "dynamo", "mooncake":
		return Profile{Name: name}, true
	case "tensorrt-llm":
		return Profile{Name: "trtllm"}, true
	}
	return Profile{}, false
}
