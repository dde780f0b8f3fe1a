package engine

import (
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func TestMedia(t *testing.T) {
	m := media(t, nil)
	for medium, want := range tierByMedium {
		if _, ok := disputed[medium]; ok {
			want = "unknown"
		}
		for _, spelling := range []string{medium, strings.ToLower(medium), strings.ToTitle(medium)} {
			if got := m.Tier([]byte(spelling)); got.String() != want {
				t.Errorf("medium %q is tier %s, want %s", spelling, got, want)
			}
		}
	}
	if m.Tier(nil) != event.Device {
		t.Error("no medium is not the device")
	}
	for _, unknown := range []string{"CXL", "p2p-xyz", "GPU ", " ", "\x00", "GPÜ", "ＧＰＵ", strings.Repeat("G", 33), strings.Repeat("x", 5000)} {
		if got := m.Tier([]byte(unknown)); got != TierUnknown {
			t.Errorf("medium %q is tier %s", unknown, got)
		}
	}
}

func TestMediaOverrides(t *testing.T) {
	longest := strings.Repeat("m", 32)
	m := media(t, map[string]string{"fs": "Disk", "Storage": "external", "cpu": "host", longest: "host"})
	for medium, want := range map[string]event.Tier{"FS": event.Disk, "STORAGE": event.External, "CPU": event.Host, longest: event.Host, "NVME": event.Disk, "OBJ": TierUnknown} {
		if got := m.Tier([]byte(medium)); got != want {
			t.Errorf("medium %q is tier %s, want %s", medium, got, want)
		}
	}
	if media(t, nil).Tier([]byte("FS")) != TierUnknown {
		t.Error("an override changed another table")
	}
	for _, bad := range []map[string]string{
		{"": "device"}, {"FS": ""}, {"FS": "ssd"}, {"FS": "unknown"}, {"FS": "disk", "fs": "disk"}, {strings.Repeat("x", 33): "disk"}, {"PLATTE-ß": "disk"},
	} {
		if _, err := NewMedia(bad); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

func TestProfiles(t *testing.T) {
	for name, want := range map[string]Profile{
		"":             {},
		"vllm":         {Name: "vllm", ClearsOnlyDevice: true, ShortBytes: true},
		"VLLM":         {Name: "vllm", ClearsOnlyDevice: true, ShortBytes: true},
		"SGLang":       {Name: "sglang"},
		"trtllm":       {Name: "trtllm"},
		"TensorRT-LLM": {Name: "trtllm"},
		"dynamo":       {Name: "dynamo"},
		"mooncake":     {Name: "mooncake"},
	} {
		if got, ok := ProfileOf(name); !ok || got != want {
			t.Errorf("%q: %+v, %v, want %+v", name, got, ok, want)
		}
	}
	for _, name := range []string{"llm", "vllm ", "vllm-0.8"} {
		if p, ok := ProfileOf(name); ok {
			t.Errorf("%q: %+v", name, p)
		}
	}
}

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range Reasons {
		if name := r.String(); name == "" || name == "unknown" || seen[name] {
			t.Errorf("reason %d is called %q", r, name)
		} else {
			seen[name] = true
		}
	}
	if Reasons.String() != "unknown" || Kind(9).String() != "unknown" {
		t.Error("what is no reason or kind has a name")
	}
}
