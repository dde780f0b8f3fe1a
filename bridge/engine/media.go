package engine

import (
	"fmt"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// maxMedium is the length of the longest medium that a table can hold.
const maxMedium = 32

// Media maps the names that engines give to media to tiers. It is made once
// and safe for concurrent use.
type Media struct {
	tiers map[string]event.Tier // by name in upper case
}

// NewMedia returns the table of known media, changed by overrides from medium
// to the name of a tier, such as "FS" to "disk". Neither cares for case. It
// fails on the name of a medium that is empty, longer than 32 bytes or not
// ASCII, on one given twice, and on an unknown tier.
func NewMedia(overrides map[string]string) (*Media, error) {
	m := &Media{tiers: map[string]event.Tier{
		"GPU": event.Device, "DEVICE": event.Device,
		"CPU": event.Host, "CPU_PINNED": event.Host, "CPU_TIER1": event.Host,
		"CPU_TIER2": event.Disk, "DISK": event.Disk, "NVME": event.Disk, "STORAGE": event.Disk,
		"EXTERNAL": event.External, "NETWORK": event.External, "REMOTE": event.External, "SHARED": event.External,
	}}
	given := make(map[string]bool, len(overrides))
	for medium, name := range overrides {
		var buf [maxMedium]byte
		key := string(upper(&buf, medium))
		if key == "" {
			return nil, fmt.Errorf("engine: medium %q: want 1 to %d ASCII characters", medium, maxMedium)
		}
		tier, ok := event.ParseTier(name)
		if !ok {
			return nil, fmt.Errorf("engine: medium %q: no tier is called %q", medium, name)
		}
		if given[key] {
			return nil, fmt.Errorf("engine: medium %q is given twice", key)
		}
		given[key] = true
		m.tiers[key] = tier
	}
	return m, nil
}

// Tier returns the tier of a medium. No medium, absent or empty, is the
// device; one that the table does not hold is TierUnknown.
func (m *Media) Tier(medium []byte) event.Tier {
	if len(medium) == 0 {
		return event.Device
	}
	var buf [maxMedium]byte
	if t, ok := m.tiers[string(upper(&buf, medium))]; ok {
		return t
	}
	return TierUnknown
}

// upper writes a name in upper case to buf; nil if it does not fit or is not
// ASCII.
func upper[T string | []byte](buf *[maxMedium]byte, name T) []byte {
	if len(name) > len(buf) {
		return nil
	}
	for i := range len(name) {
		c := name[i]
		switch {
		case c > 0x7f:
			return nil
		case c >= 'a' && c <= 'z':
			c -= 'a' - 'A'
		}
		buf[i] = c
	}
	return buf[:len(name)]
}
