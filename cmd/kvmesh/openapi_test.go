package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/api/openapi"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

const apiToken = "open sesame"

// described is the document, a live server, and what was seen of both.
type described struct {
	t        *testing.T
	url      string
	token    string
	media    string // of requests
	schemas  schemas
	statuses map[string]bool // "POST /query 200"
}

func newDescribed(t *testing.T, url string) *described {
	d := &described{t: t, url: url, token: apiToken, media: "application/json", schemas: schemas{seen: map[string]bool{}}, statuses: map[string]bool{}}
	decoder := json.NewDecoder(bytes.NewReader(openapi.Document()))
	decoder.UseNumber()
	if err := decoder.Decode(&d.schemas.doc); err != nil {
		t.Fatal(err)
	}
	return d
}

// operation returns the description of a route.
func (d *described) operation(method, path string) map[string]any {
	path = d.route(path)
	op, ok := at(d.schemas.doc, "paths", path, strings.ToLower(method)).(map[string]any)
	if !ok {
		d.t.Fatalf("%s %s is not described", method, path)
	}
	return op
}

// route returns the route of a path, which may have an id in it.
func (d *described) route(path string) string {
	path, _, _ = strings.Cut(path, "?")
	paths := d.schemas.doc["paths"].(map[string]any)
	if paths[path] != nil {
		return path
	}
	for route := range paths {
		if ok, _ := regexp.MatchString("^"+strings.ReplaceAll(regexp.QuoteMeta(route), `\{id\}`, "[^/]+")+"$", path); ok {
			return route
		}
	}
	return path
}

// call makes a request, checks it, if it is to succeed, and the reply against the
// document, and returns the reply.
func (d *described) call(method, path string, body any, want int) any {
	d.t.Helper()
	op := d.operation(method, path)
	var data []byte
	switch b := body.(type) {
	case nil:
	case string:
		data = []byte(b)
	default:
		data, _ = json.Marshal(body)
	}
	if body != nil && want < 300 {
		schema := at(op, "requestBody", "content", "application/json", "schema").(map[string]any)
		for _, wrong := range d.schemas.check(schema, decoded(d.t, data), "", "request") {
			d.t.Errorf("%s %s %.200s: %s", method, path, data, wrong)
		}
	}
	req, err := http.NewRequest(method, d.url+path, bytes.NewReader(data))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+d.token)
	req.Header.Set("Content-Type", d.media)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	reply, err := io.ReadAll(resp.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	if resp.StatusCode != want {
		d.t.Fatalf("%s %s %.200s: %s, want %d: %s", method, path, data, resp.Status, want, reply)
	}
	route := d.route(path)
	d.statuses[fmt.Sprintf("%s %s %d", method, route, want)] = true
	content, ok := at(op, "responses", fmt.Sprint(want), "content").(map[string]any)
	if !ok {
		d.t.Fatalf("%s %s: %d is not described", method, path, want)
	}
	media, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	schema, ok := at(content, media, "schema").(map[string]any)
	if !ok {
		d.t.Fatalf("%s %s: a reply of %q is not described", method, path, media)
	}
	if media != "application/json" {
		return string(reply)
	}
	value := decoded(d.t, reply)
	for _, wrong := range d.schemas.check(schema, value, "", "reply") {
		d.t.Errorf("%s %s: %s\n%.500s", method, path, wrong, reply)
	}
	return value
}

func decoded(t *testing.T, data []byte) (v any) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(&v); err != nil {
		t.Fatalf("%v: %.200s", err, data)
	}
	return v
}

