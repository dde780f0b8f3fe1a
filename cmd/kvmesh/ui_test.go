package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// boardEngine runs an engine that stores, on all tiers, and removes for as long as
// the test goes on, and is registered as w0 of the model m.
func boardEngine(t *testing.T, url string, headers ...string) *mock.Engine {
	t.Helper()
	e, err := mock.NewEngine(mock.Options{BlockSize: 4, ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	if _, err := command(t, "register", "--server", url, "--token", apiToken, "--model", "m", "--block-size", "4", "--worker", "w0="+e.Addr()+",replay="+e.ReplayAddr()); err != nil {
		t.Fatal(err)
	}
	waiting, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := e.WaitSubscribers(waiting, 1); err != nil {
		t.Fatal(err)
	}
	prompt := func(first int64) []int64 {
		return []int64{first, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	}
	hashes := func(first int64) (out []model.Hash) {
		for i := range 4 {
			out = append(out, model.Int(uint64(first)*100+uint64(i)))
		}
		return out
	}
	publish := func(events ...model.Event) {
		if _, err := e.Publish(events...); err != nil {
			t.Error(err)
		}
	}
	publish(model.Event{Hashes: hashes(1)[:2], Tokens: prompt(1)[:8], Medium: "GPU"}, model.Event{Hashes: hashes(1)[:3], Tokens: prompt(1)[:12], Medium: "CPU"},
		model.Event{Hashes: hashes(1), Tokens: prompt(1), Medium: "DISK"})
	background(t, func(ctx context.Context) {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for i := int64(2); ; i++ {
			select {
			case <-tick.C:
				publish(model.Event{Hashes: hashes(i), Tokens: prompt(i), Medium: "GPU"})
				if i > 40 {
					publish(model.Event{Op: model.Remove, Hashes: hashes(i - 38), Medium: "GPU"})
				}
			case <-ctx.Done():
				return
			}
		}
	})
	return e
}

// The whole dashboard, clicked through in a browser: every view shows what it is
// to show, in light and dark, on a desk and on a phone, and nothing complains.
func TestDashboard(t *testing.T) {
	b := startBrowser(t)
	natsURL := startNATS(t)
	url := startServe(t, "--nats", natsURL, "--http-token", apiToken, "--id", "replica-a")
	begin(t, "indexer", "--nats", natsURL, "--http", freeAddr(t), "--http-token", apiToken, "--id", "replica-b", "--log-level", "warn")
	boardEngine(t, url)
	if _, err := command(t, "register", "--server", url, "--token", apiToken, "--model", "m", "--block-size", "4", "--worker", "gone=tcp://"+freeAddr(t)); err != nil {
		t.Fatal(err)
	}

	b.screen(1280, 900, false, false)
	b.navigate(url + "/ui/")
	b.until("the page asks for the token", `document.getElementById("login")?.open`)
	b.shot("login")
	b.eval(`document.getElementById("token").value = ` + quoted(apiToken) + `; document.querySelector("#login button").click()`)
	b.until("the state is shown", `document.getElementById("state")?.textContent.startsWith("ready at")`)
	// The 401 before is the browser's to note, and the only thing it may.
	for _, p := range b.complaints() {
		if !strings.Contains(p, "401") {
			t.Error(p)
		}
	}

	for _, look := range []struct {
		name          string
		width, height int
		phone, dark   bool
	}{{"desk-light", 1280, 900, false, false}, {"desk-dark", 1280, 900, false, true}, {"phone-dark", 390, 844, true, true}, {"phone-light", 360, 740, true, false}} {
		b.screen(look.width, look.height, look.phone, look.dark)
		for _, view := range []string{"workers", "blocks", "replicas", "prompt", "events"} {
			b.click(`#tabs a[href="#` + view + `"]`)
			b.until(view+" is shown", `document.getElementById("view").dataset.view === `+quoted(view)+` && document.querySelector('#tabs a[aria-current]').hash === "#`+view+`"`)
			if look.name == "desk-light" || look.name == "phone-dark" {
				b.visit(view)
			}
			b.until(view+" fits the screen", `document.documentElement.scrollWidth <= innerWidth`)
			b.shot(look.name + "-" + view)
		}
		dark := b.eval(`getComputedStyle(document.body).backgroundColor`) == "rgb(18, 23, 22)"
		if dark != look.dark {
			t.Errorf("%s: dark is %v", look.name, dark)
		}
	}
	for _, p := range b.complaints() {
		t.Error(p)
	}

	// From a worker to its events, and a server that goes away and comes back.
	b.click(`#tabs a[href="#workers"]`)
	b.until("w0 is a link", `[...document.querySelectorAll("td a")].some((a) => a.textContent === "w0:0")`)
	b.eval(`[...document.querySelectorAll("td a")].find((a) => a.textContent === "w0:0").click()`)
	b.until("the link leads to the events of w0", `document.querySelectorAll("#tail li").length > 3 && document.getElementById("source").value.includes("instance=w0")`)
}

func (b *browser) click(selector string) {
	b.t.Helper()
	b.eval(`document.querySelector(` + quoted(selector) + `).click()`)
}

// visit uses a view, and waits until it shows what it is to show.
func (b *browser) visit(view string) {
	b.t.Helper()
	text := `document.getElementById("view").innerText`
	switch view {
	case "workers":
		b.until("both workers are listed with rates", `/w0:0/.test(`+text+`) && /gone:0/.test(`+text+`) && /w0:0[^]*[1-9][0-9.]*\/s/.test(`+text+`)`)
		b.until("the worker that is gone says what is wrong", `[...document.querySelectorAll("td.wide")].some((c) => c.textContent.includes("refused"))`)
		b.eval(`(() => { const s = document.getElementById("field-state"); s.value = "active"; s.dispatchEvent(new Event("input")); })()`)
		b.until("the filter leaves active workers only", `/w0:0/.test(`+text+`) && !/gone:0/.test(`+text+`)`)
		b.eval(`(() => { const s = document.getElementById("field-state"); s.value = "all"; s.dispatchEvent(new Event("input")); })()`)
	case "blocks":
		b.until("there are charts", `document.querySelectorAll("svg.chart").length === 3 && document.querySelector("svg.chart polygon.device").points.length >= 4`)
		b.until("blocks of all tiers are counted", `["device", "host", "disk"].every((t) => [...document.querySelectorAll(".tile")].some((e) => e.innerText.includes(t) && !/^0\b/.test(e.innerText)))`)
	case "replicas":
		b.until("both replicas are there", `/replica-a/.test(`+text+`) && /replica-b/.test(`+text+`) && /this one/.test(`+text+`)`)
		b.until("their digests are equal", `document.querySelector(".tile .good")?.textContent === "equal"`)
	case "prompt":
		b.until("a model is proposed", `document.getElementById("field-model").value === "m"`)
		b.eval(`(() => { document.getElementById("field-kind").value = "token_ids"; document.getElementById("field-content").value = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]"; document.querySelector("main button").click(); })()`)
		b.until("the bars are drawn", `document.querySelectorAll("#holders rect.device, #holders rect.host, #holders rect.disk").length === 3 && /16 tokens, 100 %/.test(`+text+`)`)
		b.eval(`(() => { document.getElementById("field-kind").value = "block_hashes"; document.getElementById("field-content").value = "14643705804678351452"; document.querySelector("main button").click(); })()`)
		b.until("the same by hash", `/of 4 tokens/.test(`+text+`) && /4 tokens, 100 %/.test(`+text+`)`)
		b.eval(`(() => { document.getElementById("field-content").value = "x"; document.getElementById("field-model").value = "nobody"; document.querySelector("main button").click(); })()`)
		b.until("an error is shown", `document.querySelector("main .error").textContent.includes("nobody")`)
		b.eval(`document.getElementById("field-model").value = "m"; document.getElementById("field-content").value = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"; document.getElementById("field-kind").value = "token_ids"; document.querySelector("main button").click()`)
		b.until("the bars are back", `document.querySelectorAll("#holders .holder").length === 1`)
		b.complaintsBut("404")
	case "events":
		b.until("workers can be chosen", `document.querySelectorAll("#source option").length === 3`)
		b.eval(`(() => { const s = document.getElementById("source"); s.value = [...s.options].find((o) => o.text.startsWith("w0:0")).value; s.dispatchEvent(new Event("input")); })()`)
		b.until("records come", `document.querySelectorAll("#tail li").length >= 5 && /stored device/.test(`+text+`)`)
	}
}

// complaintsBut fails for what the page has complained about, but for a status
// that the test has provoked.
func (b *browser) complaintsBut(status string) {
	b.t.Helper()
	for _, p := range b.complaints() {
		if !strings.Contains(p, status) {
			b.t.Error(p)
		}
	}
}

func quoted(text string) string {
	data, _ := json.Marshal(text)
	return string(data)
}

// Pages are for everyone, data is not; nothing may be loaded from elsewhere.
func TestDashboardIsGuarded(t *testing.T) {
	url := startServe(t, "--http-token", apiToken)
	get := func(path, token string) *http.Response {
		t.Helper()
		req, err := http.NewRequest(http.MethodGet, url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp
	}
	for _, path := range []string{"/ui", "/ui/", "/ui/app.js", "/ui/style.css"} {
		resp := get(path, "")
		csp := resp.Header.Get("Content-Security-Policy")
		if resp.StatusCode != 200 || !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
			t.Errorf("%s: %s, %q", path, resp.Status, csp)
		}
	}
	for path, want := range map[string]int{
		"/ui/data/history": 200, "/ui/data/history?after=now": 400, "/ui/data/replicas": 200,
		"/ui/data/tail": 400, "/ui/data/tail?model=m&group=g&instance=i&rank=x": 400, "/ui/nothing": 404, "/ui/../metrics": 200,
	} {
		if resp := get(path, apiToken); resp.StatusCode != want {
			t.Errorf("%s: %s, want %d", path, resp.Status, want)
		}
		if resp := get(path, "wrong"); strings.HasPrefix(path, "/ui/data") && resp.StatusCode != 401 {
			t.Errorf("%s without token: %s", path, resp.Status)
		}
	}
}

// What the pages read, without a browser: the past grows, replicas are compared,
// a tail ends with the server.
func TestDashboardData(t *testing.T) {
	url := startServe(t)
	boardEngine(t, url)
	var past struct {
		Tiers   []string `json:"tiers"`
		Samples []struct {
			T      int64    `json:"t"`
			Blocks []uint64 `json:"blocks"`
		} `json:"samples"`
	}
	read := func(path string, into any) {
		t.Helper()
		resp, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	eventually(t, "the past has blocks", func() bool {
		read("/ui/data/history", &past)
		return len(past.Samples) > 0 && past.Samples[len(past.Samples)-1].Blocks[0] > 0
	})
	last := past.Samples[len(past.Samples)-1].T
	read("/ui/data/history?after="+fmt.Sprint(last), &past)
	for _, s := range past.Samples {
		if s.T <= last {
			t.Errorf("a sample of %d after %d", s.T, last)
		}
	}
	resp, err := http.Get(url + "/ui/data/tail?model=m&group=default&instance=w0&rank=0")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := make(chan string)
	go func() {
		defer close(lines)
		buffer := make([]byte, 64<<10)
		for {
			n, err := resp.Body.Read(buffer)
			if err != nil {
				return
			}
			lines <- string(buffer[:n])
		}
	}()
	seen := ""
	for !strings.Contains(seen, `"op":"stored"`) {
		select {
		case more, ok := <-lines:
			if !ok {
				t.Fatalf("the tail ends with %q", seen)
			}
			seen += more
		case <-time.After(patience):
			t.Fatalf("no record in the tail: %q", seen)
		}
	}
	go func() {
		for range lines { // until the server is stopped by the end of the test
		}
	}()
}
