package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"regexp"
	"slices"
	"strings"
)

// schemas checks JSON against schemas of an OpenAPI 3.1 document, with what of
// JSON Schema that document uses, and notes which properties it has seen. A
// keyword that it does not know is an error.
type schemas struct {
	doc  map[string]any
	seen map[string]bool // where a property is described
}

func at(v any, path ...string) any {
	for _, p := range path {
		m, _ := v.(map[string]any)
		v = m[p]
	}
	return v
}

// resolve follows references, and returns where the schema is described.
func (s *schemas) resolve(schema map[string]any, where string) (map[string]any, string) {
	for {
		to, ok := schema["$ref"].(string)
		if !ok {
			return schema, where
		}
		target, ok := at(s.doc, strings.Split(strings.TrimPrefix(to, "#/"), "/")...).(map[string]any)
		if !ok {
			panic("no schema " + to)
		}
		schema, where = target, strings.TrimPrefix(to, "#/components/schemas/")
	}
}

// check returns what is wrong with a value, at its path.
func (s *schemas) check(schema map[string]any, value any, where, path string) (wrong []string) {
	schema, where = s.resolve(schema, where)
	fail := func(format string, args ...any) { wrong = append(wrong, path+": "+fmt.Sprintf(format, args...)) }
	for _, keyword := range slices.Sorted(maps.Keys(schema)) {
		want := schema[keyword]
		switch keyword {
		case "description", "default", "required", "additionalProperties":
		case "type":
			types, ok := want.([]any)
			if !ok {
				types = []any{want}
			}
			if !slices.ContainsFunc(types, func(t any) bool { return isType(t, value) }) {
				fail("%v is no %v", value, want)
			}
		case "enum":
			if !slices.Contains(want.([]any), value) {
				fail("%v is none of %v", value, want)
			}
		case "minimum", "maximum":
			if n, ok := value.(json.Number); ok {
				if c := number(n).Cmp(number(want.(json.Number))); keyword == "minimum" && c < 0 || keyword == "maximum" && c > 0 {
					fail("%v is beyond the %s, %v", n, keyword, want)
				}
			}
		case "minLength":
			if text, ok := value.(string); ok && number(json.Number(fmt.Sprint(len(text)))).Cmp(number(want.(json.Number))) < 0 {
				fail("%q is too short", text)
			}
		case "pattern":
			if text, ok := value.(string); ok && !regexp.MustCompile(want.(string)).MatchString(text) {
				fail("%q does not match %v", text, want)
			}
		case "anyOf":
			if !slices.ContainsFunc(want.([]any), func(o any) bool { return len(s.check(o.(map[string]any), value, where, path)) == 0 }) {
				fail("%v fits none of anyOf", value)
			}
		case "items":
			items, _ := value.([]any)
			for i, item := range items {
				wrong = append(wrong, s.check(want.(map[string]any), item, where+"[]", fmt.Sprintf("%s[%d]", path, i))...)
			}
		case "properties":
		default:
			fail("the schema has %q, which this test does not know", keyword)
		}
	}
	if object, ok := value.(map[string]any); ok {
		wrong = append(wrong, s.members(schema, object, where, path)...)
	}
	return wrong
}

// members checks the members of an object.
func (s *schemas) members(schema, object map[string]any, where, path string) (wrong []string) {
	required, _ := schema["required"].([]any)
	for _, name := range required {
		if _, ok := object[name.(string)]; !ok {
			wrong = append(wrong, fmt.Sprintf("%s: %v is missing", path, name))
		}
	}
	properties, _ := schema["properties"].(map[string]any)
	for name, v := range object {
		if p, ok := properties[name].(map[string]any); ok {
			s.seen[where+"."+name] = true
			wrong = append(wrong, s.check(p, v, where+"."+name, path+"."+name)...)
			continue
		}
		switch more := schema["additionalProperties"].(type) {
		case bool:
			if !more {
				wrong = append(wrong, fmt.Sprintf("%s.%s is not described", path, name))
			}
		case map[string]any:
			wrong = append(wrong, s.check(more, v, where+"{}", path+"."+name)...)
		}
	}
	return wrong
}

// described returns all properties that a schema describes.
func (s *schemas) described(schema map[string]any, where string, into map[string]bool) {
	schema, where = s.resolve(schema, where)
	if into["("+where] {
		return
	}
	into["("+where] = true // a schema may hold itself
	defer delete(into, "("+where)
	properties, _ := schema["properties"].(map[string]any)
	for name, p := range properties {
		into[where+"."+name] = true
		s.described(p.(map[string]any), where+"."+name, into)
	}
	options, _ := schema["anyOf"].([]any)
	for _, o := range options {
		s.described(o.(map[string]any), where, into)
	}
	if items, ok := schema["items"].(map[string]any); ok {
		s.described(items, where+"[]", into)
	}
	if more, ok := schema["additionalProperties"].(map[string]any); ok {
		s.described(more, where+"{}", into)
	}
}

func isType(name, value any) bool {
	switch v := value.(type) {
	case nil:
		return name == "null"
	case string:
		return name == "string"
	case bool:
		return name == "boolean"
	case json.Number:
		return name == "number" || name == "integer" && number(v).IsInt()
	case []any:
		return name == "array"
	}
	return name == "object"
}

// number returns a number exactly: 64-bit integers don't fit in a float64.
func number(n json.Number) *big.Rat {
	r, ok := new(big.Rat).SetString(n.String())
	if !ok {
		panic("no number: " + n)
	}
	return r
}