// routes returns the routes in the source of packages with handlers.
func routes(t *testing.T, dirs ...string) []string {
	pattern := regexp.MustCompile(`"((?:GET|POST|PUT|PATCH|DELETE) /[^" ]*)"`)
	found := map[string]bool{"GET /openapi.json": true}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, m := range pattern.FindAllStringSubmatch(string(source), -1) {
				found[m[1]] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// Every route is described, and nothing else is.
func TestOpenAPIHasAllRoutes(t *testing.T) {
	d := newDescribed(t, "")
	var have []string
	for path, methods := range d.schemas.doc["paths"].(map[string]any) {
		for method := range methods.(map[string]any) {
			have = append(have, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(have)
	if want := routes(t, "../../indexer/api", "../../replica"); !slices.Equal(have, want) {
		t.Errorf("indexer/api/openapi/openapi.json describes\n%s\nthe routes are\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}

// Every route, status and field of the document occurs at a live server, and
// what the server says is described.
func TestOpenAPIIsTrue(t *testing.T) {
	d := newDescribed(t, startServe(t, "--http-token", apiToken))
	d.engine()
	d.queries()
	d.reads()
	d.selections()
	d.refusals()
	d.unregister()
	d.notReady()
	d.elsewhere()
	d.split()
	d.complete()
}

// engine registers an engine that has blocks in all tiers and sends something
// that is dropped, and one that is not there.
func (d *described) engine() {
	d.t.Helper()
	e, err := mock.NewEngine(mock.Options{BlockSize: 4, Topic: "kv", ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		d.t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(e.Stop)
	d.call("POST", "/register", map[string]any{"instance_id": "w0", "endpoint": e.Addr(), "replay_endpoint": e.ReplayAddr(), "model_name": "m",
		"routing_group": "default", "block_size": 4, "dp_rank": 0, "topic": "kv", "engine": "vllm", "labels": map[string]string{"zone": "a"}, "ttl_seconds": 3600,
		"tenant_id": "default", "additionalsalt": nil, "cache_owner": "auto"}, 201)
	waiting, cancel := context.WithTimeout(d.t.Context(), patience)
	defer cancel()
	d.call("POST", "/register", map[string]any{"instance_id": 7, "endpoint": "tcp://" + freeAddr(d.t), "modelname": "m", "block_size": 4}, 201)
	if err := e.WaitSubscribers(waiting, 1); err != nil {
		d.t.Fatal(err)
	}
	for i, medium := range []string{"GPU", "CPU", "DISK", "EXTERNAL"} {
		hashes, tokens := []model.Hash{model.Int(11), model.Int(12)}, []int64{1, 2, 3, 4, 5, 6, 7, 8}
		if i > 0 {
			hashes, tokens = hashes[:1], tokens[:4]
		}
		if _, err := e.Publish(model.Event{Hashes: hashes, Tokens: tokens, Medium: medium}, model.Event{Op: model.Raw, Wire: model.Wire{Value: "?"}}); err != nil {
			d.t.Fatal(err)
		}
	}
	eventually(d.t, "all that happened to w0 shows", func() bool {
		l := d.listener(d.call("GET", "/workers", nil, 200), "w0")
		return at(l, "cache_owner", "state") == "attached" && l["applied_engine_seq"] == json.Number("3") && l["engine_seq"] == json.Number("3") && len(l["dropped"].(map[string]any)) > 0
	})
	eventually(d.t, "the engine that is not there shows", func() bool {
		return d.listener(d.call("GET", "/workers", nil, 200), "7")["last_error"] != nil
	})
}

func (d *described) listener(workers any, instance string) map[string]any {
	for _, w := range workers.([]any) {
		if fmt.Sprint(at(w, "instance_id")) == instance {
			return at(w, "listeners", "0").(map[string]any)
		}
	}
	d.t.Fatalf("no worker %s in %v", instance, workers)
	return nil
}

func (d *described) queries() {
	d.t.Helper()
	seq := at(d.call("GET", "/digest", nil, 200), "log_seq")
	a := d.call("POST", "/query", map[string]any{"model_name": "m", "routing_group": "default", "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8, 9},
		"lora_name": nil, "cache_salt": nil, "min_log_seq": seq}, 200)
	if got := at(a, "instances", "w0", "gpu"); got != json.Number("8") {
		d.t.Errorf("w0 holds %v tokens, want 8", got)
	}
	d.call("POST", "/query", map[string]any{"model": "m", "token_ids": []int{1, 2, 3, 4}, "lora_name": "other", "cache_salt": "other"}, 200)
	const local = "14643705804678351452"
	for _, h := range []string{local, "-3803038269031200164", `"` + local + `"`} {
		a := d.call("POST", "/query_by_hash", `{"model_name":"m","routing_group":null,"lora_name":null,"cache_salt":null,"min_log_seq":0,"block_hashes":[`+h+`]}`, 200)
		if got := at(a, "instances", "w0", "dp", "0"); got != json.Number("4") {
			d.t.Errorf("of %s w0 holds %v tokens, want 4", h, got)
		}
	}
	d.call("POST", "/query_by_hash", `{"model":"m","block_hashes":[]}`, 200)
	for path, prompt := range map[string]string{"/query": `"token_ids":[1,2,3,4]`, "/query_by_hash": `"block_hashes":[` + local + `]`} {
		a := d.call("POST", path, `{"model_name":"m","queries":[{`+prompt+`,"top":1},{`+prompt+`,"model_name":"nobody's"}]}`, 200)
		answers, _ := at(a, "answers").([]any)
		if len(answers) != 2 || at(answers[0], "instances", "w0", "gpu") != json.Number("4") || at(answers[1], "code") != "unknown_partition" {
			d.t.Errorf("%s of two prompts: %v", path, a)
		}
	}
}

func (d *described) reads() {
	d.t.Helper()
	for _, path := range []string{"/dump", "/digest", "/peers", "/health", "/ready", "/metrics", "/openapi.json"} {
		d.call("GET", path, nil, 200)
	}
	if w := d.call("GET", "/workers?model_name=m&routing_group=nobody", nil, 200).([]any); len(w) != 0 {
		d.t.Errorf("workers of nobody: %v", w)
	}
}

func (d *described) refusals() {
	d.t.Helper()
	unknown := map[string]any{"model_name": "nobody", "token_ids": []int{1}, "block_hashes": []int{1}, "instance_id": "w0"}
	for _, path := range []string{"/register", "/unregister", "/query", "/query_by_hash"} {
		d.call("POST", path, "{", 400)
		limit := 1 << 20
		if strings.HasPrefix(path, "/query") {
			limit = 8 << 20
		}
		d.call("POST", path, `{"model_name": "`+strings.Repeat("x", limit)+`"}`, 413)
		if path != "/register" {
			d.call("POST", path, unknown, 404)
		}
	}
	d.media = "text/html"
	d.call("POST", "/query", "{}", 415)
	d.call("POST", "/query_by_hash", "{}", 415)
	d.media = "application/json"
	d.call("POST", "/register", map[string]any{"instance_id": "w0", "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4}, 409)
	d.call("POST", "/register", map[string]any{"instance_id": "w9", "endpoint": "nowhere", "model_name": "m", "block_size": 4}, 400)
	d.token = "wrong"
	for path, methods := range d.schemas.doc["paths"].(map[string]any) {
		for method, op := range methods.(map[string]any) {
			if at(op, "security") == nil {
				d.call(strings.ToUpper(method), path, nil, 401)
			} else {
				d.call(strings.ToUpper(method), path, nil, 200)
			}
		}
	}
	d.token = apiToken
}

func (d *described) unregister() {
	d.t.Helper()
	d.call("POST", "/unregister", map[string]any{"instance_id": "w0", "model_name": "m", "routing_group": "default", "dp_rank": 0}, 200)
	d.call("POST", "/unregister", map[string]any{"instance_id": "7", "modelname": "m"}, 200)
}

// notReady asks a server that can't reach NATS.
func (d *described) notReady() {
	d.t.Helper()
	addr := freeAddr(d.t)
	begin(d.t, "indexer", "--nats", "nats://"+freeAddr(d.t), "--http", addr, "--http-token", apiToken)
	d.url = "http://" + addr
	eventually(d.t, "the indexer serves HTTP", func() bool {
		_, err := command(d.t, "health", "--server", d.url)
		return err == nil
	})
	d.call("GET", "/ready", nil, 503)
	for _, path := range []string{"/query", "/query_by_hash"} {
		d.call("POST", path, map[string]any{"model_name": "m", "token_ids": []int{1}, "block_hashes": []int{1}}, 503)
	}
	d.call("GET", "/dump", nil, 503)
	d.call("POST", "/register", map[string]any{"instance_id": "w0", "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4}, 503)
	d.call("POST", "/unregister", map[string]any{"instance_id": "w0", "model_name": "m"}, 503)
	d.call("POST", "/workers", map[string]any{"worker_id": "s"}, 503)
}

// complete fails for all that is described and did not occur.
func (d *described) complete() {
	d.t.Helper()
	want := map[string]bool{}
	for path, methods := range d.schemas.doc["paths"].(map[string]any) {
		for method, op := range methods.(map[string]any) {
			for status, response := range at(op, "responses").(map[string]any) {
				if where := fmt.Sprintf("%s %s %s", strings.ToUpper(method), path, status); !d.statuses[where] {
					d.t.Errorf("%s is described, and did not occur", where)
				}
				for _, content := range at(response, "content").(map[string]any) {
					d.schemas.described(at(content, "schema").(map[string]any), "", want)
				}
			}
			if schema, ok := at(op, "requestBody", "content", "application/json", "schema").(map[string]any); ok {
				d.schemas.described(schema, "", want)
			}
		}
	}
	for _, property := range slices.Sorted(maps.Keys(want)) {
		if !d.schemas.seen[property] {
			d.t.Errorf("%s is described, and did not occur", property)
		}
	}
}
