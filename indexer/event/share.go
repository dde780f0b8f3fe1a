package event

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Share is the partitions that an indexer serves. The zero Share is all of them.
type Share []Part

// Part is one partition, or all of a model's.
type Part struct {
	Partition
	All bool // every routing group of the model
}

// anyGroup stands for all routing groups of a model where a part is text.
const anyGroup = "*"

// String returns model:group, or model:* for all groups.
func (p Part) String() string {
	if p.All {
		return p.Model + ":" + anyGroup
	}
	return p.Partition.String()
}

// ParseShare reads parts, several of them in one text separated by commas: model,
// model:* or model:group. The last colon separates, so that a model with a colon
// in its name needs one behind it. What another part has too is left out.
func ParseShare(texts []string) (Share, error) {
	var all Share
	for _, text := range texts {
		for _, one := range strings.Split(text, ",") {
			one = strings.TrimSpace(one)
			p := Part{Partition: Partition{Model: one}, All: true}
			if at := strings.LastIndexByte(one, ':'); at >= 0 {
				p.Model, p.Group = one[:at], one[at+1:]
				p.All = p.Group == anyGroup
			}
			if p.All {
				p.Group = ""
			}
			switch {
			case p.Model == "":
				return nil, fmt.Errorf("%q names no model: want model or model:group", one)
			case !p.All && p.Group == "":
				return nil, fmt.Errorf("%q names no routing group: want model or model:group", one)
			case len(p.Model) > MaxName || len(p.Group) > MaxName:
				return nil, errors.New("a name is too long")
			}
			all = append(all, p)
		}
	}
	var s Share
	for _, p := range all {
		whole := Part{Partition{Model: p.Model}, true}
		if !slices.Contains(s, p) && (p.All || !slices.Contains(all, whole)) {
			s = append(s, p)
		}
	}
	return s, nil
}

// Has tells whether a partition is in the share.
func (s Share) Has(p Partition) bool {
	if len(s) == 0 {
		return true
	}
	for i := range s {
		if s[i].Model == p.Model && (s[i].All || s[i].Group == p.Group) {
			return true
		}
	}
	return false
}

// Names tells whether the share has a partition with the name that
// Partition.String returns. Names of models may have colons, so that there may be
// several such.
func (s Share) Names(partition string) bool {
	for at := range len(partition) {
		if partition[at] == ':' && s.Has(Partition{partition[:at], partition[at+1:]}) {
			return true
		}
	}
	return false
}

// Whole tells whether the share is all partitions.
func (s Share) Whole() bool { return len(s) == 0 }

// Strings returns the parts as text; nothing if the share is all partitions.
func (s Share) Strings() []string {
	out := make([]string, 0, len(s))
	for _, p := range s {
		out = append(out, p.String())
	}
	return out
}

// Subjects returns the subjects <prefix>.<model>.<group> of all partitions in the
// share, with NATS's wildcards. No subject matches two of them.
func (s Share) Subjects(prefix string) []string {
	if len(s) == 0 {
		return []string{prefix + ".*.*"}
	}
	out := make([]string, 0, len(s))
	for _, p := range s {
		group := anyGroup
		if !p.All {
			group = Escape(p.Group)
		}
		out = append(out, prefix+"."+Escape(p.Model)+"."+group)
	}
	return out
}
