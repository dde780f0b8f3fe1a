package event

import (
	"slices"
	"testing"
)

func TestShare(t *testing.T) {
	for _, c := range []struct {
		texts    []string
		want     []string
		subjects []string
		has, not []Partition
	}{
		{nil, nil, []string{"q.*.*"}, []Partition{{"a", "g"}, {"", ""}}, nil},
		{[]string{"a,b:g"}, []string{"a:*", "b:g"}, []string{"q.a.*", "q.b.g"}, []Partition{{"a", "g"}, {"a", "x"}, {"b", "g"}}, []Partition{{"b", "x"}, {"c", "g"}, {"a:g", ""}}},
		{[]string{"org/m:8b:*", "x:y:z"}, []string{"org/m:8b:*", "x:y:z"}, []string{"q.org=2Fm=3A8b.*", "q.x=3Ay.z"}, []Partition{{"org/m:8b", "d"}, {"x:y", "z"}}, []Partition{{"org/m", "8b"}, {"x", "z"}}},
		// What is in another part already would be subscribed to twice.
		{[]string{"a:g", "a", "a:*", "a:h"}, []string{"a:*"}, []string{"q.a.*"}, []Partition{{"a", "g"}}, []Partition{{"b", "g"}}},
		{[]string{"a:g,a:g"}, []string{"a:g"}, []string{"q.a.g"}, []Partition{{"a", "g"}}, []Partition{{"a", "h"}}},
	} {
		s, err := ParseShare(c.texts)
		if err != nil {
			t.Errorf("%q: %v", c.texts, err)
			continue
		}
		if got := s.Strings(); !slices.Equal(got, c.want) {
			t.Errorf("%q is %q, want %q", c.texts, got, c.want)
		}
		if got := s.Subjects("q"); !slices.Equal(got, c.subjects) {
			t.Errorf("%q: subjects %q, want %q", c.texts, got, c.subjects)
		}
		if s.Whole() != (len(c.want) == 0) {
			t.Errorf("%q: whole is %v", c.texts, s.Whole())
		}
		for _, p := range c.has {
			if !s.Has(p) || !s.Names(p.String()) {
				t.Errorf("%q does not have %v", c.texts, p)
			}
		}
		for _, p := range c.not {
			if s.Has(p) || p.Group != "" && s.Names(p.String()) {
				t.Errorf("%q has %v", c.texts, p)
			}
		}
	}
	for _, bad := range []string{"", "a,,b", ":g", "a:", "a,", string(make([]byte, MaxName+1))} {
		if s, err := ParseShare([]string{bad}); err == nil {
			t.Errorf("%.20q is read as %q", bad, s.Strings())
		}
	}
}
